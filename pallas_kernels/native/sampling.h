// Sampling: rows as wide as the vocabulary, which are read a few times and never sorted.
#pragma once

#include <cmath>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kMostGroups = 4096;  // see `lower_bound`
constexpr float kMostNoise = 16.0f;    // Gumbel noise from 23 random bits is at most 15.95

// One bit a lane, of a comparison's result.
static inline uint32_t lanes_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)mask);
#elif defined(__aarch64__)
  return vaddvq_u32((uint32x4_t)((Words)mask & Words{1, 2, 4, 8}));
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kWidth; i++) lanes |= (uint32_t)(mask[i] & 1) << i;
  return lanes;
#endif
}

static inline int first_of(uint32_t lanes) { return __builtin_ctz(lanes); }

// The vector at i of x[n]; `fill` past its end.
static inline Floats load_part(const float* x, int64_t i, int64_t n, float fill = -kInf) {
  if (i + kWidth <= n) return load(x + i);
  Floats v = broadcast(fill);
  std::memcpy(&v, x + i, (n - i) * sizeof(float));
  return v;
}

static inline Ints counting(int32_t from) {
  Ints v;
  for (int i = 0; i < kWidth; i++) v[i] = from + i;
  return v;
}

// ln x to a unit in the last place, for normal x > 0: Cephes' polynomial on [sqrt(1/2), sqrt(2)].
static inline Floats log(Floats x) {
  const Ints bits = (Ints)x;
  const Floats half = (Floats)((bits & 0x7fffff) | 0x3f000000);  // mantissa, in [1/2, 1)
  const Ints small = half < 0.707106781186547524f;
  const Floats exponent = __builtin_convertvector((bits >> 23) - 126 + small, Floats);  // `small` is -1 or 0
  const Floats m = (small ? half + half : half) - 1.0f;
  const Floats square = m * m;
  Floats p = broadcast(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * square - exponent * 2.12194440e-4f - square * 0.5f;
  return m + p + exponent * 0.693359375f;
}

// Integers in the order of floats, and back.
static inline int32_t ordered(float f) {
  int32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

static inline float from_ordered(int32_t i) {
  i = i < 0 ? i ^ 0x7fffffff : i;
  float f;
  std::memcpy(&f, &i, sizeof f);
  return f;
}

// The largest of x[n] and where it first is; NaN if one of x is.
static float first_largest(const float* x, int64_t n, int64_t* where) {
  Floats best = broadcast(-kInf);
  Ints ids = Ints{}, id = counting(0), nan = Ints{};
  for (int64_t i = 0; i < n; i += kWidth, id += kWidth) {
    const Floats v = load_part(x, i, n);
    const Ints larger = v > best;
    best = larger ? v : best;
    ids = larger ? id : ids;
    nan |= v != v;
  }
  const float top = largest(best);
  *where = n;
  for (int i = 0; i < kWidth; i++)
    if (best[i] == top && ids[i] < *where && ids[i] < n) *where = ids[i];
  if (!(top > -kInf) || *where == n) *where = 0;
  return lanes_of(nan) ? std::numeric_limits<float>::quiet_NaN() : top;
}

static float sum_exp(const float* x, int64_t n, float shift, float at_least) {
  Floats total = Floats{};
  for (int64_t i = 0; i < n; i += kWidth) {
    const Floats v = load_part(x, i, n) - shift;
    total += v >= at_least ? exp(v) : Floats{};
  }
  return sum(total);
}

static void normalize(const Rows& r, int64_t row) {
  const float* x = r.x + row * r.vocab;
  int64_t where;
  const float top = first_largest(x, r.vocab, &where);
  r.top[row] = top;
  const bool is_finite = top > -kInf && top < kInf;
  r.normalizer[row] = is_finite ? top + (float)__builtin_log((double)sum_exp(x, r.vocab, top, -kInf)) : top;
}

// The highest limit x for which the weights of values >= x sum up to `share`, if those of all do; else the lowest
// value. Weights are 1 if there are none. Bisection over the bits of a float; what can't matter any more is dropped.
template <bool kWeighted>
static float highest_limit(float* values, float* weights, int64_t n, float share) {
  Floats least = broadcast(kInf), most = broadcast(-kInf);
  for (int64_t i = 0; i < n; i += kWidth) {
    least = min(least, load_part(values, i, n, kInf));
    most = max(most, load_part(values, i, n));
  }
  int32_t low = ordered(-largest(-least)), high = ordered(largest(most));
  float above = 0;
  while (low < high && n > 1) {
    const int32_t middle = (int32_t)(((int64_t)low + high + 1) >> 1);
    const float limit = from_ordered(middle);
    Floats total = Floats{};
    for (int64_t i = 0; i < n; i += kWidth) {
      const Floats v = load_part(values, i, n);
      total += v >= limit ? (kWeighted ? load_part(weights, i, n, 0.0f) : broadcast(1.0f)) : Floats{};
    }
    const float part = sum(total);
    const bool enough = above + part >= share;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
      const float v = values[i];
      values[kept] = v;
      if (kWeighted) weights[kept] = weights[i];
      kept += (v >= limit) == enough;
    }
    n = kept;
    if (!enough) above += part;
    (enough ? low : high) = enough ? middle : middle - 1;
  }
  return n == 1 ? values[0] : from_ordered(low);
}

// At most the k-th largest of x[n], and hardly less: that of the largest ones of `groups`. `scratch` holds as many.
static float lower_bound(const float* x, int64_t n, int64_t k, float* scratch) {
  int64_t groups = 16 * kWidth;
  while (groups < 8 * k && groups < kMostGroups) groups *= 2;
  if (2 * groups > n || k > groups / 2) return -kInf;
  for (int64_t i = 0; i < groups; i++) scratch[i] = -kInf;
  for (int64_t begin = 0; begin < n; begin += groups)
    for (int64_t i = 0; i < groups && begin + i < n; i += kWidth)
      store(scratch + i, max(load_part(x, begin + i, n), load(scratch + i)));
  return highest_limit<false>(scratch, nullptr, groups, (float)k);
}

// Values >= limit of x[n], in their order, with where they are.
static int64_t collect(const float* x, int64_t n, float limit, float* values, int32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kWidth) {
    uint32_t lanes = lanes_of(load_part(x, i, n) >= limit);
    if (i + kWidth > n) lanes &= (1u << (n - i)) - 1;
    for (; lanes; lanes &= lanes - 1, count++) {
      ids[count] = (int32_t)(i + first_of(lanes));
      values[count] = x[ids[count]];
    }
  }
  return count;
}

// Random bits as jax.random makes them from a key: Threefry-2x32 (Salmon et al., SC 2011) of the position.
struct Noise {
  uint32_t key[3];
  int32_t half, size;  // half 0: partitionable

  Noise(const uint32_t* k, int64_t n, bool partitionable)
      : key{k[0], k[1], k[0] ^ k[1] ^ 0x1BD11BDAu},
        half(partitionable ? 0 : (int32_t)((n + 1) / 2)), size((int32_t)n) {}

  template <int kBits>
  static Words rotated(Words x) {
    return x << kBits | x >> (32 - kBits);
  }

  template <int kA, int kB, int kC, int kD>
  static void rounds(Words& x, Words& y) {
    x += y, y = rotated<kA>(y) ^ x;
    x += y, y = rotated<kB>(y) ^ x;
    x += y, y = rotated<kC>(y) ^ x;
    x += y, y = rotated<kD>(y) ^ x;
  }

  Words bits(Ints ids) const {
    const Ints is_first = half ? ids < half : Ints{};
    const Ints count = is_first ? ids : ids - half;
    Words x = half ? (Words)count : Words{};
    Words y = half ? (Words)(count + half < size ? count + half : Ints{}) : (Words)ids;
    x += key[0], y += key[1];
    rounds<13, 15, 26, 6>(x, y), x += key[1], y += key[2] + 1;
    rounds<17, 29, 16, 24>(x, y), x += key[2], y += key[0] + 2;
    rounds<13, 15, 26, 6>(x, y), x += key[0], y += key[1] + 3;
    rounds<17, 29, 16, 24>(x, y), x += key[1], y += key[2] + 4;
    rounds<13, 15, 26, 6>(x, y), x += key[2], y += key[0] + 5;
    return half ? (Words)(is_first ? (Ints)x : (Ints)y) : x ^ y;
  }

  Floats gumbel(Ints ids) const {
    const Floats uniform = (Floats)(bits(ids) >> 9 | 0x3f800000) - 1.0f;
    return -log(-log(max(uniform, broadcast(std::numeric_limits<float>::min()))));
  }
};

// The largest sum of a value and noise so far. What can't become it gets no noise.
struct Winner {
  float score = -kInf;
  int32_t id = 0;

  void offer(const Noise& noise, Floats values, Ints ids) {
    if (!lanes_of(values >= score - kMostNoise)) return;
    const Floats noisy = values + noise.gumbel(ids);
    for (uint32_t lanes = lanes_of(noisy >= score); lanes; lanes &= lanes - 1) {
      const int lane = first_of(lanes);
      if (noisy[lane] > score || (noisy[lane] == score && ids[lane] < id)) score = noisy[lane], id = ids[lane];
    }
  }
};

// What min-p, top-k and top-p, one after the other, keep of scaled[n], whose largest is 0; see reference.py. Puts it and
// its ids in front of `values` and `ids`; `spare` holds 2 n floats.
static int64_t filter(const Draw& d, int64_t row, const float* scaled, float* values, int32_t* ids, float* spare) {
  const int64_t n = d.vocab, k = d.top_k[row] > 0 && d.top_k[row] < n ? d.top_k[row] : n;
  const float p = d.top_p[row];
  float limit = d.at_least[row], total = 0;
  if (k < n) {
    const float bound = lower_bound(scaled, n, k, spare);
    limit = bound > limit ? bound : limit;
  } else if (p < 1) {
    total = sum_exp(scaled, n, 0.0f, limit);
    // All that is less likely than this has together no more than the share that top-p drops.
    const float bound = (float)__builtin_log((1.0 - p) * total / n) - 0.01f;
    limit = bound > limit ? bound : limit;
  }
  int64_t count = collect(scaled, n, limit, values, ids);
  const auto keep = [&](float limit) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      values[kept] = values[i], ids[kept] = ids[i];
      kept += values[kept] >= limit;
    }
    count = kept;
  };
  if (k < count) {
    std::memcpy(spare, values, count * sizeof(float));
    keep(highest_limit<false>(spare, nullptr, count, (float)k));
  }
  if (p < 1) {
    std::memcpy(spare, values, count * sizeof(float));
    float* weights = spare + n;
    for (int64_t i = 0; i < count; i += kWidth) {
      const Floats weight = exp(load_part(values, i, count));
      std::memcpy(weights + i, &weight, (count - i < kWidth ? count - i : kWidth) * sizeof(float));
    }
    if (k < n) total = sum_exp(values, count, 0.0f, -kInf);
    keep(highest_limit<true>(spare, weights, count, p * total));
  }
  return count;
}

// `scratch` holds `draw_floats`.
static void draw(const Draw& d, int64_t row, float* scratch) {
  const int64_t n = d.vocab;
  const float* x = d.logits + row * n;
  int64_t where;
  const float top = first_largest(x, n, &where), temperature = d.temperature[row];
  d.top[row] = top;
  d.tokens[row] = (int32_t)where;
  if (!(temperature > 0) || !(top > -kInf && top < kInf)) return;
  const Noise noise(d.keys + 2 * row, n, d.partitionable);
  Winner winner;
  if ((d.top_k[row] <= 0 || d.top_k[row] >= n) && !(d.top_p[row] < 1) && d.at_least[row] == -kInf) {
    const int64_t first = where / kWidth * kWidth;  // begin with a likely winner
    winner.offer(noise, (load_part(x, first, n) - top) / temperature, counting((int32_t)first));
    Ints ids = counting(0);
    for (int64_t i = 0; i < n; i += kWidth, ids += kWidth)
      winner.offer(noise, (load_part(x, i, n) - top) / temperature, ids);
  } else {
    float *scaled = scratch, *values = scaled + n, *spare = values + n;
    int32_t* ids = reinterpret_cast<int32_t*>(spare + 2 * n);
    for (int64_t i = 0; i < n; i += kWidth) {
      const Floats part = (load_part(x, i, n) - top) / temperature;
      std::memcpy(scaled + i, &part, (n - i < kWidth ? n - i : kWidth) * sizeof(float));
    }
    const int64_t count = filter(d, row, scaled, values, ids, spare);
    for (int64_t i = 0; i < count; i += kWidth) {
      Ints part = Ints{};
      std::memcpy(&part, ids + i, (count - i < kWidth ? count - i : kWidth) * sizeof(int32_t));
      winner.offer(noise, load_part(values, i, count), part);
    }
  }
  d.tokens[row] = winner.id;
}

static int64_t draw_floats(int64_t vocab) { return 5 * vocab + kMostGroups; }

// Ascending (Shell's sort): a few at a time, as a rule.
template <class T>
static void sort(T* x, int64_t n) {
  int64_t gap = 1;
  while (gap < n / 3) gap = 3 * gap + 1;
  for (; gap > 0; gap /= 3)
    for (int64_t i = gap; i < n; i++) {
      const T moved = x[i];
      int64_t j = i;
      for (; j >= gap && moved < x[j - gap]; j -= gap) x[j] = x[j - gap];
      x[j] = moved;
    }
}

static int32_t count_larger(const float* x, int64_t n, float than) {
  Ints count = Ints{};
  for (int64_t i = 0; i < n; i += kWidth) count -= load_part(x, i, n) > than;
  int32_t total = 0;
  for (int i = 0; i < kWidth; i++) total += count[i];
  return total;
}

// 1 + the number of larger ones of x[n], for each of own[k] that isn't NaN. `scratch` holds 2 k + 1 floats.
static void rank(const float* x, int64_t n, const float* own, int64_t k, int32_t* ranks, float* scratch) {
  int64_t used = 0;
  for (int64_t i = 0; i < k; i++) {
    ranks[i] = 0;
    if (own[i] == own[i]) scratch[used++] = own[i];
  }
  if (!used) return;
  const float* ascending = scratch;
  int32_t* larger = reinterpret_cast<int32_t*>(scratch + k);  // of x, than the first so many of `ascending`
  sort(scratch, used);
  for (int64_t i = 0; i <= used; i++) larger[i] = 0;
  const auto smaller = [&](float v) {
    int64_t low = 0, high = used;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (ascending[middle] < v ? low : high) = ascending[middle] < v ? middle + 1 : middle;
    }
    return low;
  };
  for (int64_t i = 0; i < n; i += kWidth)
    for (uint32_t lanes = lanes_of(load_part(x, i, n) > ascending[0]); lanes; lanes &= lanes - 1)
      larger[smaller(x[i + first_of(lanes)])]++;
  for (int64_t i = used; i > 0; i--) larger[i - 1] += larger[i];
  for (int64_t i = 0; i < k; i++)
    if (own[i] == own[i]) ranks[i] = 1 + larger[smaller(own[i]) + 1];
}

// `scratch` holds `best_floats`.
static void best(const Best& b, int64_t row, float* scratch) {
  const int64_t n = b.vocab, k = b.k, columns = k + b.num_tokens;
  const float *scores = b.scores + row * n, *logits = b.logits + row * n;
  float* own = b.own + row * columns;
  int32_t* ranks = b.ranks + row * columns;
  float* values = scratch;
  int32_t* ids = reinterpret_cast<int32_t*>(values + n);
  uint64_t* keys = reinterpret_cast<uint64_t*>(scratch + 2 * n);
  const int64_t count = collect(scores, n, lower_bound(scores, n, k, scratch), values, ids);
  for (int64_t i = 0; i < count; i++)  // best first, the smaller id first among equals
    keys[i] = (uint64_t)((uint32_t)ordered(values[i]) ^ 0x7fffffffu) << 32 | (uint32_t)ids[i];
  sort(keys, count);
  for (int64_t i = 0; i < k; i++) {
    const int32_t id = i < count ? (int32_t)(uint32_t)keys[i] : 0;
    const float score = i < count ? scores[id] : -kInf;
    b.ids[row * k + i] = id;
    b.best[row * k + i] = score;
    own[i] = logits[id];
    scratch[i] = score > -kInf ? own[i] : std::numeric_limits<float>::quiet_NaN();
  }
  rank(logits, n, scratch, k, ranks, scratch + k);
  for (int64_t i = 0; i < b.num_tokens; i++) {
    const int32_t token = b.tokens[row * b.num_tokens + i];
    own[k + i] = logits[token < 0 ? 0 : token >= n ? n - 1 : token];
    ranks[k + i] = 1 + count_larger(logits, n, own[k + i]);
  }
}

static int64_t best_floats(int64_t vocab, int64_t k) { return 4 * vocab + 3 * k + kMostGroups + 1; }

}  // namespace jaxllm::JAXLLM_ISA
