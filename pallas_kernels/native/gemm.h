// Products with a matrix that is read once: of a few rows where it lies, of more by blocks that are laid out.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "dense_panels.h"
#include "gemm_tiles.h"
#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int kStrip = 8;                               // rows of w that few rows of x take at once, whole
constexpr int kStripsAhead = 2;                         // that are brought in before they are read
constexpr int64_t kPiece = 1024;                        // columns of a strip, at most
constexpr int64_t kSums = kPiece + kLine / 4;           // floats from a row's sums to the next one's, not all in one set

// Several groups of rows and whole panels of columns: while tiles multiply a block of w, they lay out the next one.
template <class U>
static void blocks(const Gemm& g, int64_t begin, int64_t end, float* kept) {
  constexpr int64_t kColumns = kVectors * kWidth;
  const bool has_many = g.groups >= kManyGroups;
  const int64_t most_units = has_many ? kManyDepth : kBlockDepth, most_depth = most_units * U::kRows;
  const int64_t most_columns = kBlock / most_units;
  float *here = kept, *there = kept + kBlock;
  const auto mover = [&](int64_t k, int64_t n) {
    Mover<U> made(static_cast<const Value<U>*>(g.w) + k * g.n + n, g.n, std::min(most_depth, g.k - k),
                  std::min(most_columns, end - n), there);
    made.is_seldom = has_many;
    return made;
  };
  Mover<U> next = mover(0, begin);
  for (int64_t n = begin; n < end; n += most_columns) {
    const int64_t columns = std::min(most_columns, end - n);
    for (int64_t k = 0; k < g.k; k += most_depth) {
      while (next.left > 0) next.move();
      std::swap(here, there);
      const int64_t depth = std::min(most_depth, g.k - k), units = next.units;
      if (k + depth < g.k)
        next = mover(k + depth, n);
      else if (n + columns < end)
        next = mover(0, n + columns);
      for (int64_t at = 0; at < columns; at += kColumns) panel<U>(g, k, depth, n + at, kColumns, here + at * units, next);
    }
  }
}

// Columns that fill no panel.
template <class U>
static void last_panel(const Gemm& g, int64_t begin, int64_t end, float* kept) {
  constexpr int64_t kColumns = kVectors * kWidth, kMostDepth = kManyDepth * U::kRows;
  for (int64_t k = 0; k < g.k; k += kMostDepth) {
    const int64_t depth = std::min(kMostDepth, g.k - k);
    for (int64_t u = 0; u * U::kRows < depth; u++) {
      Value<U> unit[U::kRows][kColumns] = {};
      for (int64_t r = 0; r < U::kRows && u * U::kRows + r < depth; r++)
        std::copy_n(static_cast<const Value<U>*>(g.w) + (k + u * U::kRows + r) * g.n + begin, end - begin, unit[r]);
      for (int64_t j = 0; j < kColumns; j += kWidth) store(kept + u * kColumns + j, U::read(unit[0] + j, kColumns));
    }
    Ahead nothing;
    panel<U>(g, k, depth, begin, end - begin, kept, nothing);
  }
}

// Of a thread, for two blocks.
static float* kept_blocks() {
  static thread_local std::unique_ptr<float[]> floats(new float[2 * kBlock + kLine / 4]);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(floats.get()) + kLine - 1) / kLine * kLine);
}

// Adds to `columns` columns of the sums, or sets them if first, what kUnits units of w from `w` on make; the last one of
// a matrix may be a single row. `ahead`: bytes from there to what is brought in (0: nothing is).
template <int kRows, int kVectors, int kUnits, bool kLast, class U>
static void strip(const float* x, const Value<U>* w, int64_t ldw, float* sums, int64_t columns, bool first, int64_t ahead) {
  constexpr int kLines = lines_of<kVectors, U>();
  for (int64_t n = 0; n < columns; n += kVectors * kWidth) {
    Floats acc[kRows][kVectors];
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVectors; j++) acc[i][j] = first ? Floats{} : load(sums + i * kSums + n + j * kWidth);
#pragma GCC unroll 8
    for (int k = 0; k < kUnits; k++) {
      const Value<U>* at = w + k * U::kRows * ldw + n;
      if (ahead)
        for (int r = 0; r < U::kRows; r++)
          for (int i = 0; i < kLines; i++) __builtin_prefetch((const char*)(at + r * ldw) + ahead + i * kLine, 0, 2);
      Floats row[kVectors];
      for (int j = 0; j < kVectors; j++)
        row[j] = kLast ? U::read_last(at + j * kWidth) : U::read(at + j * kWidth, ldw);
      for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kVectors; j++) acc[i][j] = U::add(acc[i][j], all(x + k * kRows + i), row[j]);
    }
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVectors; j++) store(sums + i * kSums + n + j * kWidth, acc[i][j]);
  }
}

template <class U>
using Strip = void (*)(const float*, const Value<U>*, int64_t, float*, int64_t, bool, int64_t);

template <int kVectors, int kUnits, bool kLast, class U, int kRows = kMostRows>
static Strip<U> strip_of(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return strip_of<kVectors, kUnits, kLast, U, kRows - 1>(rows);
  }
  return strip<kRows, kVectors, kUnits, kLast, U>;
}

// A group of rows alone: w in long pieces of its rows, as memory likes it. The first cache holds the sums.
template <int kVectors, class U>
static void strips(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int kUnitRows = U::kRows;
  alignas(64) float sums[kMostRows * kSums];
  const auto whole = strip_of<kVectors, kStrip / kUnitRows, false, U>(g.rows);
  const auto one = strip_of<kVectors, 1, false, U>(g.rows);
  constexpr int64_t kAhead = kStripsAhead * kStrip;
  const int64_t depth = g.k / kStrip * kStrip;
  for (int64_t n = begin; n < end; n += kPiece) {
    const int64_t columns = end - n < kPiece ? end - n : kPiece;
    const Value<U>* w = static_cast<const Value<U>*>(g.w) + n;
    const int64_t ahead = kAhead * g.n, next_piece = n + kPiece < end ? ahead - depth * g.n + kPiece : 0;
    const auto x = [&](int64_t k) { return g.x + k / kUnitRows * g.rows; };
    int64_t k = 0;
    for (; k < depth; k += kStrip)
      whole(x(k), w + k * g.n, g.n, sums, columns, k == 0,
            (k + kAhead < depth ? ahead : next_piece) * static_cast<int64_t>(sizeof(Value<U>)));
    for (; k + kUnitRows <= g.k; k += kUnitRows) one(x(k), w + k * g.n, g.n, sums, columns, k == 0, 0);
    if constexpr (kUnitRows > 1)
      if (k < g.k) strip_of<kVectors, 1, true, U>(g.rows)(x(k), w + k * g.n, g.n, sums, columns, k == 0, 0);
    for (int64_t row = 0; row < g.rows; row++) std::copy_n(sums + row * kSums, columns, g.at(row, n));
  }
}

// Likewise, columns that fill no vector.
template <class U>
static void rest(const Gemm& g, int64_t begin, int64_t end) {
  if (begin == end) return;
  const Value<U>* w = static_cast<const Value<U>*>(g.w) + begin;
  for (int64_t row = 0; row < g.rows; row++) {
    Floats total{};
    for (int64_t k = 0; k < g.units(); k++) {
      Value<U> padded[U::kRows][kWidth] = {};
      for (int64_t r = 0; r < U::kRows && k * U::kRows + r < g.k; r++)
        std::copy_n(w + (k * U::kRows + r) * g.n, end - begin, padded[r]);
      total = U::add(total, all(g.x + k * g.rows + row), U::read(padded[0], kWidth));
    }
    float sums[kWidth];
    store(sums, total);
    std::copy_n(sums, end - begin, g.at(row, begin));
  }
}

template <class U>
static void gemm_by_columns(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kVectors * kWidth;
  const int64_t most = begin + (end - begin) / kColumns * kColumns, last = end - (end - begin) % kWidth;
  if (g.groups > 1) {
    float* const kept = kept_blocks();
    if (begin < most) blocks<U>(g, begin, most, kept);
    if (most < end) last_panel<U>(g, most, end, kept);
    return;
  }
  if (begin < most) strips<kVectors, U>(g, begin, most);
  if (most < last) strips<1, U>(g, most, last);
  rest<U>(g, last, end);
}

// Of a matrix [n, k]: the panel of at most `kVectors * kWidth` columns from `n` on, rows `k` to `k + depth`, as tiles read it.
template <class U>
static void transpose_panel(const Gemm& g, int64_t k, int64_t depth, int64_t n, int64_t columns, float* kept) {
  constexpr int64_t kColumns = kVectors * kWidth;
  const int64_t units = (depth + U::kRows - 1) / U::kRows, whole = depth / U::kRows / kWidth * kWidth;
  const Value<U>* w = static_cast<const Value<U>*>(g.w) + n * g.k + k;
  for (int64_t j = 0; j < kColumns; j += kWidth)
    for (int64_t u = 0; u < units; u += kWidth) {
      Floats square[kWidth] = {};
      for (int c = 0; c < kWidth && j + c < columns; c++) {
        const Value<U>* at = w + (j + c) * g.k + u * U::kRows;
        if (u < whole) {
          square[c] = U::read_along(at);
        } else {
          Value<U> padded[kWidth * U::kRows] = {};
          std::copy_n(at, depth - u * U::kRows, padded);
          square[c] = U::read_along(padded);
        }
      }
      transpose(square);
      for (int64_t i = 0; i < kWidth && u + i < units; i++) store(kept + (u + i) * kColumns + j, square[i]);
    }
}

// Of a matrix [n, k] and several groups.
template <class U>
static void gemm_by_transposed_panels(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kVectors * kWidth, kUnits = kDepth / U::kRows;
  constexpr int64_t kLinesAcross = kDepth * sizeof(Value<U>) / kLine;  // of a column
  alignas(64) float kept[kUnits * kColumns];
  for (int64_t n = begin; n < end; n += kColumns)
    for (int64_t k = 0; k < g.k; k += kDepth) {
      const int64_t depth = std::min(kDepth, g.k - k), columns = std::min(kColumns, end - n);
      transpose_panel<U>(g, k, depth, n, columns, kept);
      const bool is_last = k + depth == g.k, has_next = is_last ? n + 2 * kColumns <= end : k + 2 * kDepth <= g.k;
      const Value<U>* next = static_cast<const Value<U>*>(g.w) + (is_last ? (n + kColumns) * g.k : n * g.k + k + kDepth);
      Ahead ahead;
      if (has_next)
        ahead = {reinterpret_cast<const char*>(next), g.k * static_cast<int64_t>(sizeof(Value<U>)), kLinesAcross,
                 kColumns * kLinesAcross, 0, g.groups >= kManyGroups};
      panel<U>(g, k, depth, n, columns, kept, ahead);
    }
}

// y[rows, columns] = x[rows, k] @ w[columns, k]^T: dot products, each sum in a register.
template <int kRows, int kColumns, class U>
static void dots(const float* x, const Value<U>* w, int64_t k, float* y, int64_t ldy) {
  constexpr int64_t kStep = kWidth * U::kRows;
  const int64_t units = (k + U::kRows - 1) / U::kRows, whole = k / kStep * kStep;
  Floats acc[kRows][kColumns] = {};
  for (int64_t i = 0; i < whole; i += kStep) {
    Floats part[kRows];
    for (int r = 0; r < kRows; r++) part[r] = load(x + r * units + i / U::kRows);
    for (int c = 0; c < kColumns; c++) {
      const Floats row = U::read_along(w + c * k + i);
      for (int r = 0; r < kRows; r++) acc[r][c] = U::add(acc[r][c], part[r], row);
    }
  }
  if (whole < k)
    for (int c = 0; c < kColumns; c++) {
      Value<U> column[kStep] = {};
      std::copy_n(w + c * k + whole, k - whole, column);
      for (int r = 0; r < kRows; r++) {
        float row[kWidth] = {};
        std::copy_n(x + r * units + whole / U::kRows, units - whole / U::kRows, row);
        acc[r][c] = U::add(acc[r][c], load(row), U::read_along(column));
      }
    }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kColumns; c++) y[r * ldy + c] = sum(acc[r][c]);
}

template <int kColumns, class U>
static void dot_rows(const Gemm& g, int64_t n) {
  const Value<U>* w = static_cast<const Value<U>*>(g.w) + n * g.k;
  const int64_t units = g.units();
  int64_t row = 0;
  for (; row + 4 <= g.rows; row += 4) dots<4, kColumns, U>(g.x + row * units, w, g.k, g.at(row, n), g.y_step());
  for (; row < g.rows; row++) dots<1, kColumns, U>(g.x + row * units, w, g.k, g.at(row, n), g.y_step());
}

template <class U>
static void gemm_by_dots(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int kColumns = kRegisters == 32 ? 4 : 2;
  int64_t n = begin;
  for (; n + kColumns <= end; n += kColumns) dot_rows<kColumns, U>(g, n);
  for (; n < end; n++) dot_rows<1, U>(g, n);
}

// kCount rows of T to columns of `to`, of which a unit has `height`, a square of both at a time. A whole vector reaches into
// the next unit, which is written later: it may, before `end`, if the unit has no other rows.
template <int kCount, class U, class T>
static void pack_rows(const T* rows, int64_t k, int64_t height, float* to, const float* end) {
  const int64_t units = (k + U::kRows - 1) / U::kRows, whole = k / U::kRows / kWidth * kWidth;
  const auto save = [&](int64_t u, int64_t count, Floats* square) {
    transpose(square);
    float* at = to + u * height;
    if (kCount == kWidth || (height == kCount && at + (count - 1) * height + kWidth <= end)) {
      for (int64_t i = 0; i < count; i++, at += height) store(at, square[i]);
      return;
    }
    for (int64_t i = 0; i < count; i++, at += height) {
      float some[kWidth];
      store(some, square[i]);
      std::copy_n(some, kCount, at);
    }
  };
  for (int64_t u = 0; u < whole; u += kWidth) {
    Floats square[kWidth] = {};
    for (int r = 0; r < kCount; r++) square[r] = U::read_along(rows + r * k + u * U::kRows);
    save(u, kWidth, square);
  }
  if (whole == units) return;
  Floats square[kWidth] = {};
  for (int r = 0; r < kCount; r++) {
    T padded[kWidth * U::kRows] = {};
    std::copy_n(rows + r * k + whole * U::kRows, k - whole * U::kRows, padded);
    square[r] = U::read_along(padded);
  }
  save(whole, units - whole, square);
}

template <class U, class T, int kCount = kWidth>
static auto packing_of(int64_t count) -> void (*)(const T*, int64_t, int64_t, float*, const float*) {
  if constexpr (kCount > 1) {
    if (count < kCount) return packing_of<U, T, kCount - 1>(count);
  }
  return pack_rows<kCount, U, T>;
}

// Rows [height, k] to [units, height].
template <class U, class T>
static void pack_as(const T* rows, int64_t height, int64_t k, float* to) {
  const float* const end = to + (k + U::kRows - 1) / U::kRows * height;
  for (int64_t first = 0; first < height; first += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, height - first);
    packing_of<U, T>(count)(rows + first * k, k, height, to + first, end);
  }
}

static void pack(const void* rows, DType dtype, bool pairs, int64_t height, int64_t k, float* to) {
  if (dtype == DType::kF32)
    pack_as<Single<float>>(static_cast<const float*>(rows), height, k, to);
  else if (pairs)
    pack_as<Pair>(static_cast<const Bf16*>(rows), height, k, to);
  else
    pack_as<Single<Bf16>>(static_cast<const Bf16*>(rows), height, k, to);
}

template <class U>
static void gemm_of(const Gemm& g, int64_t begin, int64_t end) {
  if (g.in_panels) return gemm_by_panels<U>(g, begin, end);
  if (!g.transposed) return gemm_by_columns<U>(g, begin, end);
  (g.groups ? gemm_by_transposed_panels<U> : gemm_by_dots<U>)(g, begin, end);
}

static void gemm(const Gemm& g, int64_t begin, int64_t end) {
  if (g.dtype == DType::kF32) return gemm_of<Single<float>>(g, begin, end);
  if (g.dtype == DType::kF16) return gemm_of<Single<Half>>(g, begin, end);
  (g.pairs ? gemm_of<Pair> : gemm_of<Single<Bf16>>)(g, begin, end);
}

}  // namespace jaxllm::JAXLLM_ISA
