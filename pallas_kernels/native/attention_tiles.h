// What attention is made of: keys and values in a pool of blocks, and tiles of query rows that attend to them in groups.
#pragma once

#include <type_traits>

#include "gemm.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int kRowVectors = kRegisters == 32 ? 4 : 2;  // of query rows, in a wide tile
constexpr int64_t kTileRows = kRowVectors * kWidth;
constexpr int64_t kFewRows = 8;  // up to here a tile is narrow, in any engine: each score is a dot product
constexpr int kRowsAtOnce = kRegisters == 32 ? 4 : 2;  // of a narrow tile, whose sums stay in registers
constexpr int64_t kKeys = 64;      // that a tile attends to at a time, at most; api.py knows it too
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
  float* keys;    // [keys, head_dim], of keys, or values, that aren't float32
  float* pairs;   // [keys / 2, kTileRows]: two weights in bfloat16, in the place of `weights`
  bool narrow;    // whether its rows are computed as if each were alone, and keys fill vectors
  bool paired;    // whether two numbers of bfloat16 are multiplied at once
  float *top, *total, *rescale;  // [kTileRows]
  int32_t* position;             // [kTileRows]
  int64_t rows, filled;  // up to `filled`, which fill vectors, the last one is repeated
  int32_t last_key;  // that some row sees
};

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

template <class T>
static void widen(const T* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(to + i, load(from + i));
  for (; i < size; i++) to[i] = value(from + i);
}

// What the caches get while something else is read, a part at a time: all of it at once would keep reads waiting.
struct Upcoming {
  const char *at, *end;

  void bring(int64_t bytes) {
    for (const char* const stop = end - at < bytes ? end : at + bytes; at < stop; at += kLine) __builtin_prefetch(at, 0, 2);
  }

  void bring_all() { bring(end - at); }
};

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

}  // namespace jaxllm::JAXLLM_ISA
