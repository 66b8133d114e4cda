// Products of a few rows with a matrix that is read once, where it lies.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

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

// The bits at p, as they are.
static inline Floats read_bits(const void* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// What one multiplication takes: a row of w and a number of x, or two of both.
template <class T>
struct Single {
  typedef T Value;
  static constexpr int kRows = 1;
  static inline Floats read(const T* w, int64_t) { return load(w); }
  static inline Floats read_last(const T* w) { return load(w); }
  static inline Floats read_along(const T* w) { return load(w); }  // neighbours are of one column
  static inline Floats add(Floats sum, Floats x, Floats w) { return multiply_add(sum, x, w); }
};

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

struct Pair {
  typedef Bf16 Value;
  static constexpr int kRows = 2;
  static inline Words widened(const Bf16* w) {
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)w));
  }
  static inline Floats read(const Bf16* w, int64_t ldw) { return (Floats)(widened(w) | widened(w + ldw) << 16); }
  static inline Floats read_last(const Bf16* w) { return (Floats)widened(w); }  // x has a zero for the second
  static inline Floats read_along(const Bf16* w) { return read_bits(w); }
  static inline Floats add(Floats sum, Floats x, Floats w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)x, (__m512bh)(__m512)w);
  }
};
#else
constexpr bool kHasPairs = false;
typedef Single<Bf16> Pair;
#endif

template <class U>
using Value = typename U::Value;

// The number or the pair at p, everywhere.
static inline Floats all(const float* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return (Floats)(word - Ints{});
}

// What a tile brings into the second cache while it works: `lines` lines, one or all that a row of it has, for each
// 2^shift of its units of w, the first ones from `at` on, the next ones `stride` bytes further; or with a `mask` 2^shift
// lines one after the other, then the next ones likewise.
struct Ahead {
  const char* at = nullptr;
  int64_t stride = 0;
  int lines = 0, shift = 0;
  int64_t mask = 0;
};

// Of a row of a tile.
template <int kVectors, class U>
static constexpr int lines_of() {
  return (kVectors * kWidth * sizeof(Value<U>) + kLine - 1) / kLine;
}

enum class From {
  kMatrix,   // w lies where it is
  kAndKeep,  // likewise, and `keep` gets this part of it, in units, dense
  kKept,     // w is such a part
};

// y[rows, vectors * kWidth] += x^T[rows, depth] @ w[depth, vectors * kWidth], or = if first.
template <int kRows, int kVectors, From kFrom, class U>
static void tile(const float* x, int64_t ldx, const void* w, int64_t ldw, float* y, int64_t ldy, int64_t depth, bool first,
                 Ahead ahead, float* keep) {
  constexpr int kLines = lines_of<kVectors, U>();
  Floats acc[kRows][kVectors];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVectors; j++) acc[i][j] = first ? Floats{} : load(y + i * ldy + j * kWidth);
  const auto add = [&](int64_t k, bool whole) {
    Floats row[kVectors];
    for (int j = 0; j < kVectors; j++) {
      const int64_t kept = (k * kVectors + j) * kWidth;
      if (kFrom == From::kKept) {
        row[j] = load(static_cast<const float*>(w) + kept);
      } else {
        const Value<U>* at = static_cast<const Value<U>*>(w) + k * U::kRows * ldw + j * kWidth;
        row[j] = whole ? U::read(at, ldw) : U::read_last(at);
        if (kFrom == From::kAndKeep) store(keep + kept, row[j]);
      }
    }
    const char* line = ahead.at + (k >> ahead.shift) * ahead.stride + (k & ahead.mask) * kLine;
    if (ahead.lines > 0) __builtin_prefetch(line, 0, 2);
    if (ahead.lines > 1)
      for (int i = 1; i < U::kRows * kLines; i++)
        __builtin_prefetch(line + i / kLines * (ahead.stride / U::kRows) + i % kLines * kLine, 0, 2);
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVectors; j++) acc[i][j] = U::add(acc[i][j], all(x + k * ldx + i), row[j]);
  };
  const int64_t units = depth / U::kRows;
#pragma GCC unroll 4
  for (int64_t k = 0; k < units; k++) add(k, true);
  if (U::kRows > 1 && depth % U::kRows) add(units, false);
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVectors; j++) store(y + i * ldy + j * kWidth, acc[i][j]);
}

using Tile = void (*)(const float*, int64_t, const void*, int64_t, float*, int64_t, int64_t, bool, Ahead, float*);

template <int kVectors, From kFrom, class U, int kRows = kMostRows>
static Tile tile_of(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kVectors, kFrom, U, kRows - 1>(rows);
  }
  return tile<kRows, kVectors, kFrom, U>;
}

// The share of group `i` in bringing `depth` rows of the panel at `next`: memory is to be busy while the second group
// multiplies, too.
template <int kVectors, class U>
static Ahead share_of(const Gemm& g, int64_t i, const Value<U>* next, int64_t depth) {
  constexpr int kLines = lines_of<kVectors, U>();
  static_assert(kLines <= 2);
  const int shift = g.groups >= 4 ? 2 : 1;
  if (i >= 1 << shift) return {};
  const int64_t stride = g.n * sizeof(Value<U>) * U::kRows, units = depth / U::kRows;
  return {reinterpret_cast<const char*>(next) + (units >> shift) * i * stride, stride, U::kRows * kLines, shift};
}

// Of several groups, all rows of `kVectors * kWidth` columns from `n` on, for `depth` rows of w from `k` on. What comes
// next lies `ahead` elements further on (0: nothing does).
template <int kVectors, class U>
static void panel(const Gemm& g, int64_t k, int64_t depth, int64_t n, int64_t ahead) {
  alignas(64) float kept[kDepth / U::kRows * kVectors * kWidth];
  const Value<U>* w = static_cast<const Value<U>*>(g.w) + k * g.n + n;
  for (int64_t i = 0; i < g.groups; i++) {
    const int64_t row = g.first_row(i), height = g.first_row(i + 1) - row;
    const float* x = g.x + row * g.units() + k / U::kRows * height;
    float* y = g.at(row, n);
    const Ahead share = ahead ? share_of<kVectors, U>(g, i, w + ahead, depth) : Ahead{};
    if (i == 0)
      tile_of<kVectors, From::kAndKeep, U>(height)(x, height, w, g.n, y, g.y_step(), depth, k == 0, share, kept);
    else
      tile_of<kVectors, From::kKept, U>(height)(x, height, kept, 0, y, g.y_step(), depth, k == 0, share, nullptr);
  }
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

// Columns that fill no vector.
template <class U>
static void rest(const Gemm& g, int64_t begin, int64_t end) {
  if (begin == end) return;
  const Value<U>* w = static_cast<const Value<U>*>(g.w) + begin;
  for (int64_t group = 0; group < g.groups; group++) {
    const int64_t first = g.first_row(group), height = g.first_row(group + 1) - first;
    for (int64_t row = 0; row < height; row++) {
      Floats total{};
      for (int64_t k = 0; k < g.units(); k++) {
        Value<U> padded[U::kRows][kWidth] = {};
        for (int64_t r = 0; r < U::kRows && k * U::kRows + r < g.k; r++)
          std::copy_n(w + (k * U::kRows + r) * g.n, end - begin, padded[r]);
        total = U::add(total, all(g.x + first * g.units() + k * height + row), U::read(padded[0], kWidth));
      }
      float sums[kWidth];
      store(sums, total);
      std::copy_n(sums, end - begin, g.at(first + row, begin));
    }
  }
}

template <class U>
static void gemm_by_columns(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kVectors * kWidth;
  const int64_t most = begin + (end - begin) / kColumns * kColumns, last = end - (end - begin) % kWidth;
  if (g.groups == 1) {
    if (begin < most) strips<kVectors, U>(g, begin, most);
    if (most < last) strips<1, U>(g, most, last);
  } else {
    for (int64_t k = 0; k < g.k; k += kDepth) {
      const int64_t depth = g.k - k < kDepth ? g.k - k : kDepth;
      const int64_t next_strip = k + 2 * kDepth > g.k ? 0 : kDepth * g.n + begin;  // if a whole one follows
      for (int64_t n = begin; n < most; n += kColumns)
        panel<kVectors, U>(g, k, depth, n, n + kColumns < most ? kColumns : next_strip ? next_strip - n : 0);
      if (most < last) panel<1, U>(g, k, depth, most, 0);
    }
  }
  rest<U>(g, last, end);
}

// Of a matrix [n, k]: panel `kVectors * kWidth` columns from `n` on, rows `k` to `k + depth`, as other tiles have kept it.
template <int kVectors, class U>
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
  constexpr int kLinesAcross = kDepth * sizeof(Value<U>) / kLine;  // of a column
  alignas(64) float kept[kUnits * kColumns];
  for (int64_t n = begin; n < end; n += kColumns)
    for (int64_t k = 0; k < g.k; k += kDepth) {
      const int64_t depth = std::min(kDepth, g.k - k), columns = std::min(kColumns, end - n);
      transpose_panel<kVectors, U>(g, k, depth, n, columns, kept);
      const bool is_last = k + depth == g.k, has_next = is_last ? n + 2 * kColumns <= end : k + 2 * kDepth <= g.k;
      const Value<U>* next = static_cast<const Value<U>*>(g.w) + (is_last ? (n + kColumns) * g.k : n * g.k + k + kDepth);
      for (int64_t i = 0; i < g.groups; i++) {
        const int64_t row = g.first_row(i), height = g.first_row(i + 1) - row;
        const float* x = g.x + row * g.units() + k / U::kRows * height;
        float* y = g.at(row, n);
        Ahead share;
        if (has_next && i < kColumns * kLinesAcross / kUnits) {
          const int64_t stride = g.k * sizeof(Value<U>), per_group = kUnits / kLinesAcross;
          share = {reinterpret_cast<const char*>(next) + i * per_group * stride, stride, 1, __builtin_ctz(kLinesAcross),
                   kLinesAcross - 1};
        }
        const Tile multiply = tile_of<kVectors, From::kKept, U>(height);
        if (columns == kColumns) {
          multiply(x, height, kept, 0, y, g.y_step(), depth, k == 0, share, nullptr);
          continue;
        }
        float sums[kMostRows * kColumns] = {};
        for (int64_t r = 0; k && r < height; r++) std::copy_n(y + r * g.y_step(), columns, sums + r * kColumns);
        multiply(x, height, kept, 0, sums, kColumns, depth, k == 0, share, nullptr);
        for (int64_t r = 0; r < height; r++) std::copy_n(sums + r * kColumns, columns, y + r * g.y_step());
      }
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
  if (!g.transposed) return gemm_by_columns<U>(g, begin, end);
  (g.groups ? gemm_by_transposed_panels<U> : gemm_by_dots<U>)(g, begin, end);
}

static void gemm(const Gemm& g, int64_t begin, int64_t end) {
  (g.dtype == DType::kF32 ? gemm_of<Single<float>> : g.pairs ? gemm_of<Pair> : gemm_of<Single<Bf16>>)(g, begin, end);
}

}  // namespace jaxllm::JAXLLM_ISA
