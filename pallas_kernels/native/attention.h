// Ragged paged attention: an online softmax (arXiv 1805.02867) over the blocks of a sequence, where they lie.
#pragma once

#include "gemm.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int kRowVectors = kRegisters == 32 ? 4 : 2;  // of query rows, in a wide tile
constexpr int64_t kTileRows = kRowVectors * kWidth;
constexpr int64_t kFewRows = 8;  // up to here a tile is narrow: each score is a dot product
constexpr int kFewVectors = (kFewRows + kWidth - 1) / kWidth;
constexpr int64_t kKeys = 64;      // that a tile attends to at a time, at most
constexpr int kKeysAtOnce = 6;     // whose scores stay in registers
constexpr float kNothing = -1e30f;  // the maximum of no scores: finite, so that differences are numbers

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// What a tile keeps while it goes over the keys.
struct Running {
  float* q;       // scaled; narrow: [rows, head_dim], wide: [head_dim, kTileRows]
  float* weights;  // [keys, kTileRows]: scores, then what they weigh
  float* sums;    // [rows, head_dim]
  float* keys;    // [keys, head_dim], of keys that aren't float32
  float *top, *total, *rescale;  // [kTileRows]
  int32_t* position;             // [kTileRows]
  int64_t rows;
};

static int64_t scratch_floats(const Attention& a) {
  return kTileRows * (2 * a.head_dim + kKeys + 4) + kKeys * a.head_dim;
}

template <class T>
static const T* block_of(const Attention& a, const AttentionTile& tile, int64_t key, int64_t is_value) {
  const int64_t block = a.block_tables[tile.seq * a.blocks_per_seq + key / a.block_size];
  const int64_t plane = (block * 2 + is_value) * a.kv_heads + tile.kv_head;
  return static_cast<const T*>(a.pool) + (plane * a.block_size + key % a.block_size) * a.head_dim;
}

template <class T>
static void write_kv_as(const Attention& a, int64_t seq, int64_t begin, int64_t end) {
  const int64_t first = a.cu_q_lens[seq], start = a.kv_lens[seq] - (a.cu_q_lens[seq + 1] - first);
  for (int64_t i = begin; i < end; i++)
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const AttentionTile at{seq, 0, 0, head};
      const int64_t from = ((first + i) * a.kv_heads + head) * a.head_dim;
      for (int is_value = 0; is_value < 2; is_value++)
        std::memcpy(const_cast<T*>(block_of<T>(a, at, start + i, is_value)),
                    static_cast<const T*>(is_value ? a.v : a.k) + from, a.head_dim * sizeof(T));
    }
}

static void write_kv(const Attention& a, int64_t seq, int64_t begin, int64_t end) {
  (a.dtype == DType::kF32 ? write_kv_as<float> : write_kv_as<Bf16>)(a, seq, begin, end);
}

// Flat index in q and out of a tile's row.
static int64_t row_offset(const Attention& a, const AttentionTile& tile, int64_t row) {
  const int64_t group = a.heads / a.kv_heads, at = tile.begin + row;
  return ((a.cu_q_lens[tile.seq] + at / group) * a.heads + tile.kv_head * group + at % group) * a.head_dim;
}

template <class T>
static void begin_tile(const Attention& a, const AttentionTile& tile, Running& run) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t start = a.kv_lens[tile.seq] - (a.cu_q_lens[tile.seq + 1] - a.cu_q_lens[tile.seq]);
  const bool few = run.rows <= kFewRows;
  for (int64_t row = 0; row < kTileRows; row++) {
    const int64_t given = row < run.rows ? row : run.rows - 1;  // rows that fill up vectors repeat the last
    run.position[row] = (int32_t)(start + (tile.begin + given) / group);
    run.top[row] = kNothing;
    run.total[row] = 0;
    if (few && row >= run.rows) continue;
    const T* q = static_cast<const T*>(a.q) + row_offset(a, tile, given);
    for (int64_t d = 0; d < a.head_dim; d++)
      run.q[few ? row * a.head_dim + d : d * kTileRows + row] = value(q + d) * a.scale;
  }
  std::memset(run.sums, 0, run.rows * a.head_dim * sizeof(float));
}

template <class T>
static void end_tile(const Attention& a, const AttentionTile& tile, const Running& run) {
  for (int64_t row = 0; row < run.rows; row++) {
    T* out = static_cast<T*>(a.out) + row_offset(a, tile, row);
    for (int64_t d = 0; d < a.head_dim; d++) put(out + d, run.sums[row * a.head_dim + d] / run.total[row]);
  }
}

// sums += weights^T @ values, for `count` values from where they lie.
template <class T>
static void add_values(const Attention& a, const Running& run, const T* values, int64_t count) {
  int64_t d = 0;
  const auto add = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; d + kVectors * kWidth <= a.head_dim; d += kVectors * kWidth)
      for (int64_t row = 0; row < run.rows; row += kMostRows) {
        const int64_t rows = run.rows - row < kMostRows ? run.rows - row : kMostRows;
        tile_of<kVectors, false, T>(rows)(run.weights + row, kTileRows, values + d, a.head_dim,
                                          run.sums + row * a.head_dim + d, a.head_dim, count, false, 0, nullptr);
      }
  };
  add(Count<kVectors>());
  add(Count<1>());
  for (; d < a.head_dim; d++)
    for (int64_t row = 0; row < run.rows; row++)
      for (int64_t i = 0; i < count; i++)
        run.sums[row * a.head_dim + d] += run.weights[i * kTileRows + row] * value(values + i * a.head_dim + d);
}

static Floats capped(const Attention& a, Floats scores) {
  return a.soft_cap == 0 ? scores : tanh(scores / a.soft_cap) * a.soft_cap;
}

// Scores that row vector `v` has not seen become what weighs nothing. The first key is number `key`.
static Floats masked(const Attention& a, const Running& run, int v, int32_t key, Floats scores) {
  Ints position;
  std::memcpy(&position, run.position + v * kWidth, sizeof position);
  const Ints age = position - key;
  Ints seen = age >= 0;
  if (a.window) seen &= age < (int32_t)a.window;
  return seen ? scores : broadcast(-__builtin_inff());
}

// Scores to weights, in place, and the running maximum and total; the sums so far are rescaled.
template <int kVectors>
static void softmax(const Attention& a, const Running& run, int64_t key, int64_t count, bool all_seen) {
  for (int v = 0; v < kVectors; v++) {
    const Floats before = load(run.top + v * kWidth);
    Floats top = before, total{};
    for (int64_t i = 0; i < count; i++) {
      float* const at = run.weights + i * kTileRows + v * kWidth;
      Floats scores = capped(a, load(at));
      if (!all_seen) scores = masked(a, run, v, (int32_t)(key + i), scores);
      store(at, scores);
      top = max(top, scores);
    }
    for (int64_t i = 0; i < count; i++) {
      float* const at = run.weights + i * kTileRows + v * kWidth;
      const Floats weights = exp(load(at) - top);
      store(at, weights);
      total += weights;
    }
    const Floats rescale = exp(before - top);
    store(run.rescale + v * kWidth, rescale);
    store(run.top + v * kWidth, top);
    store(run.total + v * kWidth, load(run.total + v * kWidth) * rescale + total);
  }
  for (int64_t row = 0; row < run.rows; row++) {
    const float factor = run.rescale[row];
    float* const sums = run.sums + row * a.head_dim;
    if (factor != 1.0f)
      for (int64_t d = 0; d < a.head_dim; d++) sums[d] *= factor;
  }
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

template <int kVectors>
static void wide_scores(const Attention& a, const Running& run, const float* keys, int64_t count) {
  int64_t i = 0;
  for (; i + kKeysAtOnce <= count; i += kKeysAtOnce)
    scores_of<kKeysAtOnce, kVectors>(keys + i * a.head_dim, run.q, run.weights + i * kTileRows, a.head_dim);
  for (; i < count; i++)
    scores_of<1, kVectors>(keys + i * a.head_dim, run.q, run.weights + i * kTileRows, a.head_dim);
}

static const float* widened(const Attention&, const Running&, const float* keys, int64_t) { return keys; }

static const float* widened(const Attention& a, const Running& run, const Bf16* keys, int64_t count) {
  for (int64_t i = 0; i < count * a.head_dim; i++) run.keys[i] = value(keys + i);
  return run.keys;
}

// weights[keys, rows], as of a wide tile, by dot products.
template <int kRows, class T>
static void narrow_scores(const Attention& a, const Running& run, const T* keys, int64_t count, int64_t row) {
  constexpr int kColumns = 4;
  float scores[kRows * kColumns];
  int64_t i = 0;
  const float* const q = run.q + row * a.head_dim;
  for (; i < count; i += kColumns) {
    const int64_t some = count - i < kColumns ? count - i : kColumns;
    if (some == kColumns)
      dots<kRows, kColumns>(q, keys + i * a.head_dim, a.head_dim, scores, kColumns);
    else
      for (int64_t c = 0; c < some; c++)
        dots<kRows, 1>(q, keys + (i + c) * a.head_dim, a.head_dim, scores + c, kColumns);
    for (int64_t c = 0; c < some; c++)
      for (int r = 0; r < kRows; r++) run.weights[(i + c) * kTileRows + row + r] = scores[r * kColumns + c];
  }
}

static void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// `count` keys and values from key `key` on, all in one block.
template <class T>
static void attend_keys(const Attention& a, const AttentionTile& tile, const Running& run, int64_t key,
                        int64_t count) {
  const T* const keys = block_of<T>(a, tile, key, 0);
  const T* const values = block_of<T>(a, tile, key, 1);
  prefetch(values, count * a.head_dim * sizeof(T));
  if (const int64_t next = key + count; next <= run.position[run.rows - 1]) {
    const int64_t in_block = a.block_size - next % a.block_size;
    prefetch(block_of<T>(a, tile, next, 0), (in_block < kKeys ? in_block : kKeys) * a.head_dim * sizeof(T));
  }
  const int32_t first = run.position[0], last = run.position[run.rows - 1];
  const bool all_seen = key + count - 1 <= first && (!a.window || last - key < a.window);
  if (run.rows <= kFewRows) {
    int64_t row = 0;
    for (; row + 4 <= run.rows; row += 4) narrow_scores<4>(a, run, keys, count, row);
    for (; row + 2 <= run.rows; row += 2) narrow_scores<2>(a, run, keys, count, row);
    for (; row < run.rows; row++) narrow_scores<1>(a, run, keys, count, row);
    softmax<kFewVectors>(a, run, key, count, all_seen);
  } else if (run.rows <= kTileRows / 2) {
    wide_scores<kRowVectors / 2>(a, run, widened(a, run, keys, count), count);
    softmax<kRowVectors / 2>(a, run, key, count, all_seen);
  } else {
    wide_scores<kRowVectors>(a, run, widened(a, run, keys, count), count);
    softmax<kRowVectors>(a, run, key, count, all_seen);
  }
  add_values(a, run, values, count);
}

template <class T>
static void attend_as(const Attention& a, const AttentionTile& tile, float* scratch) {
  Running run;
  run.q = scratch;
  run.sums = run.q + kTileRows * a.head_dim;
  run.weights = run.sums + kTileRows * a.head_dim;
  run.keys = run.weights + kKeys * kTileRows;
  run.top = run.keys + kKeys * a.head_dim;
  run.total = run.top + kTileRows;
  run.rescale = run.total + kTileRows;
  int32_t position[kTileRows];
  run.position = position;
  run.rows = tile.end - tile.begin;
  begin_tile<T>(a, tile, run);
  const int64_t last = run.position[run.rows - 1], oldest = a.window ? run.position[0] - a.window + 1 : 0;
  for (int64_t key = oldest > 0 ? oldest : 0; key <= last;) {
    const int64_t in_block = a.block_size - key % a.block_size, left = last + 1 - key;
    int64_t count = in_block < left ? in_block : left;
    if (count > kKeys) count = kKeys;
    attend_keys<T>(a, tile, run, key, count);
    key += count;
  }
  end_tile<T>(a, tile, run);
}

static void attend(const Attention& a, const AttentionTile& tile, float* scratch) {
  (a.dtype == DType::kF32 ? attend_as<float> : attend_as<Bf16>)(a, tile, scratch);
}

}  // namespace jaxllm::JAXLLM_ISA
