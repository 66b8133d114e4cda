// Ragged paged attention: an online softmax (arXiv 1805.02867) over the blocks of a sequence, where they lie.
#pragma once

#include <type_traits>

#include "gemm.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int kRowVectors = kRegisters == 32 ? 4 : 2;  // of query rows, in a wide tile
constexpr int64_t kTileRows = kRowVectors * kWidth;
constexpr int64_t kFewRows = 8;  // up to here a tile is narrow: each score is a dot product
constexpr int kRowsAtOnce = kRegisters == 32 ? 4 : 2;  // of a narrow tile, whose sums stay in registers
constexpr int64_t kKeys = 64;      // that a tile attends to at a time, at most
constexpr int kKeysAtOnce = 6;     // whose scores stay in registers
constexpr float kNothing = -1e30f;  // the maximum of no scores: finite, so that differences are numbers

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

struct Int8 {
  int8_t bits;
};

static inline Floats load(const Int8* p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
#if defined(__AVX512F__)
  return __builtin_convertvector((Ints)_mm512_cvtepi8_epi32((__m128i)b), Floats);
#else
  return __builtin_convertvector(__builtin_convertvector(b, Ints), Floats);
#endif
}

static inline float value(const Int8* p) { return p->bits; }

// e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity.
struct Float8 {
  uint8_t bits;
};

static inline Floats load(const Float8* p) { return load_float8(&p->bits); }

static inline float value(const Float8* p) {
  const uint32_t magnitude = p->bits & 127;
  const uint32_t word = magnitude == 127 ? 0x7fc00000 : (magnitude << 20) + (120 << 23);
  float f;
  std::memcpy(&f, &word, sizeof f);
  if (magnitude < 8) f = magnitude * (1.0f / 512);
  return p->bits & 128 ? -f : f;
}

// Calls `act(T*, Pool*)`: null pointers, of the types that the arrays and the pool have.
template <class Act>
static void with_types(const Attention& a, const Act& act) {
  float* const f32 = nullptr;
  Bf16* const bf16 = nullptr;
  Int8* const int8 = nullptr;
  Float8* const float8 = nullptr;
  const bool is_f32 = a.dtype == DType::kF32;
  if (a.pool_dtype == DType::kInt8)
    is_f32 ? act(f32, int8) : act(bf16, int8);
  else if (a.pool_dtype == DType::kFloat8)
    is_f32 ? act(f32, float8) : act(bf16, float8);
  else
    is_f32 ? act(f32, f32) : act(bf16, bf16);
}

// What a tile keeps while it goes over the keys.
struct Running {
  float* q;       // scaled; narrow: [rows, head_dim], wide: [head_dim, kTileRows], or paired, not scaled, half of that
  float* weights;  // scores, then what they weigh; narrow: [rows, kKeys], wide: [keys, kTileRows]
  float* sums;    // [rows, head_dim]
  float* keys;    // [keys, head_dim], of keys that aren't float32
  float* pairs;   // [keys / 2, kTileRows]: two weights in bfloat16, in the place of `weights`
  bool narrow;    // whether its rows are computed as if each were alone, and keys fill vectors
  bool paired;    // whether two numbers of bfloat16 are multiplied at once
  float *top, *total, *rescale;  // [kTileRows]
  int32_t* position;             // [kTileRows]
  int64_t rows, filled;  // up to `filled`, which fill vectors, the last one is repeated
  int32_t last_key;  // that some row sees
};

static int64_t tile_rows(const Attention&) { return kTileRows; }

static int64_t scratch_floats(const Attention& a) {
  return kTileRows * (2 * a.head_dim + kKeys + kKeys / 2 + 4) + kKeys * a.head_dim;
}

template <class T>
static const T* block_of(const Attention& a, const AttentionTile& tile, int64_t key, int64_t is_value) {
  const int64_t block = a.block_tables[tile.seq * a.blocks_per_seq + key / a.block_size];
  const int64_t plane = (block * 2 + is_value) * a.kv_heads + tile.kv_head;
  return static_cast<const T*>(a.pool) + (plane * a.block_size + key % a.block_size) * a.head_dim;
}

template <class T>
static void write_cell(const T* from, T* to, int64_t size, float) {
  std::memcpy(to, from, size * sizeof(T));
}

// To the nearest, to even if there are two: 1.5 * 2^23 leaves no bits for fractions.
template <class T>
static void write_cell(const T* from, Int8* to, int64_t size, float scale) {
  for (int64_t i = 0; i < size; i++) {
    const float x = value(from + i) / scale, clipped = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
    to[i].bits = (int8_t)((clipped + 12582912.0f) - 12582912.0f);
  }
}

// Likewise, and NaN stays one.
template <class T>
static void write_cell(const T* from, Float8* to, int64_t size, float scale) {
  for (int64_t i = 0; i < size; i++) {
    const float x = value(from + i) / scale;
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    const uint32_t sign = word >> 24 & 128, magnitude = word & 0x7fffffff;
    float size_of;
    std::memcpy(&size_of, &magnitude, sizeof size_of);
    // Below 2^-6 numbers are multiples of 2^-9; from there on the upper 3 bits of the mantissa are kept.
    const uint32_t small = (uint32_t)((size_of * 512 + 12582912.0f) - 12582912.0f);
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t finite = size_of < 1.0f / 64 ? small : size_of < 448.0f ? normal : 0x7e;
    to[i].bits = (uint8_t)(sign | (x != x ? 0x7f : finite));
  }
}

static float kv_scale(const Attention& a, int64_t is_value, int64_t kv_head) {
  return a.kv_scales ? a.kv_scales[is_value * a.kv_heads + kv_head] : 1.0f;
}

template <class T, class Pool>
static void write_kv_as(const Attention& a, int64_t seq, int64_t begin, int64_t end) {
  const int64_t first = a.cu_q_lens[seq], start = a.kv_lens[seq] - (a.cu_q_lens[seq + 1] - first);
  for (int64_t i = begin; i < end; i++)
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const AttentionTile at{seq, 0, 0, head};
      const int64_t from = ((first + i) * a.kv_heads + head) * a.head_dim;
      for (int is_value = 0; is_value < 2; is_value++)
        write_cell(static_cast<const T*>(is_value ? a.v : a.k) + from,
                   const_cast<Pool*>(block_of<Pool>(a, at, start + i, is_value)), a.head_dim,
                   kv_scale(a, is_value, head));
    }
}

static void write_kv(const Attention& a, int64_t seq, int64_t begin, int64_t end) {
  with_types(a, [&](auto t, auto pool) {
    write_kv_as<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(pool)>>(a, seq, begin, end);
  });
}

// Flat index in q and out of a tile's row.
static int64_t row_offset(const Attention& a, const AttentionTile& tile, int64_t row) {
  const int64_t group = a.heads / a.kv_heads, at = tile.begin + row;
  return ((a.cu_q_lens[tile.seq] + at / group) * a.heads + tile.kv_head * group + at % group) * a.head_dim;
}

// The position of a tile's row, counted from its first.
static int64_t position_of(const Attention& a, const AttentionTile& tile, int64_t row) {
  const int64_t start = a.kv_lens[tile.seq] - (a.cu_q_lens[tile.seq + 1] - a.cu_q_lens[tile.seq]);
  return start + (tile.begin + row) / (a.heads / a.kv_heads);
}

// The first key that a tile sees.
static int64_t first_key(const Attention& a, const AttentionTile& tile) {
  const int64_t position = position_of(a, tile, 0);
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}

// A part of a block, which begins with key number `first` of a group.
template <class T>
struct Piece {
  const T *keys, *values;
  int64_t first, count;
};

// What a tile attends to at a time: of the kKeys keys from `base` on, a multiple of that, those from `first` to `end`. So
// every tile has the same groups, and what a row doesn't see of them adds zeros to its sums.
template <class T>
struct Group {
  int64_t base, first, end, num_pieces;
  Piece<T> pieces[kKeys];
};

// Those from `key` on, of which `last` is the last.
template <class T>
static Group<T> group_of(const Attention& a, const AttentionTile& tile, int64_t key, int64_t last) {
  Group<T> group;
  group.base = key - key % kKeys, group.first = key % kKeys, group.end = std::min(kKeys, last + 1 - group.base);
  group.num_pieces = 0;
  for (int64_t i = group.first; i < group.end; i += group.pieces[group.num_pieces++].count) {
    const int64_t at = group.base + i, count = std::min(a.block_size - at % a.block_size, group.end - i);
    group.pieces[group.num_pieces] = {block_of<T>(a, tile, at, 0), block_of<T>(a, tile, at, 1), i, count};
  }
  return group;
}

// q of a vector of rows from `first` on, as tiles read it: scaled, or in pairs.
template <class T, bool kPaired>
static void begin_rows(const Attention& a, const AttentionTile& tile, const Running& run, int64_t first, float scale) {
  constexpr int kUnit = kPaired ? 2 : 1;
  const T* rows[kWidth];
  for (int i = 0; i < kWidth; i++)
    rows[i] = static_cast<const T*>(a.q) + row_offset(a, tile, std::min(first + i, run.rows - 1));
  const int64_t units = a.head_dim / kUnit;
  int64_t unit = 0;
  for (; unit + kWidth <= units; unit += kWidth) {
    Floats square[kWidth];
    for (int i = 0; i < kWidth; i++) square[i] = kPaired ? read_bits(rows[i] + 2 * unit) : load(rows[i] + unit) * scale;
    transpose(square);
    for (int i = 0; i < kWidth; i++) store(run.q + (unit + i) * kTileRows + first, square[i]);
  }
  for (; unit < units; unit++)
    for (int i = 0; i < kWidth; i++) {
      float* const to = run.q + unit * kTileRows + first + i;
      if (kPaired)
        std::memcpy(to, rows[i] + 2 * unit, sizeof(float));
      else
        *to = value(rows[i] + unit) * scale;
    }
}

template <class T>
static void begin_tile(const Attention& a, const AttentionTile& tile, Running& run) {
  const int64_t group = a.heads / a.kv_heads;
  const float scale = a.scale * kv_scale(a, 0, tile.kv_head);
  for (int64_t row = 0; row < run.filled; row++) {
    run.top[row] = kNothing;
    run.total[row] = 0;
    if (run.narrow && row >= run.rows) continue;
    const int64_t given = row < run.rows ? row : run.rows - 1;
    run.position[row] = (int32_t)position_of(a, tile, given);
    if (a.sinks) {
      run.top[row] = a.sinks[tile.kv_head * group + (tile.begin + given) % group];
      run.total[row] = 1;
    }
    if (run.narrow) {
      const T* q = static_cast<const T*>(a.q) + row_offset(a, tile, given);
      for (int64_t d = 0; d < a.head_dim; d++) run.q[row * a.head_dim + d] = value(q + d) * scale;
    }
  }
  for (int64_t row = 0; !run.narrow && row < run.filled; row += kWidth)
    (run.paired ? begin_rows<T, true> : begin_rows<T, false>)(a, tile, run, row, scale);
  std::memset(run.sums, 0, run.rows * a.head_dim * sizeof(float));
}

template <class T>
static void end_tile(const Attention& a, const AttentionTile& tile, const Running& run) {
  const float scale = kv_scale(a, 1, tile.kv_head);
  for (int64_t row = 0; row < run.rows; row++) {
    T* out = static_cast<T*>(a.out) + row_offset(a, tile, row);
    for (int64_t d = 0; d < a.head_dim; d++) put(out + d, run.sums[row * a.head_dim + d] / run.total[row] * scale);
  }
}

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
                                                          run.sums + row * a.head_dim + d, a.head_dim, of.count, false, nothing);
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

static Floats capped(const Attention& a, Floats scores) {
  return a.soft_cap == 0 ? scores : tanh(scores / a.soft_cap) * a.soft_cap;
}

// Which of these keys, so many positions before a row, it sees; none of them lies past the sequence's end.
static Ints seen_at(const Attention& a, Ints age) {
  Ints seen = a.causal ? age >= 0 : age == age;
  if (a.window) seen &= age < (int32_t)a.window;
  if (a.window && !a.causal) seen &= age > -(int32_t)a.window;
  return seen;
}

// Scores that row vector `v` has not seen become what weighs nothing. The first key is number `key`.
static Floats masked(const Attention& a, const Running& run, int v, int32_t key, Floats scores) {
  Ints position;
  std::memcpy(&position, run.position + v * kWidth, sizeof position);
  return seen_at(a, position - key) ? scores : broadcast(-__builtin_inff());
}

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

template <class T>
static void widen(const T* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(to + i, load(from + i));
  for (; i < size; i++) to[i] = value(from + i);
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

typedef Part<4>::Lanes Four;

template <int kFirst, int kSecond, int kThird, int kFourth>
static inline Four pick(Four a, Four b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFirst, kSecond, kThird, kFourth);
#else
  typedef int32_t Indices __attribute__((vector_size(16)));
  return __builtin_shuffle(a, b, Indices{kFirst, kSecond, kThird, kFourth});
#endif
}

template <int kLanes>
static inline typename Part<kLanes / 2>::Lanes add_halves(typename Part<kLanes>::Lanes v) {
  typename Part<kLanes / 2>::Lanes half[2];
  std::memcpy(half, &v, sizeof v);
  return half[0] + half[1];
}

// The sum of each vector's lanes: halves are added until four lanes are left, then what these have at the same place.
template <int kLanes, class Lanes>
static inline Four sums_of_four(Lanes a, Lanes b, Lanes c, Lanes d) {
  if constexpr (kLanes == 4) {
    const Four ab = pick<0, 4, 1, 5>(a, b) + pick<2, 6, 3, 7>(a, b);
    const Four cd = pick<0, 4, 1, 5>(c, d) + pick<2, 6, 3, 7>(c, d);
    return pick<0, 1, 4, 5>(ab, cd) + pick<2, 3, 6, 7>(ab, cd);
  } else {
    return sums_of_four<kLanes / 2>(add_halves<kLanes>(a), add_halves<kLanes>(b), add_halves<kLanes>(c),
                                    add_halves<kLanes>(d));
  }
}

// scores[row, key] of four keys, `acc` being the products of each row and key, whose lanes are added in that order.
template <int kRows>
static inline void store_sums(const Floats (*acc)[4], float* scores) {
#if defined(__AVX512F__)
  if constexpr (kRows == 4) {  // all at once takes half of the instructions
    Floats rows[4];
    for (int r = 0; r < 4; r++) {
      const __m512 a = (__m512)acc[r][0], b = (__m512)acc[r][1], c = (__m512)acc[r][2], d = (__m512)acc[r][3];
      const Floats ab = (Floats)_mm512_shuffle_f32x4(a, b, 0x44) + (Floats)_mm512_shuffle_f32x4(a, b, 0xee);
      const Floats cd = (Floats)_mm512_shuffle_f32x4(c, d, 0x44) + (Floats)_mm512_shuffle_f32x4(c, d, 0xee);
      rows[r] = (Floats)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0x88) +
                (Floats)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0xdd);  // four lanes of each key
    }
    __m512 pairs[2];
    for (int i = 0; i < 2; i++) {
      const __m512 even = (__m512)rows[2 * i], odd = (__m512)rows[2 * i + 1];
      pairs[i] = (__m512)((Floats)_mm512_shuffle_ps(even, odd, 0x44) + (Floats)_mm512_shuffle_ps(even, odd, 0xee));
    }
    const __m512 by_key = (__m512)((Floats)_mm512_shuffle_ps(pairs[0], pairs[1], 0x88) +
                                   (Floats)_mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Floats by_row = (Floats)_mm512_permutexvar_ps(order, by_key);
    for (int r = 0; r < 4; r++) std::memcpy(scores + r * kKeys, reinterpret_cast<const float*>(&by_row) + 4 * r, 4 * sizeof(float));
    return;
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Four sums = sums_of_four<kWidth>(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    std::memcpy(scores + r * kKeys, &sums, sizeof sums);
  }
}

// What the caches get while something else is read, a part at a time: all of it at once would keep reads waiting.
struct Upcoming {
  const char *at, *end;

  void bring(int64_t bytes) {
    for (const char* const stop = end - at < bytes ? end : at + bytes; at < stop; at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

// Keys, or values, that narrow tiles read one after the other, and what is brought in meanwhile.
template <class T>
struct Run {
  const T* at;
  int64_t first, count;
  Upcoming next;
};

// weights[row to row + kRows, keys]: dot products with the keys before `end`, four at a time.
template <int kRows, class T>
static void narrow_scores(const Attention& a, const Running& run, Run<T>& of, int64_t end, int64_t row) {
  const int64_t depth = a.head_dim, count = std::min(of.count, end - of.first);
  const T* const keys = of.at;
  const float* const q = run.q + row * depth;
  float* const scores = run.weights + row * kKeys + of.first;
  const auto add_rest = [&](int64_t i, int r, int64_t d) {  // of dimensions that fill no vector
    float total = scores[r * kKeys + i];
    for (; d < depth; d++) total = __builtin_fmaf(q[r * depth + d], value(keys + i * depth + d), total);
    scores[r * kKeys + i] = total;
  };
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    of.next.bring(4 * depth * sizeof(T));
    Floats acc[kRows][4];
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < 4; c++) acc[r][c] = Floats{};
    int64_t d = 0;
    for (; d + kWidth <= depth; d += kWidth) {
      Floats part[4];
      for (int c = 0; c < 4; c++) part[c] = load(keys + (i + c) * depth + d);
      for (int r = 0; r < kRows; r++) {
        const Floats x = load(q + r * depth + d);
        for (int c = 0; c < 4; c++) acc[r][c] += x * part[c];
      }
    }
    store_sums<kRows>(acc, scores + i);
    for (int r = 0; d < depth && r < kRows; r++)
      for (int c = 0; c < 4; c++) add_rest(i + c, r, d);
  }
  for (; i < count; i++)
    for (int r = 0; r < kRows; r++) {
      Floats total{};
      int64_t d = 0;
      for (; d + kWidth <= depth; d += kWidth) total += load(q + r * depth + d) * load(keys + i * depth + d);
      scores[r * kKeys + i] = sum(total);
      add_rest(i, r, d);
    }
}

// As `softmax`, with keys along the vectors; the sums are not rescaled yet.
static void narrow_softmax(const Attention& a, const Running& run, int64_t base, int64_t first, int64_t end) {
  Ints lane;
  for (int i = 0; i < kWidth; i++) lane[i] = i;
  float before[kTileRows], totals[kTileRows] = {};
  std::memcpy(before, run.top, run.filled * sizeof(float));
  for (int64_t row = 0; row < run.rows; row++) {
    float* const weights = run.weights + row * kKeys;
    Floats top = broadcast(before[row]), total{};
    const int64_t position = run.position[row];
    const bool as_they_are = a.soft_cap == 0 && a.causal && !a.window && !first && end % kWidth == 0 && base + end - 1 <= position;
    for (int64_t i = 0; as_they_are && i < end; i += kWidth) top = max(top, load(weights + i));
    for (int64_t i = first - first % kWidth; !as_they_are && i < end; i += kWidth) {
      const Ints at = lane + (int32_t)i, age = run.position[row] - ((int32_t)base + at);
      const Ints seen = (at >= (int32_t)first) & (at < (int32_t)end) & seen_at(a, age);
      const Floats scores = seen ? capped(a, load(weights + i)) : broadcast(-__builtin_inff());
      store(weights + i, scores);
      top = max(top, scores);
    }
    run.top[row] = largest(top);
    for (int64_t i = first - first % kWidth; i < end; i += kWidth) {
      const Floats w = exp(load(weights + i) - run.top[row]);
      store(weights + i, w);
      total += w;
    }
    totals[row] = sum(total);
  }
  for (int64_t v = 0; v < run.filled; v += kWidth) {
    const Floats rescale = exp(load(before + v) - load(run.top + v));
    store(run.rescale + v, rescale);
    store(run.total + v, load(run.total + v) * rescale + load(totals + v));
  }
}

// sums[row to row + kRows, d to d + kVectors * kWidth] = rescaled + weights @ values, for values before `end`.
template <int kRows, int kVectors, class T>
static void narrow_sums(const Attention& a, const Running& run, Run<T>* of, int64_t num_runs, int64_t end, int64_t row,
                        int64_t d) {
  float* const sums = run.sums + row * a.head_dim + d;
  Floats acc[kRows][kVectors];
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) acc[r][v] = load(sums + r * a.head_dim + v * kWidth) * run.rescale[row + r];
  for (Run<T>* each = of; each < of + num_runs; each++) {
    const float* const weights = run.weights + row * kKeys + each->first;
    const int64_t count = std::min(each->count, end - each->first);
    for (int64_t i = 0; i < count; i++) {
      each->next.bring(a.head_dim * sizeof(T));
      Floats part[kVectors];
      for (int v = 0; v < kVectors; v++) part[v] = load(each->at + i * a.head_dim + d + v * kWidth);
      for (int r = 0; r < kRows; r++) {
        const Floats factor = broadcast(weights[r * kKeys + i]);
        for (int v = 0; v < kVectors; v++) acc[r][v] += factor * part[v];
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) store(sums + r * a.head_dim + v * kWidth, acc[r][v]);
}

template <int kRows, class T>
static void add_narrow_values(const Attention& a, const Running& run, Run<T>* of, int64_t num_runs, int64_t end,
                              int64_t row) {
  int64_t d = 0;
  for (; d + 4 * kWidth <= a.head_dim; d += 4 * kWidth) narrow_sums<kRows, 4>(a, run, of, num_runs, end, row, d);
  for (; d + kWidth <= a.head_dim; d += kWidth) narrow_sums<kRows, 1>(a, run, of, num_runs, end, row, d);
  for (; d < a.head_dim; d++)
    for (int64_t r = row; r < row + kRows; r++) {
      // Each product is rounded with its sum, whatever the compiler makes of the loops around: as in the vectors.
      float total = run.sums[r * a.head_dim + d] * run.rescale[r];
      for (const Run<T>* each = of; each < of + num_runs; each++)
        for (int64_t i = 0; i < std::min(each->count, end - each->first); i++)
          total = __builtin_fmaf(run.weights[r * kKeys + each->first + i], value(each->at + i * a.head_dim + d), total);
      run.sums[r * a.head_dim + d] = total;
    }
}

// Calls `act(Count, row, end)` for all rows, as many at once as are best; what they see ends before key `end` of a group.
template <class Act>
static void for_rows(const Attention& a, const Running& run, int64_t base, int64_t end, const Act& act) {
  const auto call = [&](auto rows, int64_t row) {
    const int64_t last = run.position[row + decltype(rows)::value - 1];
    act(rows, row, a.causal ? std::min(end, last + 1 - base) : end);
  };
  int64_t row = 0;
  for (; row + kRowsAtOnce <= run.rows; row += kRowsAtOnce) call(Count<kRowsAtOnce>(), row);
  for (; row + 2 <= run.rows; row += 2) call(Count<2>(), row);
  for (; row < run.rows; row++) call(Count<1>(), row);
}

static void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// The keys, or values, from `key` to `last` that lie in its block.
template <class T>
static Upcoming upcoming(const Attention& a, const AttentionTile& tile, int64_t key, int64_t last, int64_t is_value) {
  const int64_t count = std::min(std::min(a.block_size - key % a.block_size, last + 1 - key), kKeys);
  const char* const at = reinterpret_cast<const char*>(block_of<T>(a, tile, key, is_value));
  return {at, at + count * a.head_dim * static_cast<int64_t>(sizeof(T))};
}

// What a tile reads after a group of keys: its next block, or that with which the next tile begins.
template <class T>
static Upcoming after(const Attention& a, const AttentionTile& tile, const AttentionTile* next, const Running& run,
                      int64_t key, int64_t is_value) {
  if (key <= run.last_key) return upcoming<T>(a, tile, key, run.last_key, is_value);
  if (next) return upcoming<T>(a, *next, first_key(a, *next), position_of(a, *next, 0), is_value);
  return {nullptr, nullptr};
}

// The keys of a group, or its values, from where they lie.
template <class T>
static void runs_of(const Attention& a, const Group<T>& group, int64_t is_value, Upcoming last, Run<T>* runs) {
  for (int64_t i = 0; i < group.num_pieces; i++) {
    const Piece<T>& piece = group.pieces[i];
    runs[i] = {is_value ? piece.values : piece.keys, piece.first, piece.count, last};
    const char* const at = reinterpret_cast<const char*>(runs[i].at);
    if (i) runs[i - 1].next = {at, at + piece.count * a.head_dim * static_cast<int64_t>(sizeof(T))};
  }
}

// Likewise, widened, as one.
template <class T>
static Run<float> widened_run(const Attention& a, const Running& run, const Group<T>& group, int64_t is_value) {
  for (int64_t i = 0; i < group.num_pieces; i++) {
    const Piece<T>& piece = group.pieces[i];
    widen(is_value ? piece.values : piece.keys, run.keys + (piece.first - group.first) * a.head_dim, piece.count * a.head_dim);
  }
  return {run.keys, group.first, group.end - group.first, {nullptr, nullptr}};
}

// Keys and values of a group, and meanwhile those that come next are brought in. Where many rows read them they are widened
// first, once.
template <class T>
static void attend_narrow(const Attention& a, const AttentionTile& tile, const AttentionTile* next, const Running& run,
                          const Group<T>& group) {
  const auto over = [&](int64_t is_value, const auto& act) {
    if constexpr (!std::is_same_v<T, float>)
      if (run.rows > kFewRows) {
        Run<float> all = widened_run(a, run, group, is_value);
        return act(&all, 1);
      }
    Run<T> runs[kKeys];
    runs_of(a, group, is_value, after<T>(a, tile, next, run, group.base + group.end, is_value), runs);
    act(runs, group.num_pieces);
    for (int64_t i = 0; i < group.num_pieces; i++) runs[i].next.bring(runs[i].next.end - runs[i].next.at);
  };
  over(0, [&](auto* runs, int64_t count) {
    for (int64_t i = 0; i < count; i++)
      for_rows(a, run, group.base, group.end, [&](auto rows, int64_t row, int64_t end) {
        narrow_scores<decltype(rows)::value>(a, run, runs[i], end, row);
      });
  });
  narrow_softmax(a, run, group.base, group.first, group.end);
  over(1, [&](auto* runs, int64_t count) {
    for_rows(a, run, group.base, group.end, [&](auto rows, int64_t row, int64_t end) {
      add_narrow_values<decltype(rows)::value>(a, run, runs, count, end, row);
    });
  });
}

// Whether each row sees all of these keys.
static bool sees_all(const Attention& a, const Running& run, int64_t key, int64_t count) {
  const int32_t first = run.position[0], last = run.position[run.rows - 1];
  const int64_t last_of_all = a.causal ? first : a.window ? first + a.window - 1 : run.last_key;
  return key + count - 1 <= last_of_all && (!a.window || last - key < a.window);
}

// The last key that some row of a tile sees.
static int32_t last_key(const Attention& a, const AttentionTile& tile, const Running& run) {
  const int64_t last = run.position[run.rows - 1], end = a.kv_lens[tile.seq] - 1;
  return (int32_t)(a.causal ? last : a.window ? std::min(last + a.window - 1, end) : end);
}

// As `attend_narrow`, with rows along the vectors.
template <class T>
static void attend_wide(const Attention& a, const AttentionTile& tile, const Running& run, const Group<T>& group) {
  const bool half = run.rows <= kTileRows / 2;
  for (int64_t i = 0; i < group.num_pieces; i++) {
    const Piece<T>& piece = group.pieces[i];
    prefetch(piece.values, piece.count * a.head_dim * sizeof(T));
    Upcoming next = after<T>(a, tile, nullptr, run, group.base + piece.first + piece.count, 0);
    next.bring(next.end - next.at);
    (half ? wide_scores<kRowVectors / 2, T> : wide_scores<kRowVectors, T>)(a, run, piece.keys, piece.first, piece.count);
  }
  const bool all_seen = sees_all(a, run, group.base + group.first, group.end - group.first);
  (half ? softmax<kRowVectors / 2> : softmax<kRowVectors>)(a, run, group.base, group.first, group.end, all_seen);
  for (int64_t i = 0; i < group.num_pieces; i++) add_values(a, run, group.pieces[i]);
}

template <class T, class Pool>
static void attend_as(const Attention& a, const AttentionTile& tile, const AttentionTile* next, float* scratch) {
  Running run;
  run.q = scratch;
  run.sums = run.q + kTileRows * a.head_dim;
  run.weights = run.sums + kTileRows * a.head_dim;
  run.keys = run.weights + kKeys * kTileRows;
  run.pairs = run.keys + kKeys * a.head_dim;
  run.top = run.pairs + kKeys / 2 * kTileRows;
  run.total = run.top + kTileRows;
  run.rescale = run.total + kTileRows;
  int32_t position[kTileRows];
  run.position = position;
  run.rows = tile.end - tile.begin;
  run.narrow = run.rows <= kFewRows || a.batch_invariant;
  run.paired = kHasPairs && std::is_same_v<T, Bf16> && std::is_same_v<Pool, Bf16> && !run.narrow &&
               a.head_dim % kWidth == 0 && a.block_size % 2 == 0;
  run.filled = run.narrow ? (run.rows + kWidth - 1) / kWidth * kWidth : kTileRows;
  begin_tile<T>(a, tile, run);
  run.last_key = last_key(a, tile, run);
  const int64_t oldest = first_key(a, tile);
  for (int64_t key = run.paired ? oldest - oldest % 2 : oldest; key <= run.last_key;) {
    const Group<Pool> group = group_of<Pool>(a, tile, key, run.last_key);
    if (run.narrow)
      attend_narrow(a, tile, next, run, group);
    else
      attend_wide(a, tile, run, group);
    key = group.base + group.end;
  }
  end_tile<T>(a, tile, run);
}

static void attend(const Attention& a, const AttentionTile& tile, const AttentionTile* next, float* scratch) {
  with_types(a, [&](auto t, auto pool) {
    attend_as<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(pool)>>(a, tile, next, scratch);
  });
}

}  // namespace jaxllm::JAXLLM_ISA
