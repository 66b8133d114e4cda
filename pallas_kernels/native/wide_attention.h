// Attention of many query rows, which fill vectors.
#pragma once

#include "attention_tiles.h"

namespace jaxllm::JAXLLM_ISA {

#if defined(JAXLLM_PAIRS)
// As `add_values`, with two weights and two values at once, for the dimensions from `d` on that fill tiles; returns the
// first one after these.
template <int kVectors>
static int64_t add_pairs(const Attention& a, const Running& run, const Piece<Bf16>& of, int64_t d) {
  const float* const pairs = run.pairs + of.first / 2 * kTileRows;
  for (; d + kVectors * kWidth <= a.head_dim; d += kVectors * kWidth)
    for (int64_t row = 0; row < run.rows; row += kMostRows) {
      const int64_t rows = run.rows - row < kMostRows ? run.rows - row : kMostRows;
      Ahead nothing;
      tile_of<kVectors, From::kMatrix, Pair, Ahead>(rows)(pairs + row, kTileRows, of.values + d, a.head_dim,
                                                          run.sums + row * a.head_dim + d, a.head_dim, of.count, false,
                                                          nothing);
    }
  return d;
}
#endif

// sums += weights^T @ values, from where they lie.
template <class T>
static void add_values(const Attention& a, const Running& run, const Piece<T>& of) {
  const float* const weights = run.weights + of.first * kTileRows;
  int64_t d = 0;
#if defined(JAXLLM_PAIRS)
  if constexpr (std::is_same_v<T, Bf16>)
    if (run.paired) d = add_pairs<1>(a, run, of, add_pairs<kVectors>(a, run, of, 0));
#endif
  const auto add = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; d + kVectors * kWidth <= a.head_dim; d += kVectors * kWidth)
      for (int64_t row = 0; row < run.rows; row += kMostRows) {
        const int64_t rows = run.rows - row < kMostRows ? run.rows - row : kMostRows;
        Ahead nothing;
        tile_of<kVectors, From::kMatrix, Single<T>, Ahead>(rows)(weights + row, kTileRows, of.values + d, a.head_dim,
                                                                 run.sums + row * a.head_dim + d, a.head_dim, of.count,
                                                                 false, nothing);
      }
  };
  add(Count<kVectors>());
  add(Count<1>());
  for (; d < a.head_dim; d++)
    for (int64_t row = 0; row < run.rows; row++)
      for (int64_t i = 0; i < of.count; i++)
        run.sums[row * a.head_dim + d] += weights[i * kTileRows + row] * value(of.values + i * a.head_dim + d);
}

#if defined(JAXLLM_PAIRS)
// As `scores_of`, with two features at once; the scores are scaled afterwards.
template <int kCount, int kVectors>
static void paired_scores_of(const Bf16* keys, const float* q, float scale, float* weights, int64_t head_dim) {
  Floats acc[kCount][kVectors] = {};
  for (int64_t d = 0; d < head_dim; d += 2) {
    Floats row[kVectors];
    for (int v = 0; v < kVectors; v++) row[v] = load(q + d / 2 * kTileRows + v * kWidth);
    for (int i = 0; i < kCount; i++) {
      const Floats pair = all(reinterpret_cast<const float*>(keys + i * head_dim + d));
      for (int v = 0; v < kVectors; v++) acc[i][v] = Pair::add(acc[i][v], row[v], pair);
    }
  }
  for (int i = 0; i < kCount; i++)
    for (int v = 0; v < kVectors; v++) store(weights + i * kTileRows + v * kWidth, acc[i][v] * scale);
}

template <int kVectors>
static void paired_scores(const Attention& a, const Running& run, const Bf16* keys, float* weights, int64_t count) {
  int64_t i = 0;
  for (; i + kKeysAtOnce <= count; i += kKeysAtOnce)
    paired_scores_of<kKeysAtOnce, kVectors>(keys + i * a.head_dim, run.q, a.scale, weights + i * kTileRows, a.head_dim);
  for (; i + 2 <= count; i += 2)
    paired_scores_of<2, kVectors>(keys + i * a.head_dim, run.q, a.scale, weights + i * kTileRows, a.head_dim);
  for (; i < count; i++)
    paired_scores_of<1, kVectors>(keys + i * a.head_dim, run.q, a.scale, weights + i * kTileRows, a.head_dim);
}
#endif

static void rescale_sums(const Attention& a, const Running& run) {
  for (int64_t row = 0; row < run.rows; row++) {
    const float factor = run.rescale[row];
    float* const sums = run.sums + row * a.head_dim;
    if (factor != 1.0f)
      for (int64_t d = 0; d < a.head_dim; d++) sums[d] *= factor;
  }
}

// Scores to weights, in place, and the running maximum and total; the sums so far are rescaled.
template <int kVectors>
static void softmax(const Attention& a, const Running& run, int64_t base, int64_t first, int64_t end, bool all_seen) {
  for (int v = 0; v < kVectors; v++) {
    const Floats before = load(run.top + v * kWidth);
    Floats top = before, total{};
    const bool as_they_are = all_seen && a.soft_cap == 0;
    for (int64_t i = first; i < end; i++) {
      float* const at = run.weights + i * kTileRows + v * kWidth;
      Floats scores = load(at);
      if (!as_they_are) {
        scores = capped(a, scores);
        if (!all_seen) scores = masked(a, run, v, (int32_t)(base + i), scores);
        store(at, scores);
      }
      top = max(top, scores);
    }
    int64_t i = first;
    const auto weigh = [&](int64_t key) {
      const Floats weights = exp(load(run.weights + key * kTileRows + v * kWidth) - top);
      total += weights;
      return weights;
    };
#if defined(JAXLLM_PAIRS)
    if (run.paired)
      for (; i < end; i += 2) {
        const Floats even = weigh(i), odd = i + 1 < end ? weigh(i + 1) : Floats{};
        store(run.pairs + i / 2 * kTileRows + v * kWidth, pair_of(even, odd));
      }
#endif
    for (; i < end; i++) store(run.weights + i * kTileRows + v * kWidth, weigh(i));
    const Floats rescale = exp(before - top);
    store(run.rescale + v * kWidth, rescale);
    store(run.top + v * kWidth, top);
    store(run.total + v * kWidth, load(run.total + v * kWidth) * rescale + total);
  }
  rescale_sums(a, run);
}

// weights[keys, rows] = keys[keys, head_dim] @ q[head_dim, rows], for kCount keys.
template <int kCount, int kVectors>
static void scores_of(const float* keys, const float* q, float* weights, int64_t head_dim) {
  Floats acc[kCount][kVectors] = {};
  for (int64_t d = 0; d < head_dim; d++) {
    Floats row[kVectors];
    for (int v = 0; v < kVectors; v++) row[v] = load(q + d * kTileRows + v * kWidth);
    for (int i = 0; i < kCount; i++) {
      const Floats factor = broadcast(keys[i * head_dim + d]);
      for (int v = 0; v < kVectors; v++) acc[i][v] += factor * row[v];
    }
  }
  for (int i = 0; i < kCount; i++)
    for (int v = 0; v < kVectors; v++) store(weights + i * kTileRows + v * kWidth, acc[i][v]);
}

template <int kVectors, class T>
static void wide_scores(const Attention& a, const Running& run, const T* in_place, int64_t first, int64_t count) {
  float* const weights = run.weights + first * kTileRows;
#if defined(JAXLLM_PAIRS)
  if constexpr (std::is_same_v<T, Bf16>)
    if (run.paired) return paired_scores<kVectors>(a, run, in_place, weights, count);
#endif
  const float* keys = run.keys;
  if constexpr (std::is_same_v<T, float>)
    keys = in_place;
  else
    widen(in_place, run.keys, count * a.head_dim);
  int64_t i = 0;
  for (; i + kKeysAtOnce <= count; i += kKeysAtOnce)
    scores_of<kKeysAtOnce, kVectors>(keys + i * a.head_dim, run.q, weights + i * kTileRows, a.head_dim);
  for (; i + 2 <= count; i += 2)
    scores_of<2, kVectors>(keys + i * a.head_dim, run.q, weights + i * kTileRows, a.head_dim);
  for (; i < count; i++)
    scores_of<1, kVectors>(keys + i * a.head_dim, run.q, weights + i * kTileRows, a.head_dim);
}

// As `attend_narrow`, with rows along the vectors.
template <class T>
static void attend_wide(const Attention& a, const AttentionTile& tile, const Running& run, const Group<T>& group) {
  const bool half = run.rows <= kTileRows / 2;
  for (int64_t i = 0; i < group.num_pieces; i++) {
    const Piece<T>& piece = group.pieces[i];
    const int64_t key = group.base + piece.first;
    upcoming<T>(a, tile, key, run.last_key, 1).bring_all();
    after<T>(a, tile, nullptr, run, key + piece.count, 0).bring_all();
    (half ? wide_scores<kRowVectors / 2, T> : wide_scores<kRowVectors, T>)(a, run, piece.keys, piece.first, piece.count);
  }
  const bool all_seen = sees_all(a, run, group.base + group.first, group.end - group.first);
  (half ? softmax<kRowVectors / 2> : softmax<kRowVectors>)(a, run, group.base, group.first, group.end, all_seen);
  for (int64_t i = 0; i < group.num_pieces; i++) add_values(a, run, group.pieces[i]);
}

}  // namespace jaxllm::JAXLLM_ISA
