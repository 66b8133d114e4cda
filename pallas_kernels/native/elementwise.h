// What layers do to each number between their products.
#pragma once

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

static inline void save(float* p, Floats v) { store(p, v); }

static inline void save(Bf16* p, Floats v) {
  const Words word = (Words)v, rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  const Halves halves = __builtin_convertvector(v != v ? Words{} + 0x7fc0 : rounded, Halves);
  std::memcpy(p, &halves, sizeof halves);
}

// Calls act(v, ...) with vectors of the numbers at each of `from`, and puts what it returns at `to`.
template <class T, class Act, class... From>
static inline void each_vector(int64_t count, T* to, const Act& act, const From*... from) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) save(to + i, act(load(from + i)...));
  if (i == count) return;
  const auto padded = [&](const auto* p) {
    float some[kWidth] = {};
    for (int64_t j = i; j < count; j++) some[j - i] = value(p + j);
    return load(some);
  };
  float some[kWidth];
  store(some, act(padded(from)...));
  for (int64_t j = i; j < count; j++) put(to + j, some[j - i]);
}

template <class T>
static void rotate_heads(const Rotation& r, int64_t token, const T* x, T* y, int64_t heads) {
  const float *const sin = r.sin + token * r.pairs, *const cos = r.cos + token * r.pairs;
  for (const T* const end = x + heads * r.head_dim; x < end; x += r.head_dim, y += r.head_dim) {
    if (r.interleaved) {
      for (int64_t i = 0; i < r.pairs; i++) {
        const float first = value(x + 2 * i), second = value(x + 2 * i + 1);
        put(y + 2 * i, first * cos[i] - second * sin[i]);
        put(y + 2 * i + 1, second * cos[i] + first * sin[i]);
      }
    } else {
      const T* const half = x + r.pairs;
      each_vector(r.pairs, y, [](Floats a, Floats b, Floats s, Floats c) { return a * c - b * s; }, x, half, sin, cos);
      each_vector(r.pairs, y + r.pairs, [](Floats a, Floats b, Floats s, Floats c) { return b * c + a * s; }, x, half,
                  sin, cos);
    }
    std::memcpy(y + 2 * r.pairs, x + 2 * r.pairs, (r.head_dim - 2 * r.pairs) * sizeof(T));
  }
}

static void rotate(const Rotation& r, int64_t token, const void* x, void* y, int64_t heads) {
  if (r.dtype == DType::kF32)
    rotate_heads(r, token, static_cast<const float*>(x), static_cast<float*>(y), heads);
  else
    rotate_heads(r, token, static_cast<const Bf16*>(x), static_cast<Bf16*>(y), heads);
}

static inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// x / 2 * (1 + tanh(u)), without the difference of numbers that are nearly equal.
static inline Floats gelu_tanh(Floats x) {
  const Floats twice_u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp(-twice_u));
}

template <class From, class T>
static void gate_row(const Gated& g, const void* gate, const void* up, void* y) {
  const From *const first = static_cast<const From*>(gate), *const second = static_cast<const From*>(up);
  if (g.is_gelu)
    each_vector(g.width, static_cast<T*>(y), [](Floats a, Floats b) { return gelu_tanh(a) * b; }, first, second);
  else
    each_vector(g.width, static_cast<T*>(y), [](Floats a, Floats b) { return silu(a) * b; }, first, second);
}

static void gate(const Gated& g, const void* gate, const void* up, void* y) {
  const bool is_f32 = g.dtype == DType::kF32;
  if (g.from == DType::kF32)
    (is_f32 ? gate_row<float, float> : gate_row<float, Bf16>)(g, gate, up, y);
  else
    gate_row<Bf16, Bf16>(g, gate, up, y);
}

// As it is once it has been stored as T.
template <class T>
static inline Floats rounded(Floats v) {
  if constexpr (std::is_same_v<T, float>) return v;
  Bf16 some[kWidth];
  save(some, v);
  return load(some);
}

template <class T>
static void add_row(const Sum& s, int64_t row) {
  const int64_t first = row * s.width;
  each_vector(s.width, static_cast<T*>(s.y) + first, [](Floats a, Floats b) { return a + b; },
              static_cast<const T*>(s.x) + first, static_cast<const T*>(s.added) + first);
}

static void add(const Sum& s, int64_t row) {
  (s.dtype == DType::kF32 ? add_row<float> : add_row<Bf16>)(s, row);
}

template <class T, class S>
static void rms_norm_row(const RmsNorm& r, int64_t row) {
  const int64_t first = row * r.width;
  const T* x = static_cast<const T*>(r.x) + first;
  if (r.added) {
    add_row<T>({r.x, r.added, r.sum, r.width, r.dtype}, row);
    x = static_cast<const T*>(r.sum) + first;
  }
  constexpr int kSums = 4;  // side by side, as one has to wait for each addition
  Floats squares[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= r.width; i += kSums * kWidth)
    for (int j = 0; j < kSums; j++) {
      const Floats v = load(x + i + j * kWidth);
      squares[j] += v * v;
    }
  for (; i + kWidth <= r.width; i += kWidth) {
    const Floats v = load(x + i);
    squares[0] += v * v;
  }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < r.width; i++) total += value(x + i) * value(x + i);
  const float factor = 1.0f / std::sqrt(total / (float)r.width + r.eps), offset = r.unit_offset ? 1.0f : 0.0f;
  T* const y = static_cast<T*>(r.y) + first;
  const S* const scale = static_cast<const S*>(r.scale);
  if (r.scales_first)
    each_vector(r.width, y, [=](Floats v, Floats s) { return v * factor * (s + offset); }, x, scale);
  else
    each_vector(r.width, y, [=](Floats v, Floats s) { return rounded<T>(v * factor) * rounded<T>(s); }, x, scale);
}

static void rms_norm(const RmsNorm& r, int64_t row) {
  const bool is_f32 = r.scale_dtype == DType::kF32;
  if (r.dtype == DType::kF32)
    (is_f32 ? rms_norm_row<float, float> : rms_norm_row<float, Bf16>)(r, row);
  else
    (is_f32 ? rms_norm_row<Bf16, float> : rms_norm_row<Bf16, Bf16>)(r, row);
}

}  // namespace jaxllm::JAXLLM_ISA
