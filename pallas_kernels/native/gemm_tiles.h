// What products with a matrix are made of: tiles, whose sums lie in registers, and what they do beside their work.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int kVectors = 2;                             // columns of a tile, in vectors
constexpr int kMostRows = kRegisters == 32 ? 12 : 6;    // of a tile: its sums fill most registers
constexpr int kLine = 64;                               // bytes that memory moves at once
constexpr int64_t kDepth = 512;                         // numbers of a column of w^T that tiles go through at once
constexpr int64_t kBlock = kWidth << 12;                // units of w in a block, of which the second cache holds two
constexpr int64_t kBlockDepth = 128;                    // of a column of a block: its panel stays in the first cache,
constexpr int64_t kManyDepth = 256;                     // or is read so often that sums are stored more seldom
constexpr int kSeldom = 4;                              // units of w for each vector of the next block, if groups are
constexpr int64_t kManyGroups = 8;                      // so many

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
  static constexpr int64_t kColumn = std::is_same_v<T, Bf16> ? 4 : sizeof(T);  // bytes from a panel's column to the next
  static inline Floats read(const T* w, int64_t) { return load(w); }
  static inline Floats read_last(const T* w) { return load(w); }
  static inline Floats read_along(const T* w) { return load(w); }  // neighbours are of one column
  static inline Floats read_panel(const void* panel, int64_t k, int64_t column) {
    if constexpr (!std::is_same_v<T, Bf16>) {
      return load(static_cast<const T*>(panel) + k * kDensePanel + column);
    } else {
      const Words both = (Words)load(static_cast<const float*>(panel) + k / 2 * kDensePanel + column);
      return (Floats)(k % 2 ? both & 0xffff0000u : both << 16);
    }
  }
  static inline Floats add(Floats sum, Floats x, Floats w) { return multiply_add(sum, x, w); }
};

#if defined(JAXLLM_PAIRS)
constexpr bool kHasPairs = true;

struct Pair {
  typedef Bf16 Value;
  static constexpr int kRows = 2;
  static constexpr int64_t kColumn = 4;
  static inline Words widened(const Bf16* w) { return load_words(&w->bits); }
  static inline Floats read(const Bf16* w, int64_t ldw) { return (Floats)(widened(w) | widened(w + ldw) << 16); }
  static inline Floats read_last(const Bf16* w) { return (Floats)widened(w); }  // x has a zero for the second
  static inline Floats read_along(const Bf16* w) { return read_bits(w); }
  static inline Floats read_panel(const void* panel, int64_t k, int64_t column) {
    return load(static_cast<const float*>(panel) + k * kDensePanel + column);
  }
  static inline Floats add(Floats sum, Floats x, Floats w) { return add_pairs(sum, x, w); }
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

// Of a row of a tile.
template <int kVectors, class U>
static constexpr int lines_of() {
  return (kVectors * kWidth * sizeof(Value<U>) + kLine - 1) / kLine;
}

// What tiles do beside their work: one `move` for each unit of w that they go through, or for every `kSeldom`.
//
// Here they bring lines into the second cache: `across` of them one after the other, then `stride` bytes further.
struct Ahead {
  const char* at = nullptr;
  int64_t stride = 0, across = 0, left = 0, line = 0;
  bool is_seldom = false;

  void move() {
    __builtin_prefetch(at + line * kLine, 0, 2);
    if (++line == across) line = 0, at += stride;
    left--;
  }
};

// And here they lay a block of w out, [panels, units, kVectors * kWidth], a vector at a time and row by row, as memory likes
// it. A row is brought in while the one before is laid out.
template <class U>
struct Mover {
  const Value<U>* from = nullptr;  // row of w
  float* to = nullptr;
  int64_t ldw = 0, rows = 0, columns = 0, units = 0, left = 0, column = 0;
  bool is_seldom = false;

  Mover() = default;
  Mover(const Value<U>* w, int64_t ldw, int64_t rows, int64_t columns, float* to)
      : from(w), to(to), ldw(ldw), rows(rows), columns(columns), units((rows + U::kRows - 1) / U::kRows),
        left(units * (columns / kWidth)) {}

  void move() {
    constexpr int64_t kColumns = kVectors * kWidth;
    const Value<U>* const at = from + column;
    for (int r = 0; r < U::kRows; r++) __builtin_prefetch(at + (U::kRows + r) * ldw);
    const Floats unit = rows >= U::kRows ? U::read(at, ldw) : U::read_last(at);
    store(to + column / kColumns * units * kColumns + column % kColumns, unit);
    column += kWidth;
    if (column == columns) column = 0, from += U::kRows * ldw, rows -= U::kRows, to += kColumns;
    left--;
  }
};

enum class From {
  kMatrix,  // w lies where it is
  kKept,    // w is a panel of it, in units, dense
  kPanel,   // w lies in panels, of which this is a part
};

// y[rows, vectors * kWidth] += x^T[rows, depth] @ w[depth, vectors * kWidth], or = if first.
template <int kRows, int kVectors, From kFrom, class U, class Beside>
static void tile(const float* x, int64_t ldx, const void* w, int64_t ldw, float* y, int64_t ldy, int64_t depth, bool first,
                 Beside& beside) {
  Floats acc[kRows][kVectors];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVectors; j++) acc[i][j] = first ? Floats{} : load(y + i * ldy + j * kWidth);
  const auto add = [&](int64_t k, bool whole) {
    Floats row[kVectors];
    for (int j = 0; j < kVectors; j++) {
      const Value<U>* const at = static_cast<const Value<U>*>(w) + k * U::kRows * ldw + j * kWidth;
      if (kFrom == From::kPanel)
        row[j] = U::read_panel(w, k, j * kWidth);
      else if (kFrom == From::kKept)
        row[j] = load(static_cast<const float*>(w) + (k * kVectors + j) * kWidth);
      else
        row[j] = whole ? U::read(at, ldw) : U::read_last(at);
    }
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kVectors; j++) acc[i][j] = U::add(acc[i][j], all(x + k * ldx + i), row[j]);
  };
  const int64_t units = (depth + U::kRows - 1) / U::kRows, whole = kFrom == From::kMatrix ? depth / U::kRows : units;
  int64_t k = 0;
  if (beside.left > 0) {
    Beside own = beside;  // in registers
    const int step = own.is_seldom ? kSeldom : 1;
    const int64_t end = std::min(whole / step, own.left) * step;
    if (step == 1) {
      for (; k < end; k++) own.move(), add(k, true);
    } else {
      for (; k < end; k += kSeldom) {
        own.move();
        for (int i = 0; i < kSeldom; i++) add(k + i, true);
      }
    }
    beside = own;
  }
#pragma GCC unroll 4
  for (; k < whole; k++) add(k, true);
  if (U::kRows > 1 && k < units) add(k, false);
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kVectors; j++) store(y + i * ldy + j * kWidth, acc[i][j]);
}

template <class Beside>
using Tile = void (*)(const float*, int64_t, const void*, int64_t, float*, int64_t, int64_t, bool, Beside&);

template <int kVectors, From kFrom, class U, class Beside, int kRows = kMostRows>
static Tile<Beside> tile_of(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kVectors, kFrom, U, Beside, kRows - 1>(rows);
  }
  return tile<kRows, kVectors, kFrom, U, Beside>;
}

// Of several groups, all rows of at most `kVectors * kWidth` columns from `n` on, for `depth` rows of w from `k` on, which
// are `kept`.
template <class U, class Beside>
static void panel(const Gemm& g, int64_t k, int64_t depth, int64_t n, int64_t columns, const float* kept, Beside& beside) {
  constexpr int64_t kColumns = kVectors * kWidth;
  for (int64_t i = 0; i < g.groups; i++) {
    const int64_t row = g.first_row(i), height = g.first_row(i + 1) - row;
    const float* x = g.x + row * g.units() + k / U::kRows * height;
    float* y = g.at(row, n);
    const auto multiply = tile_of<kVectors, From::kKept, U, Beside>(height);
    if (columns == kColumns) {
      multiply(x, height, kept, 0, y, g.y_step(), depth, k == 0, beside);
      continue;
    }
    float sums[kMostRows * kColumns] = {};
    for (int64_t r = 0; k && r < height; r++) std::copy_n(y + r * g.y_step(), columns, sums + r * kColumns);
    multiply(x, height, kept, 0, sums, kColumns, depth, k == 0, beside);
    for (int64_t r = 0; r < height; r++) std::copy_n(sums + r * kColumns, columns, y + r * g.y_step());
  }
}

}  // namespace jaxllm::JAXLLM_ISA
