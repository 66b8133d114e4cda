// Products of bfloat16 by AMX. A tile has 16 rows of 64 bytes: 32 numbers of a row of x; or of w two rows of 16 columns,
// by turns, in each of its rows; or 16 sums.
//
// Whatever the number of rows, a sum takes its terms in the same order: a row's results depend on no other row.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int64_t kTile = 16;                 // rows of a tile, and columns: floats, or pairs of bfloat16
constexpr int64_t kTileRowsOfX = 2 * kTile;   // so many rows of x are multiplied
constexpr int64_t kTileColumns = 2 * kTile;   // with so many columns of w at once
constexpr int64_t kBlockUnits = 128;          // units, which are pairs of rows of w, that are made tiles of,
constexpr int64_t kBlockColumns = 256;        // for so many columns, before they are used: the second cache holds them
constexpr int64_t kBlockAhead = kTile;        // rows of w that are brought in before they are read,
constexpr int64_t kStripAhead = 2 * kTile;    // and in strips
constexpr int64_t kStripColumns = 2048;       // of a strip, at most
constexpr int64_t kStripStep = kStripColumns + kTile;  // floats from a row's sums to the next one's, not all in one set

struct alignas(64) AmxTile {
  float numbers[kTile * kTile];
};

// GCC doesn't know that tiles are read from memory, and written there.
static void settle() { __asm__ volatile("" ::: "memory"); }

// One below the other, for so many rows of w.
static int64_t tiles_for(int64_t rows) { return (rows + 2 * kTile - 1) / (2 * kTile); }

// The shapes of all tiles: 0 to 3 have the sums of rows `4 + i / 2` of x and columns `6 + i % 2` of w.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit Shapes(int64_t height) {
    const int64_t first = std::min(height, kTile), second = height - first;
    const int64_t heights[8] = {first, first, second, second, first, second, kTile, kTile};
    for (int i = 0; i < 8; i++) rows[i] = heights[i], row_bytes[i] = heights[i] ? kLine : 0;
  }
};

static void set_shapes(int64_t height) {
  const Shapes shapes(height);
  settle();
  _tile_loadconfig(&shapes);
}

// Two rows, of which those columns that `mask` has are there, by turns: two rows of tiles.
static inline void interleave_rows(const Bf16* even, const Bf16* odd, __mmask32 mask, float* first, float* second) {
  alignas(64) static constexpr uint16_t kByTurns[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kByTurns), high = _mm512_add_epi16(low, _mm512_set1_epi16(kTile));
  const __m512i a = even ? _mm512_maskz_loadu_epi16(mask, even) : _mm512_setzero_si512();
  const __m512i b = odd ? _mm512_maskz_loadu_epi16(mask, odd) : _mm512_setzero_si512();
  _mm512_store_si512(first, _mm512_permutex2var_epi16(a, low, b));
  _mm512_store_si512(second, _mm512_permutex2var_epi16(a, high, b));
}

// Of w `rows` rows, in pairs, and `columns` columns as tiles: two side by side, first all those of the first two. What is
// missing is 0. Rows of w that are `ahead` are brought in.
static void interleave(const Bf16* w, int64_t ldw, int64_t rows, int64_t columns, int64_t ahead, AmxTile* tiles) {
  const int64_t height = tiles_for(rows);
  for (int64_t row = 0; row < height * 2 * kTile; row += 2) {
    const Bf16* at = w + row * ldw;
    float* to = tiles[row / (2 * kTile) * 2].numbers + row / 2 % kTile * kTile;
    for (int64_t n = 0; n < columns; n += kTileColumns, at += kTileColumns, to += 2 * height * kTile * kTile) {
      const __mmask32 mask = columns - n >= kTileColumns ? ~0u : (1u << (columns - n)) - 1;
      __builtin_prefetch(at + ahead * ldw, 0, 2);
      __builtin_prefetch(at + (ahead + 1) * ldw, 0, 2);
      interleave_rows(row < rows ? at : nullptr, row + 1 < rows ? at + ldw : nullptr, mask, to, to + kTile * kTile);
    }
  }
}

// Of all rows of x some units from `u` on, as tiles: of each 32 rows, two by two, first those of the first units. What is
// missing of a tile's units is 0, and nobody reads what is missing of its rows.
static void pack_tiles(const Gemm& g, int64_t u, int64_t units, AmxTile* tiles) {
  const int64_t ldx = g.units(), depth = (units + kTile - 1) / kTile;
  for (int64_t row = 0; row < g.rows; row++) {
    const float* const from = g.x + row * ldx + u;
    AmxTile* to = tiles + row / kTileRowsOfX * depth * 2 + row / kTile % 2;
    for (int64_t i = 0; i < units; i += kTile, to += 2) {
      const __mmask16 mask = units - i >= kTile ? 0xffff : (1u << (units - i)) - 1;
      _mm512_store_ps(to->numbers + row % kTile * kTile, _mm512_maskz_loadu_ps(mask, from + i));
    }
  }
}

// Where the tiles of 32 columns of w lie: a tile's rows, and the second of two from the first, in floats.
struct FromTiles {
  static constexpr int64_t kRow = kTile, kSecond = kTile * kTile, kAhead = 0;
};
struct FromPanel {  // which is read in this order from memory: lines so far ahead are brought in
  static constexpr int64_t kRow = kDensePanel, kSecond = kTile, kAhead = 4 * kTile * kDensePanel;
};

// y[rows, 32] += x @ w, or = if first, of `depth` times two tiles of each; of x one of these if not kTwo. The tiles' shapes
// are set.
template <bool kTwo, class From>
static void multiply_block(const AmxTile* x, const float* w, int64_t depth, float* y, int64_t ldy, bool first) {
  float* const below = y + kTile * ldy;
  settle();
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, y, ldy * 4);
    _tile_loadd(1, y + kTile, ldy * 4);
  }
  if (kTwo && first) {
    _tile_zero(2);
    _tile_zero(3);
  } else if (kTwo) {
    _tile_loadd(2, below, ldy * 4);
    _tile_loadd(3, below + kTile, ldy * 4);
  }
  for (const AmxTile* const end = x + 2 * depth; x < end; x += 2, w += 2 * kTile * kTile) {
    for (int64_t i = 0; From::kAhead && !kTwo && i < 2 * kTile * kTile; i += kLine / 4)
      __builtin_prefetch(w + From::kAhead + i, 0, 2);
    _tile_loadd(4, x[0].numbers, kLine);
    _tile_loadd(6, w, From::kRow * 4);
    _tile_loadd(7, w + From::kSecond, From::kRow * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, x[1].numbers, kLine);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, y, ldy * 4);
  _tile_stored(1, y + kTile, ldy * 4);
  if (kTwo) {
    _tile_stored(2, below, ldy * 4);
    _tile_stored(3, below + kTile, ldy * 4);
  }
  settle();
}

// All rows of `columns` columns from n on, two tiles or what is left, for `depth` tiles of x and w. `shaped`: the rows that
// the tiles have shapes for.
template <class From>
static void multiply_panel(const Gemm& g, int64_t n, int64_t columns, const AmxTile* x, const float* w, int64_t depth,
                           bool first, int64_t& shaped) {
  alignas(64) float sums[kTileRowsOfX * kTileColumns];
  for (int64_t row = 0; row < g.rows; row += kTileRowsOfX, x += 2 * depth) {
    const int64_t rows = std::min(kTileRowsOfX, g.rows - row);
    if (rows != shaped) set_shapes(rows);
    shaped = rows;
    const auto multiply = rows > kTile ? multiply_block<true, From> : multiply_block<false, From>;
    if (columns == kTileColumns) {
      multiply(x, w, depth, g.at(row, n), g.y_step(), first);
      continue;
    }
    for (int64_t r = 0; !first && r < rows; r++) std::copy_n(g.at(row + r, n), columns, sums + r * kTileColumns);
    multiply(x, w, depth, sums, kTileColumns, first);
    for (int64_t r = 0; r < rows; r++) std::copy_n(sums + r * kTileColumns, columns, g.at(row + r, n));
  }
}

// At most a tile's rows: w in long pieces of its rows, as memory likes it.
static void by_strips(const Gemm& g, int64_t begin, int64_t end, AmxTile* x) {
  // Of tiles, a type of this file's own: what the library has of others may be linked for CPUs that lack these instructions.
  thread_local std::vector<AmxTile> room(kStripStep / kTile);
  float* const sums = room.data()->numbers;
  AmxTile tiles[2];
  const Bf16* const w = static_cast<const Bf16*>(g.w);
  pack_tiles(g, 0, g.units(), x);
  set_shapes(g.rows);
  for (int64_t first = begin; first < end; first += kStripColumns) {
    const int64_t last = std::min(first + kStripColumns, end);
    for (int64_t row = 0; row < g.k; row += 2 * kTile)
      for (int64_t n = first; n < last; n += kTileColumns) {
        interleave(w + row * g.n + n, g.n, std::min(2 * kTile, g.k - row), std::min(kTileColumns, last - n), kStripAhead,
                   tiles);
        multiply_block<false, FromTiles>(x + row / kTile, tiles->numbers, 1, sums + n - first, kStripStep, row == 0);
      }
    for (int64_t row = 0; row < g.rows; row++) std::copy_n(sums + row * kStripStep, last - first, g.at(row, first));
  }
}

static void by_blocks(const Gemm& g, int64_t begin, int64_t end, AmxTile* x) {
  thread_local std::vector<AmxTile> tiles(kBlockUnits / kTile * (kBlockColumns / kTile));
  const Bf16* const w = static_cast<const Bf16*>(g.w);
  int64_t shaped = 0;
  for (int64_t u = 0; u < g.units(); u += kBlockUnits) {
    const int64_t rows = std::min(2 * kBlockUnits, g.k - 2 * u), depth = tiles_for(rows);
    pack_tiles(g, u, (rows + 1) / 2, x);
    for (int64_t first = begin; first < end; first += kBlockColumns) {
      const int64_t last = std::min(first + kBlockColumns, end);
      interleave(w + 2 * u * g.n + first, g.n, rows, last - first, kBlockAhead, tiles.data());
      const AmxTile* at = tiles.data();
      for (int64_t n = first; n < last; n += kTileColumns, at += 2 * depth)
        multiply_panel<FromTiles>(g, n, std::min(kTileColumns, last - n), x, at->numbers, depth, u == 0, shaped);
    }
  }
}

// Of a w in panels, which have what tiles need one below the other: few rows panel by panel, as memory likes it, and more by
// blocks, for which the second cache holds x.
static void by_panels(const Gemm& g, int64_t begin, int64_t end, AmxTile* x) {
  static_assert(kDensePanel == kTileColumns);
  thread_local std::vector<AmxTile> padded;  // units that fill no tile, and those before them
  const int64_t most = g.rows <= kTile ? g.units() : kBlockUnits;
  int64_t shaped = 0;
  for (int64_t u = 0; u < g.units(); u += most) {
    const int64_t units = std::min(most, g.units() - u), depth = (units + kTile - 1) / kTile;
    pack_tiles(g, u, units, x);
    for (int64_t n = begin; n < end; n += kTileColumns) {
      const float* w = static_cast<const float*>(g.w) + (n / kDensePanel * g.units() + u) * kDensePanel;
      if (units % kTile) {
        padded.assign(2 * depth, AmxTile{});
        std::copy_n(w, units * kDensePanel, padded.data()->numbers);
        w = padded.data()->numbers;
      }
      multiply_panel<FromPanel>(g, n, kTileColumns, x, w, depth, u == 0, shaped);
    }
  }
}

static void multiply_by_tiles(const Gemm& g, int64_t begin, int64_t end) {
  if (!g.pairs || g.transposed || g.groups) return kAvx512Bf16.gemm(g, begin, end);
  const bool is_strip = g.rows <= kTile;
  thread_local std::vector<AmxTile> x;
  const size_t size = (g.rows + kTileRowsOfX - 1) / kTileRowsOfX * 2 * (is_strip ? tiles_for(g.k) : kBlockUnits / kTile);
  if (x.size() < size) x.resize(size);
  (g.in_panels ? by_panels : is_strip ? by_strips : by_blocks)(g, begin, end, x.data());
  _tile_release();
}

}  // namespace jaxllm::JAXLLM_ISA
