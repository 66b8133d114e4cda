// Products with a weight of few bits that lies in the order it is read, in panels of 16 columns: of each, group after
// group of inputs, 16 scales, 16 offsets if there are some, and the codes, each four inputs of a column together. Rows are
// rounded to int8 by groups, and four products at a time are summed as integers.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

typedef uint8_t Quads __attribute__((vector_size(kWidth * 4)));  // four unsigned codes for each lane

constexpr int kPanelVectors = kPanel / kWidth;
constexpr int kPanelRows = kRegisters == 32 ? 6 : 2;  // of x that share codes once they are read
constexpr int64_t kPanelBytesAhead = 1280;            // that are brought in before they are read

static inline Quads load_quads(const uint8_t* p) {
  Quads v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Adds to each lane its four codes times the four numbers of `x`, a signed byte each.
static inline Ints add_quads(Ints sum, Quads w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
  const __m512i four = _mm512_set1_epi32(x), low = _mm512_set1_epi16(255);
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), odd = _mm512_srai_epi16(four, 8);
  return sum + (Ints)_mm512_madd_epi16(_mm512_and_si512((__m512i)w, low), even) +
         (Ints)_mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), odd);
#elif defined(__AVX2__)
  const __m256i four = _mm256_set1_epi32(x), low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
  return sum + (Ints)_mm256_madd_epi16(_mm256_and_si256((__m256i)w, low), even) +
         (Ints)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)w, 8), odd);
#else
  for (int i = 0; i < kWidth; i++)
    for (int j = 0; j < 4; j++) sum[i] += (int32_t)w[4 * i + j] * (int8_t)(x >> 8 * j);
  return sum;
#endif
}

// The codes of the i-th four inputs of a group for vector `v` of a panel; of 4 bits, the i-th four are the low ones of a
// run of bytes and the next four its high ones.
template <int kBits>
static inline Quads panel_codes(const uint8_t* codes, int64_t i, int v) {
  if constexpr (kBits == 8) return load_quads(codes + (i * kPanelVectors + v) * 4 * kWidth);
  const Quads both = load_quads(codes + (i / 2 * kPanelVectors + v) * 4 * kWidth);
  return i % 2 ? both >> 4 : both & 15;
}

static inline Floats panel_numbers(const uint8_t* p, bool is_half, int v) {
  if (is_half) return load_half(reinterpret_cast<const uint16_t*>(p) + v * kWidth);
  return load(reinterpret_cast<const float*>(p) + v * kWidth);
}

// kRows rows of a panel; `y` gets [rows, kPanel].
template <int kBits, int kRows>
static void panel_rows(const PanelGemm& g, const uint8_t* record, int64_t row, float* y) {
  const int64_t groups = g.groups(), numbers = g.number_bytes(), bytes = g.record_bytes();
  const int8_t* const x = g.rows.x + row * g.k;
  Floats total[kRows][kPanelVectors] = {};
  for (int64_t group = 0; group < groups; group++, record += bytes) {
    const uint8_t* const codes = record + (g.has_offsets ? 2 : 1) * numbers;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(record + kPanelBytesAhead + line);
    Ints acc[kRows][kPanelVectors];
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kPanelVectors; v++) acc[r][v] = Ints{} - g.zero * g.rows.sums[(row + r) * groups + group];
#pragma GCC unroll 8
    for (int64_t i = 0; i < g.group / 4; i++)
      for (int v = 0; v < kPanelVectors; v++) {
        const Quads w = panel_codes<kBits>(codes, i, v);
        for (int r = 0; r < kRows; r++) {
          int32_t four;
          std::memcpy(&four, x + r * g.k + group * g.group + 4 * i, sizeof four);
          acc[r][v] = add_quads(acc[r][v], w, four);
        }
      }
    for (int v = 0; v < kPanelVectors; v++) {
      const Floats scale = panel_numbers(record, g.is_half, v);
      const Floats offset = g.has_offsets ? panel_numbers(record + numbers, g.is_half, v) : Floats{};
      for (int r = 0; r < kRows; r++) {
        const int64_t at = (row + r) * groups + group;
        const float own = g.rows.scales[at];
        total[r][v] += __builtin_convertvector(acc[r][v], Floats) * own * scale;
        if (g.has_offsets) total[r][v] += offset * (own * (float)g.rows.sums[at]);
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kPanelVectors; v++) store(y + r * kPanel + v * kWidth, total[r][v]);
}

template <int kBits, int kRows = kPanelRows>
static void panel_rows_of(int64_t rows, const PanelGemm& g, const uint8_t* record, int64_t row, float* y) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return panel_rows_of<kBits, kRows - 1>(rows, g, record, row, y);
  }
  panel_rows<kBits, kRows>(g, record, row, y);
}

// Panels `begin` to `end` for all rows.
static void panel_gemm(const PanelGemm& g, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel++) {
    const uint8_t* const record = g.panels + panel * g.groups() * g.record_bytes();
    const int64_t first = panel * kPanel, columns = std::min(kPanel, g.n - first);
    for (int64_t row = 0; row < g.num_rows; row += kPanelRows) {
      const int64_t rows = std::min<int64_t>(kPanelRows, g.num_rows - row);
      alignas(64) float sums[kPanelRows * kPanel];
      (g.bits == 4 ? panel_rows_of<4> : panel_rows_of<8>)(rows, g, record, row, sums);
      for (int64_t r = 0; r < rows; r++) std::copy_n(sums + r * kPanel, columns, g.y + (row + r) * g.n + first);
    }
  }
}

static void round_to_int8(const float* x, int64_t count, int8_t* to, float* scale, int32_t* sum) {
  Floats most{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats v = load(x + i);
    most = max(most, max(v, -v));
  }
  float top = largest(most);
  for (; i < count; i++) top = std::max(top, std::abs(x[i]));
  *scale = top / 127.0f;
  const float inverse = top > 0 ? 127.0f / top : 0.0f;
  int32_t total = 0;
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  for (i = 0; i < count; i++) {
    const float shifted = x[i] * inverse + shifter;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int8_t code = (int8_t)bits;
    total += to[i] = code;
  }
  *sum = total;
}

}  // namespace jaxllm::JAXLLM_ISA
