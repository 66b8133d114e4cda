// Vectors of as many floats as a register of the instruction set holds. GCC's and Clang's vector extensions.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace jaxllm::JAXLLM_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kRegisters = 32;
#else
constexpr int kWidth = 4;
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef int8_t Bytes __attribute__((vector_size(kWidth)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(kWidth)));

static inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline Words load_words(const uint16_t* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)  // of which GCC 12 makes one instruction here, and five of the conversion below
  return (Words)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, Words);
#endif
}

static inline Floats load(const Bf16* p) { return (Floats)(load_words(&p->bits) << 16); }

// Two vectors from `p` on. Of bfloat16, which takes half the work so: what lies at even places, and at odd ones.
static inline void load_pair(const float* p, Floats* to) { to[0] = load(p), to[1] = load(p + kWidth); }

static inline void load_pair(const Bf16* p, Floats* to) {
  Words w;
  std::memcpy(&w, p, sizeof w);
  to[0] = (Floats)(w << 16), to[1] = (Floats)(w & 0xffff0000u);
}

static inline float value(const float* p) { return *p; }

static inline float value(const Bf16* p) {
  const uint32_t word = (uint32_t)p->bits << 16;
  float f;
  std::memcpy(&f, &word, sizeof f);
  return f;
}

// sum + x * w, rounded once where the instruction set can: said and not left to the compiler, which contracts one loop
// and not another, so that a row's bits would depend on how many rows come with it.
static inline Floats multiply_add(Floats sum, Floats x, Floats w) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)w);
#else
  return sum + x * w;
#endif
}

// Each lane holds two numbers of bfloat16, of which instruction sets with `JAXLLM_PAIRS` add the products to `sum`.
#if defined(__AVX512BF16__)
#define JAXLLM_PAIRS
static inline Floats add_pairs(Floats sum, Floats x, Floats w) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)x, (__m512bh)(__m512)w);
}

// Both numbers of each lane, rounded to bfloat16.
static inline Floats pair_of(Floats first, Floats second) {
  const __m256i halves[2] = {(__m256i)_mm512_cvtneps_pbh((__m512)first), (__m256i)_mm512_cvtneps_pbh((__m512)second)};
  return (Floats)((Words)_mm512_cvtepu16_epi32(halves[0]) | (Words)_mm512_cvtepu16_epi32(halves[1]) << 16);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define JAXLLM_PAIRS
static inline Floats add_pairs(Floats sum, Floats x, Floats w) {
  return (Floats)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)x), vreinterpretq_bf16_f32((float32x4_t)w));
}

static inline Floats pair_of(Floats first, Floats second) {
  const bfloat16x8_t halves = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
  const uint16x8_t bits = vreinterpretq_u16_bf16(halves);
  return (Floats)vreinterpretq_f32_u16(vzip1q_u16(bits, vextq_u16(bits, bits, 4)));
}
#endif

static inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// The first of each, the second of each, ...: what `load_pair` parts.
static inline void store_by_turns(float* p, Floats even, Floats odd) {
  float pair[2][kWidth];
  store(pair[0], even), store(pair[1], odd);
  for (int i = 0; i < kWidth; i++) p[2 * i] = pair[0][i], p[2 * i + 1] = pair[1][i];
}

static inline void put(float* p, float f) { *p = f; }

// Rounds to the nearest, to even if there are two.
static inline void put(Bf16* p, float f) {
  uint32_t word;
  std::memcpy(&word, &f, sizeof word);
  p->bits = f != f ? 0x7fc0 : (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static void round(const float* from, Bf16* to, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats value = load(from + i);
    const Words word = (Words)value, rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector(value != value ? Words{} + 0x7fc0 : rounded, Halves);
    std::memcpy(to + i, &halves, sizeof halves);
  }
  for (; i < count; i++) put(to + i, from[i]);
}

static inline Words load_words(const uint8_t* p) {
  UnsignedBytes v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Words);
}

// Floats of kBits bits, in the low ones of each word. No step has a subnormal operand: they may count as 0.
template <int kBits, int kMantissa>
static inline Floats small_floats(Words bits) {
  constexpr uint32_t kBias = (1u << (kBits - kMantissa - 2)) - 1;
  const Words magnitude = bits & ((1u << (kBits - 1)) - 1), shifted = magnitude << (23 - kMantissa);
  const Words base = (Words{} + ((128 - kBias) << 23));
  const Floats small = (Floats)(shifted + base) - (Floats)base;
  const Floats normal = (Floats)(shifted + ((127 - kBias) << 23));
  Floats value = magnitude < (1u << kMantissa) ? small : normal;
  if (kBits == 16)
    value = magnitude >= 0x7c00 ? (Floats)(shifted | 0x7f800000u) : value;
  else
    value = magnitude == 0x7f ? (Floats)(Words{} + 0x7fc00000u) : value;
  return (Floats)((Words)value | bits >> (kBits - 1) << 31);
}

static inline Floats load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return small_floats<16, 10>(load_words(p));
#endif
}

static inline Floats load(const Half* p) { return load_half(&p->bits); }

static inline Floats load_float8(const uint8_t* p) {
#if defined(__AVX512F__)  // by way of float16, which has the same numbers, 2^8 times smaller
  const __m128i codes = _mm_loadu_si128((const __m128i*)p);
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  const __m512 value = _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
  const __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8((char)0x80)), _mm_set1_epi8(-1));
  return (Floats)_mm512_mask_mul_ps(_mm512_set1_ps(__builtin_nanf("")), (__mmask16)~is_nan, value,
                                    _mm512_set1_ps(256.0f));
#else
  return small_floats<8, 3>(load_words(p));
#endif
}

// 2^(code - 127), NaN for 255.
static inline Floats load_powers(const uint8_t* p) {
  const Words code = load_words(p), power = code == 0 ? Words{} + 0x400000u : code << 23;
  return (Floats)(code == 255 ? Words{} + 0x7fc00000u : power);
}

// `kWidth` numbers of `from`, from the i-th on.
static inline Floats load_numbers(const void* from, Scale kind, int64_t i) {
  switch (kind) {
    case Scale::kF32: return load(static_cast<const float*>(from) + i);
    case Scale::kBf16: return load(static_cast<const Bf16*>(from) + i);
    case Scale::kF16: return load_half(static_cast<const uint16_t*>(from) + i);
    case Scale::kF8: return load_float8(static_cast<const uint8_t*>(from) + i);
    case Scale::kPower: return load_powers(static_cast<const uint8_t*>(from) + i);
  }
  __builtin_unreachable();
}

static inline Floats broadcast(float f) { return f - Floats{}; }  // of a sum, unlike this, GCC keeps the + 0

static inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define JAXLLM_SHUFFLES
#endif
#endif

#if defined(JAXLLM_SHUFFLES)
// Exchanges the lanes of a whose number has the bit kBit with those of b that lack it.
template <int kBit, int... kLanes>
static inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, kLanes...>) {
  const Floats first = a;
  a = __builtin_shufflevector(first, b, (kLanes & kBit ? kWidth + kLanes - kBit : kLanes)...);
  b = __builtin_shufflevector(first, b, (kLanes & kBit ? kWidth + kLanes : kLanes + kBit)...);
}

template <int kBit = 1>
static inline void transpose(Floats* square) {
  if constexpr (kBit < kWidth) {
    for (int i = 0; i < kWidth; i++)
      if (!(i & kBit)) exchange<kBit>(square[i], square[i + kBit], std::make_integer_sequence<int, kWidth>{});
    transpose<2 * kBit>(square);
  }
}
#else
static inline void transpose(Floats* square) {
  for (int i = 0; i < kWidth; i++)
    for (int j = 0; j < i; j++) {
      const float number = square[i][j];
      square[i][j] = square[j][i], square[j][i] = number;
    }
}
#endif

template <int kLanes>
struct Part {
  typedef float Lanes __attribute__((vector_size(kLanes * 4)));
};

// All lanes of v by halves: `fold(lanes, lanes)` joins two.
template <int kLanes, class Fold>
static inline float fold_lanes(typename Part<kLanes>::Lanes v, const Fold& fold) {
  if constexpr (kLanes == 2) {
    return fold(v[0], v[1]);
  } else {
    typename Part<kLanes / 2>::Lanes half[2];
    std::memcpy(half, &v, sizeof v);
    return fold_lanes<kLanes / 2>(fold(half[0], half[1]), fold);
  }
}

static inline float sum(Floats v) {
  return fold_lanes<kWidth>(v, [](auto a, auto b) { return a + b; });
}

static inline float largest(Floats v) {
  return fold_lanes<kWidth>(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x to 2 units in the last place; 0 from some -87 down, and x is at most 88. Cephes' range reduction, a Taylor polynomial
// of degree 7 on [-ln 2 / 2, ln 2 / 2].
static inline Floats exp(Floats x) {
#if defined(__AVX512F__)
  x = (Floats)_mm512_max_ps((__m512)broadcast(-120.0f), (__m512)x);  // the second one if one is NaN
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0x08);
#else
  const Ints underflow = x < -87.0f;
  x = underflow ? broadcast(-87.0f) : min(x, broadcast(88.0f));
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (x * 1.44269504088896341f + shifter) - shifter;
#endif
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats y = p * (Floats)exponent;
  return underflow ? Floats{} : y;
#endif
}

static inline Floats tanh(Floats x) {
  const Floats limited = max(min(x, broadcast(20.0f)), broadcast(-20.0f));
  const Floats e = exp(limited * 2.0f);
  const Floats y = (e - 1.0f) / (e + 1.0f);
  return x * x < 1e-4f ? x - x * x * x * (1.0f / 3) : y;  // where e - 1 would cancel
}

}  // namespace jaxllm::JAXLLM_ISA
