// Products of a few rows with a matrix that is read once, where it lies.
#pragma once

#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int kVectors = 2;                             // columns of a tile, in vectors
constexpr int kMostRows = kRegisters == 32 ? 12 : 6;    // of a tile: its sums fill most registers
constexpr int kLine = 64;                               // bytes that memory moves at once
constexpr int64_t kDepth = 512;                         // rows of w that a tile goes through before it stores its sums
constexpr int kStrip = 8;                               // rows of w that few rows of x take at once, whole
constexpr int kStripsAhead = 2;                         // that are brought in before they are read
constexpr int64_t kPiece = 1024;                        // columns of a strip, at most
constexpr int64_t kSums = kPiece + kLine / 4;           // floats from a row's sums to the next one's, not all in one set

// What a tile brings into the second cache while it works: `lines` lines, one or all that a row of it has, for each
// 2^shift of its rows of w, the first ones from `at` on, those of the next row `stride` bytes further.
struct Ahead {
  const char* at = nullptr;
  int64_t stride = 0;
  int lines = 0, shift = 0;
};

// Of a row of a tile.
template <int kVectors, class T>
static constexpr int lines_of() {
  return (kVectors * kWidth * sizeof(T) + kLine - 1) / kLine;
}

// y[rows, vectors * kWidth] += x^T[rows, depth] @ w[depth, vectors * kWidth], or = if first. `keep`, if kKeep, gets
// this part of w, dense.
template <int kRows, int kVectors, bool kKeep, class T>
static void tile(const float* x, int64_t ldx, const T* w, int64_t ldw, float* y, int64_t ldy, int64_t depth,
                 bool first, Ahead ahead, float* keep) {
  constexpr int kLines = lines_of<kVectors, T>();
  Floats acc[kRows][kVectors];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVectors; j++) acc[i][j] = first ? Floats{} : load(y + i * ldy + j * kWidth);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) {
    Floats row[kVectors];
    for (int j = 0; j < kVectors; j++) {
      row[j] = load(w + k * ldw + j * kWidth);
      if (kKeep) store(keep + (k * kVectors + j) * kWidth, row[j]);
    }
    const char* line = ahead.at + (k >> ahead.shift) * ahead.stride;
    if (ahead.lines > 0) __builtin_prefetch(line, 0, 2);
    if (ahead.lines > 1)
      for (int i = 1; i < kLines; i++) __builtin_prefetch(line + i * kLine, 0, 2);
    for (int i = 0; i < kRows; i++) {
      const Floats factor = broadcast(x[k * ldx + i]);
      for (int j = 0; j < kVectors; j++) acc[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVectors; j++) store(y + i * ldy + j * kWidth, acc[i][j]);
}

template <class T>
using Tile = void (*)(const float*, int64_t, const T*, int64_t, float*, int64_t, int64_t, bool, Ahead, float*);

template <int kVectors, bool kKeep, class T, int kRows = kMostRows>
static Tile<T> tile_of(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kVectors, kKeep, T, kRows - 1>(rows);
  }
  return tile<kRows, kVectors, kKeep, T>;
}

// The share of group `i` in bringing `depth` rows of the panel at `next`: memory is to be busy while the second group
// multiplies, too.
template <int kVectors, class T>
static Ahead share_of(const Gemm& g, int64_t i, const T* next, int64_t depth) {
  constexpr int kLines = lines_of<kVectors, T>();
  static_assert(kLines <= 2);  // those of a kept part are as many or more
  const int shift = g.groups >= 4 ? 2 : 1;
  if (i >= 1 << shift) return {};
  const int64_t stride = g.n * sizeof(T);
  return {reinterpret_cast<const char*>(next) + (depth >> shift) * i * stride, stride, kLines, shift};
}

// Of several groups, all rows of `kVectors * kWidth` columns from `n` on, for `depth` rows of w from `k` on. What comes
// next lies `ahead` elements further on (0: nothing does).
template <int kVectors, class T>
static void panel(const Gemm& g, int64_t k, int64_t depth, int64_t n, int64_t ahead) {
  constexpr int64_t kColumns = kVectors * kWidth;
  alignas(64) float kept[kDepth * kColumns];
  const T* w = static_cast<const T*>(g.w) + k * g.n + n;
  for (int64_t i = 0; i < g.groups; i++) {
    const int64_t row = g.first_row(i), height = g.first_row(i + 1) - row;
    const float* x = g.x + row * g.k + k * height;
    float* y = g.y + row * g.n + n;
    const Ahead share = ahead ? share_of<kVectors>(g, i, w + ahead, depth) : Ahead{};
    if (i == 0)
      tile_of<kVectors, true, T>(height)(x, height, w, g.n, y, g.n, depth, k == 0, share, kept);
    else
      tile_of<kVectors, false, float>(height)(x, height, kept, kColumns, y, g.n, depth, k == 0, share, nullptr);
  }
}

// Whether strips have the sums of a pair's even columns, then those of its odd ones.
template <int kVectors, class T>
static constexpr bool pairs() {
  return kVectors == 2 && sizeof(T) == 2;
}

// Adds to `columns` columns of the sums, or sets them if first, what kDepth rows of w from `w` on make. `ahead`: bytes
// from there to what is brought in (0: nothing is).
template <int kRows, int kVectors, int kDepth, class T>
static void strip(const float* x, const T* w, int64_t ldw, float* sums, int64_t columns, bool first, int64_t ahead) {
  constexpr int kLines = lines_of<kVectors, T>();
  for (int64_t n = 0; n < columns; n += kVectors * kWidth) {
    Floats acc[kRows][kVectors];
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVectors; j++) acc[i][j] = first ? Floats{} : load(sums + i * kSums + n + j * kWidth);
#pragma GCC unroll 8
    for (int k = 0; k < kDepth; k++) {
      const T* at = w + k * ldw + n;
      if (ahead)
        for (int i = 0; i < kLines; i++) __builtin_prefetch((const char*)at + ahead + i * kLine, 0, 2);
      Floats row[kVectors];
      if constexpr (pairs<kVectors, T>())
        load_pair(at, row);
      else
        for (int j = 0; j < kVectors; j++) row[j] = load(at + j * kWidth);
      for (int i = 0; i < kRows; i++) {
        const Floats factor = broadcast(x[k * kRows + i]);
        for (int j = 0; j < kVectors; j++) acc[i][j] += factor * row[j];
      }
    }
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVectors; j++) store(sums + i * kSums + n + j * kWidth, acc[i][j]);
  }
}

template <class T>
using Strip = void (*)(const float*, const T*, int64_t, float*, int64_t, bool, int64_t);

template <int kVectors, int kDepth, class T, int kRows = kMostRows>
static Strip<T> strip_of(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return strip_of<kVectors, kDepth, T, kRows - 1>(rows);
  }
  return strip<kRows, kVectors, kDepth, T>;
}

// A group of rows alone: w in long pieces of its rows, as memory likes it. The first cache holds the sums.
template <int kVectors, class T>
static void strips(const Gemm& g, int64_t begin, int64_t end) {
  alignas(64) float sums[kMostRows * kSums];
  const auto whole = strip_of<kVectors, kStrip, T>(g.rows), one = strip_of<kVectors, 1, T>(g.rows);
  constexpr int64_t kAhead = kStripsAhead * kStrip;
  const int64_t depth = g.k / kStrip * kStrip;
  for (int64_t n = begin; n < end; n += kPiece) {
    const int64_t columns = end - n < kPiece ? end - n : kPiece;
    const T* w = static_cast<const T*>(g.w) + n;
    const int64_t ahead = kAhead * g.n, next_piece = n + kPiece < end ? ahead - depth * g.n + kPiece : 0;
    for (int64_t k = 0; k < depth; k += kStrip)
      whole(g.x + k * g.rows, w + k * g.n, g.n, sums, columns, k == 0,
            (k + kAhead < depth ? ahead : next_piece) * static_cast<int64_t>(sizeof(T)));
    for (int64_t k = depth; k < g.k; k++) one(g.x + k * g.rows, w + k * g.n, g.n, sums, columns, k == 0, 0);
    for (int64_t row = 0; row < g.rows; row++)
      for (int64_t i = 0; i < columns; i += kVectors * kWidth) {
        const float* from = sums + row * kSums + i;
        float* to = g.y + row * g.n + n + i;
        if (pairs<kVectors, T>())
          store_by_turns(to, load(from), load(from + kWidth));
        else
          for (int j = 0; j < kVectors; j++) store(to + j * kWidth, load(from + j * kWidth));
      }
  }
}

// Columns that fill no vector.
template <class T>
static void rest(const Gemm& g, int64_t k, int64_t depth, int64_t n, int64_t end) {
  for (; n < end; n++)
    for (int64_t group = 0; group < g.groups; group++) {
      const int64_t first = g.first_row(group), height = g.first_row(group + 1) - first;
      for (int64_t row = 0; row < height; row++) {
        float* y = g.y + (first + row) * g.n + n;
        float total = k == 0 ? 0.0f : *y;
        for (int64_t i = k; i < k + depth; i++)
          total += g.x[first * g.k + i * height + row] * value(static_cast<const T*>(g.w) + i * g.n + n);
        *y = total;
      }
    }
}

template <class T>
static void gemm_by_columns(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kVectors * kWidth;
  if (g.groups == 1) {
    const int64_t most = begin + (end - begin) / kColumns * kColumns, last = end - (end - begin) % kWidth;
    if (begin < most) strips<kVectors, T>(g, begin, most);
    if (most < last) strips<1, T>(g, most, last);
    return rest<T>(g, 0, g.k, last, end);
  }
  for (int64_t k = 0; k < g.k; k += kDepth) {
    const int64_t depth = g.k - k < kDepth ? g.k - k : kDepth;
    const bool is_last = k + 2 * kDepth > g.k;  // a whole strip follows
    int64_t n = begin;
    for (; n + kColumns <= end; n += kColumns) {
      const int64_t next_strip = is_last ? 0 : kDepth * g.n + begin - n;
      panel<kVectors, T>(g, k, depth, n, n + 2 * kColumns <= end ? kColumns : next_strip);
    }
    for (; n + kWidth <= end; n += kWidth) panel<1, T>(g, k, depth, n, 0);
    rest<T>(g, k, depth, n, end);
  }
}

// y[rows, columns] = x[rows, k] @ w[columns, k]^T: dot products, each sum in a register.
template <int kRows, int kColumns, class T>
static void dots(const float* x, const T* w, int64_t k, float* y, int64_t ldy) {
  Floats acc[kRows][kColumns] = {};
  int64_t i = 0;
  for (; i + kWidth <= k; i += kWidth) {
    Floats part[kRows];
    for (int r = 0; r < kRows; r++) part[r] = load(x + r * k + i);
    for (int c = 0; c < kColumns; c++) {
      const Floats row = load(w + c * k + i);
      for (int r = 0; r < kRows; r++) acc[r][c] += part[r] * row;
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kColumns; c++) {
      float total = sum(acc[r][c]);
      for (int64_t t = i; t < k; t++) total += x[r * k + t] * value(w + c * k + t);
      y[r * ldy + c] = total;
    }
}

template <int kColumns, class T>
static void dot_rows(const Gemm& g, int64_t n) {
  const T* w = static_cast<const T*>(g.w) + n * g.k;
  int64_t row = 0;
  for (; row + 4 <= g.rows; row += 4) dots<4, kColumns, T>(g.x + row * g.k, w, g.k, g.y + row * g.n + n, g.n);
  for (; row < g.rows; row++) dots<1, kColumns, T>(g.x + row * g.k, w, g.k, g.y + row * g.n + n, g.n);
}

template <class T>
static void gemm_by_dots(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int kColumns = kRegisters == 32 ? 4 : 2;
  int64_t n = begin;
  for (; n + kColumns <= end; n += kColumns) dot_rows<kColumns, T>(g, n);
  for (; n < end; n++) dot_rows<1, T>(g, n);
}

static void gemm(const Gemm& g, int64_t begin, int64_t end) {
  const bool f32 = g.dtype == DType::kF32;
  (g.transposed ? f32 ? gemm_by_dots<float> : gemm_by_dots<Bf16>
                : f32 ? gemm_by_columns<float> : gemm_by_columns<Bf16>)(g, begin, end);
}

}  // namespace jaxllm::JAXLLM_ISA
