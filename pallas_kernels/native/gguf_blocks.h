// The blocks of quantised values that GGUF files hold most, as float32: operation by operation those of
// checkpoint/gguf/blocks.py, so that results are equal bit by bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxllm {

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  uint32_t out = 0x7f800000u | magnitude << 13;  // infinite, or NaN
  if (magnitude < 0x7c00u) {
    const uint32_t shifted = magnitude << 13;  // the exponent's bias is 112 less
    float scaled;
    std::memcpy(&scaled, &shifted, 4);
    scaled *= 0x1p112f;
    std::memcpy(&out, &scaled, 4);
  }
  out |= sign;
  float value;
  std::memcpy(&value, &out, 4);
  return value;
}

inline float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half_to_float(bits);
}

// Sixteen bytes of 4-bit fields, all low ones first.
inline uint32_t nibble(const uint8_t* bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; }

inline uint32_t fifth_bit(const uint8_t* bytes, int i) { return (bytes[i / 8] >> i % 8 & 1) << 4; }

inline void q4_0(const uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (int i = 0; i < 32; i++) out[i] = scale * (static_cast<float>(nibble(block + 2, i)) - 8.0f);
}

inline void q4_1(const uint8_t* block, float* out) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (int i = 0; i < 32; i++) out[i] = scale * static_cast<float>(nibble(block + 4, i)) + least;
}

inline void q5_0(const uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (int i = 0; i < 32; i++)
    out[i] = scale * (static_cast<float>(nibble(block + 6, i) | fifth_bit(block + 2, i)) - 16.0f);
}

inline void q5_1(const uint8_t* block, float* out) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (int i = 0; i < 32; i++)
    out[i] = scale * static_cast<float>(nibble(block + 8, i) | fifth_bit(block + 4, i)) + least;
}

inline void q8_0(const uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (int i = 0; i < 32; i++) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

// Of Q4_K and Q5_K: six bits of a scale and of a minimum for each run of 32 values, in twelve bytes after two float16.
inline void scales_and_minima(const uint8_t* block, float* scales, float* minima) {
  const float scale = half_at(block), least = half_at(block + 2);
  const uint8_t *low = block + 4, *mid = block + 8, *high = block + 12;
  for (int i = 0; i < 4; i++) {
    scales[i] = scale * static_cast<float>(low[i] & 63);
    minima[i] = least * static_cast<float>(mid[i] & 63);
    scales[i + 4] = scale * static_cast<float>((high[i] & 15) | (low[i] >> 2 & 48));
    minima[i + 4] = least * static_cast<float>(high[i] >> 4 | (mid[i] >> 2 & 48));
  }
}

inline void q4_k(const uint8_t* block, float* out) {
  float scales[8], minima[8];
  scales_and_minima(block, scales, minima);
  for (int run = 0; run < 8; run++)
    for (int i = 0; i < 32; i++) {
      const uint8_t byte = block[16 + run / 2 * 32 + i];
      out[run * 32 + i] = scales[run] * static_cast<float>(run % 2 ? byte >> 4 : byte & 15) - minima[run];
    }
}

inline void q5_k(const uint8_t* block, float* out) {
  float scales[8], minima[8];
  scales_and_minima(block, scales, minima);
  for (int run = 0; run < 8; run++)
    for (int i = 0; i < 32; i++) {
      const uint8_t byte = block[48 + run / 2 * 32 + i];
      const uint32_t quant = (run % 2 ? byte >> 4 : byte & 15) | (block[16 + i] >> run & 1) << 4;
      out[run * 32 + i] = scales[run] * static_cast<float>(quant) - minima[run];
    }
}

inline void q6_k(const uint8_t* block, float* out) {
  const float scale = half_at(block + 208);
  for (int half = 0; half < 2; half++)  // of the block: 64 bytes of low fields, 32 of high ones
    for (int i = 0; i < 128; i++) {
      const uint8_t low = block[half * 64 + i % 64], high = block[128 + half * 32 + i % 32];
      const uint32_t quant = (i < 64 ? low & 15 : low >> 4) | (high >> i / 32 * 2 & 3) << 4;
      const int at = half * 128 + i;
      const float run = scale * static_cast<float>(static_cast<int8_t>(block[192 + at / 16]));
      out[at] = run * (static_cast<float>(quant) - 32.0f);
    }
}

struct BlockType {
  int64_t values, bytes;
  void (*dequantize)(const uint8_t* block, float* out);
};

// In the order of checkpoint/native_read.py.
constexpr BlockType kBlockTypes[] = {
    {32, 18, q4_0}, {32, 20, q4_1}, {32, 22, q5_0}, {32, 24, q5_1},
    {32, 34, q8_0}, {256, 144, q4_k}, {256, 176, q5_k}, {256, 210, q6_k},
};

}  // namespace jaxllm
