// Attention of bfloat16 by AMX: of many query rows, with keys and values of a pool of blocks that tiles divide. Keys are
// read where they lie.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int64_t kTiledKeys = 128;  // that query rows attend to at a time, at most
constexpr int64_t kMostTiledDim = 256;  // of heads
constexpr int64_t kKeyTiles = kTiledKeys / kTile, kRowTiles = kTileRows / kTile;

// Where the keys that are attended to at a time lie, and their values, a tile's rows one after the other.
struct Places {
  const Bf16 *keys[kKeyTiles], *values[kKeyTiles];
};

static int64_t tiled_scratch_floats(const Attention& a) {
  const int64_t tiled = kTileRows * (a.head_dim / 2 + a.head_dim + kTiledKeys + kTiledKeys / 2 + 3);
  return std::max(scratch_floats(a), tiled);
}

// With `batch_invariant` all rows are tiled or none is. Those of tiles take the same keys at a time, from the first one of
// all: what a row doesn't see adds zeros to its sums. A window begins where its first row's does.
static bool may_be_tiled(const Attention& a) {
  return a.dtype == DType::kBf16 && a.pool_dtype == DType::kBf16 && a.block_size % kTile == 0 &&
         a.head_dim % (2 * kTile) == 0 && a.head_dim <= kMostTiledDim && !(a.batch_invariant && a.window);
}

// weights[keys, rows] = keys @ q^T, not scaled. Keys beyond the last are whatever lies there; nobody reads their weights.
static void tiled_scores(const Attention& a, const Running& run, const Places& places, int64_t count) {
  const int64_t key_tiles = (count + kTile - 1) / kTile, row_tiles = (run.rows + kTile - 1) / kTile;
  const int64_t key_step = a.head_dim * sizeof(Bf16), row_step = kTileRows * sizeof(float);
  const auto add = [&](const Bf16* first, const Bf16* second, const float* q, bool two) {
    _tile_loadd(4, first, key_step);
    _tile_loadd(5, second, key_step);
    _tile_loadd(6, q, row_step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (!two) return;
    _tile_loadd(7, q + kTile, row_step);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  };
  for (int64_t i = 0; i < key_tiles; i += 2)
    for (int64_t r = 0; r < row_tiles; r += 2) {
      const Bf16 *const first = places.keys[i], *const second = places.keys[std::min(i + 1, key_tiles - 1)];
      float* const to = run.weights + i * kTile * kTileRows + r * kTile;
      const bool two = r + 1 < row_tiles;
      settle();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < a.head_dim; d += 2 * kTile)
        add(first + d, second + d, run.q + d / 2 * kTileRows + r * kTile, two);
      _tile_stored(0, to, row_step);
      _tile_stored(2, to + kTile * kTileRows, row_step);
      if (two) {
        _tile_stored(1, to + kTile, row_step);
        _tile_stored(3, to + kTile * kTileRows + kTile, row_step);
      }
      settle();
    }
}

// 2^x to 18 bits for x of at most 0, and 0 below -126: a polynomial of degree 4 on [-1/2, 1/2], fitted for the least error.
static inline Floats power_of_two(Floats x) {
  const __m512 limited = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // of -infinity, too; NaN stays
  const __m512 whole = _mm512_roundscale_ps(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = (Floats)_mm512_sub_ps(limited, whole);
  Floats p = broadcast(9.58285e-3f);
  p = p * f + 5.590643e-2f;
  p = p * f + 2.4024099e-1f;
  p = p * f + 6.9312419e-1f;
  p = p * f + 1.0f;
  const __mmask16 counts = _mm512_cmp_ps_mask(limited, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(counts, (__m512)p, whole);
}

// As `softmax`, of scores that are not scaled yet; the weights go to pairs only.
static void tiled_softmax(const Attention& a, const Running& run, int64_t key, int64_t count, bool all_seen) {
  constexpr float kLog2E = 1.44269504088896341f;
  const bool has_order = a.soft_cap == 0 && a.scale > 0;  // that of the scores once they are scaled
  for (int v = 0; v * kWidth < run.rows; v++) {
    float* const column = run.weights + v * kWidth;
    const Floats before = load(run.top + v * kWidth);
    Floats top = broadcast(-__builtin_inff());
    for (int64_t i = 0; i < count; i++) {
      Floats scores = load(column + i * kTileRows);
      if (!has_order) scores = capped(a, scores * a.scale);
      if (!all_seen) scores = masked(a, run, v, (int32_t)(key + i), scores);
      if (!has_order || !all_seen) store(column + i * kTileRows, scores);
      top = max(top, scores);
    }
    const float scale = has_order ? a.scale : 1.0f;
    top = max(before, top * scale);
    const Floats offset = top * kLog2E;
    Floats total{};
    const auto weigh = [&](int64_t i) {
      const Floats weights = i < count ? power_of_two(load(column + i * kTileRows) * (scale * kLog2E) - offset) : Floats{};
      total += weights;
      return weights;
    };
    for (int64_t i = 0; i < count; i += 2) {
      const Floats first = weigh(i), second = weigh(i + 1);
      store(run.pairs + i / 2 * kTileRows + v * kWidth, pair_of(first, second));
    }
    const Floats rescale = power_of_two((before - top) * kLog2E);
    store(run.rescale + v * kWidth, rescale);
    store(run.top + v * kWidth, top);
    store(run.total + v * kWidth, load(run.total + v * kWidth) * rescale + total);
  }
  rescale_sums(a, run);
}

// sums[rows, head_dim] += weights^T @ values, with the weights in pairs.
static void add_tiled_values(const Attention& a, const Running& run, const Places& places, int64_t count) {
  const int64_t depth = (count + 2 * kTile - 1) / (2 * kTile), row_tiles = (run.rows + kTile - 1) / kTile;
  const int64_t dim_tiles = a.head_dim / kTile, step = a.head_dim * sizeof(float);
  alignas(64) AmxTile weights[kTiledKeys / (2 * kTile)][kRowTiles], values[kTiledKeys / (2 * kTile)][kMostTiledDim / kTile];
  const auto value = [&](int64_t key) {
    return key < count ? places.values[key / kTile] + key % kTile * a.head_dim : nullptr;
  };
  for (int64_t k = 0; k < depth; k++)
    for (int64_t u = 0; u < kTile; u++) {
      const int64_t key = 2 * (k * kTile + u);
      const Bf16 *const even = value(key), *const odd = value(key + 1);
      for (int64_t d = 0; d < dim_tiles; d += 2)
        interleave_rows(even ? even + d * kTile : nullptr, odd ? odd + d * kTile : nullptr, ~0u,
                        values[k][d].numbers + u * kTile, values[k][d + 1].numbers + u * kTile);
    }
  for (int64_t k = 0; k < depth; k++)
    for (int64_t r = 0; r < row_tiles; r++) {
      Floats square[kWidth] = {};
      for (int64_t u = 0; u < kTile && 2 * (k * kTile + u) < count; u++)
        square[u] = load(run.pairs + (k * kTile + u) * kTileRows + r * kTile);
      transpose(square);
      for (int i = 0; i < kWidth; i++) store(weights[k][r].numbers + i * kTile, square[i]);
    }
  for (int64_t r = 0; r < row_tiles; r += 2)
    for (int64_t d = 0; d < dim_tiles; d += 2) {
      float *const at = run.sums + r * kTile * a.head_dim + d * kTile, *const below = at + kTile * a.head_dim;
      const bool two = r + 1 < row_tiles;
      settle();
      _tile_loadd(0, at, step);
      _tile_loadd(1, at + kTile, step);
      if (two) {
        _tile_loadd(2, below, step);
        _tile_loadd(3, below + kTile, step);
      }
      for (int64_t k = 0; k < depth; k++) {
        _tile_loadd(4, weights[k][r].numbers, kLine);
        _tile_loadd(6, values[k][d].numbers, kLine);
        _tile_loadd(7, values[k][d + 1].numbers, kLine);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, weights[k][r + 1].numbers, kLine);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, at, step);
      _tile_stored(1, at + kTile, step);
      if (two) {
        _tile_stored(2, below, step);
        _tile_stored(3, below + kTile, step);
      }
      settle();
    }
}

// `count` keys and values from key `key` on, with which a tile of keys begins.
static void attend_tiled_keys(const Attention& a, const AttentionTile& tile, const Running& run, int64_t key,
                              int64_t count) {
  Places places;
  for (int64_t i = 0; i * kTile < count; i++) {
    places.keys[i] = block_of<Bf16>(a, tile, key + i * kTile, 0);
    places.values[i] = block_of<Bf16>(a, tile, key + i * kTile, 1);
  }
  tiled_scores(a, run, places, count);
  tiled_softmax(a, run, key, count, sees_all(a, run, key, count));
  add_tiled_values(a, run, places, count);
}

static void attend_by_tiles(const Attention& a, const AttentionTile& tile, const AttentionTile* next, float* scratch) {
  const bool is_few = tile.end - tile.begin <= kFewRows && !a.batch_invariant;
  if (is_few || !may_be_tiled(a)) return attend(a, tile, next, scratch);
  Running run;
  run.q = scratch;
  run.sums = run.q + kTileRows * (a.head_dim / 2);
  run.weights = run.sums + kTileRows * a.head_dim;
  run.pairs = run.weights + kTileRows * kTiledKeys;
  run.top = run.pairs + kTileRows * (kTiledKeys / 2);
  run.total = run.top + kTileRows;
  run.rescale = run.total + kTileRows;
  int32_t position[kTileRows];
  run.position = position, run.rows = tile.end - tile.begin, run.narrow = false, run.paired = true;
  run.filled = (run.rows + kTile - 1) / kTile * kTile;
  begin_tile<Bf16>(a, tile, run);
  std::fill(run.sums + run.rows * a.head_dim, run.sums + run.filled * a.head_dim, 0.0f);
  run.last_key = last_key(a, tile, run);
  set_shapes(2 * kTile);
  const int64_t oldest = first_key(a, tile);
  for (int64_t key = oldest - oldest % kTile; key <= run.last_key; key += kTiledKeys)
    attend_tiled_keys(a, tile, run, key, std::min(kTiledKeys, run.last_key + 1 - key));
  _tile_release();
  end_tile<Bf16>(a, tile, run);
}

}  // namespace jaxllm::JAXLLM_ISA
