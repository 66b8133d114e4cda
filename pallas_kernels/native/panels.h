// Products with a weight of few bits that lies in the order it is read, in panels of 16 columns: of each, group after
// group of inputs, 16 scales, 16 offsets if there are some, and the codes, each four inputs of a column together. Rows are
// rounded to int8 by parts of groups, and four products at a time are summed as integers.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace jaxllm::JAXLLM_ISA {

typedef uint8_t Quads __attribute__((vector_size(kWidth * 4)));  // four unsigned codes for each lane

constexpr int kPanelVectors = kPanel / kWidth;
constexpr bool kIsWide = kPanelVectors == 1;
constexpr int kPanelRows = kRegisters < 32 ? 2 : kIsWide ? 6 : 4;  // of x that share codes once they are read,
constexpr int kPanels = kIsWide ? 2 : 1;                           // and panels that share rows
constexpr int64_t kPanelBytesAhead = 5120;  // from what is read to what is brought into the second cache
constexpr int64_t kRowBytes = 256 << 10;    // of x that stay in the second cache for all panels

static inline Quads load_quads(const uint8_t* p) {
  Quads v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kTakesSigned = true;  // codes of 8 bits are multiplied less 128, as no instruction takes unsigned ones
#else
constexpr bool kTakesSigned = false;
#endif

// Adds to each lane its four codes, of kBits, times the four numbers of `x`, a signed byte each.
template <int kBits>
static inline Ints add_quads(Ints sum, Quads w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
  const __m512i four = _mm512_set1_epi32(x), low = _mm512_set1_epi16(255);
  if constexpr (kBits == 4)  // two products of such codes have no more than 16 bits
    return sum + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, four), _mm512_set1_epi16(1));
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), odd = _mm512_srai_epi16(four, 8);
  return sum + (Ints)_mm512_madd_epi16(_mm512_and_si512((__m512i)w, low), even) +
         (Ints)_mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), odd);
#elif defined(__AVX2__)
  const __m256i four = _mm256_set1_epi32(x), low = _mm256_set1_epi16(255);
  if constexpr (kBits == 4)
    return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, four), _mm256_set1_epi16(1));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
  return sum + (Ints)_mm256_madd_epi16(_mm256_and_si256((__m256i)w, low), even) +
         (Ints)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)w, 8), odd);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t codes = (int8x16_t)(kBits == 8 ? w ^ 128 : w);
  return (Ints)vdotq_s32((int32x4_t)sum, codes, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  for (int i = 0; i < kWidth; i++)
    for (int j = 0; j < 4; j++) sum[i] += (int32_t)w[4 * i + j] * (int8_t)(x >> 8 * j);
  return sum;
#endif
}

// Float4 codes as PanelGemm says: twice what they stand for, and 12.
static inline Quads float4_codes(Quads codes) {
  alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kTable));
  return (Quads)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kTable));
  return (Quads)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
  return (Quads)vqtbl1q_u8(vld1q_u8(kTable), (uint8x16_t)codes);
#else
  for (int i = 0; i < 4 * kWidth; i++) codes[i] = kTable[codes[i]];
  return codes;
#endif
}

// The codes of the i-th four inputs of a group for vector `v` of a panel; of 4 bits, the i-th four are the low ones of a
// run of bytes and the next four its high ones.
template <Code kCode>
static inline Quads panel_codes(const uint8_t* codes, int64_t i, int v) {
  if constexpr (kCode == Code::kInt8) return load_quads(codes + (i * kPanelVectors + v) * 4 * kWidth);
  const Quads both = load_quads(codes + (i / 2 * kPanelVectors + v) * 4 * kWidth);
  const Quads four = i % 2 ? both >> 4 : both & 15;
  return kCode == Code::kF4 ? float4_codes(four) : four;
}

// Of a group: how many inputs a part has (0: as g says), and whether there is one.
template <int64_t kInputs, bool kAlone>
struct PartsOf {
  static constexpr int64_t kPart = kInputs;
  static constexpr bool kIsOne = kAlone;
};
using OfAny = PartsOf<0, false>;
using Of32 = PartsOf<32, false>;
using One32 = PartsOf<32, true>;
using One16 = PartsOf<16, true>;

// Adds to `acc` a part of `inputs`; codes of a panel are `panel` bytes after those of the one before.
template <Code kCode, int kRows, int kVectors>
static inline void add_part(const int8_t* x, int64_t ldx, const uint8_t* codes, int64_t panel, int64_t inputs,
                            Ints (&acc)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < inputs / 4; i++) {
    Quads w[kVectors];
    for (int v = 0; v < kVectors; v++)
      w[v] = panel_codes<kCode>(codes + v / kPanelVectors * panel, i, v % kPanelVectors);
    for (int r = 0; r < kRows; r++) {
      int32_t four;
      std::memcpy(&four, x + r * ldx + 4 * i, sizeof four);
      for (int v = 0; v < kVectors; v++) acc[r][v] = add_quads<kCode == Code::kInt8 ? 8 : 4>(acc[r][v], w[v], four);
    }
  }
}

// Brings in what `kCount` panels, each `panel` bytes long, have at `at` of the first one and at the same place of the others.
template <int kCount>
static inline void bring_in(const uint8_t* at, int64_t panel, int64_t bytes) {
  for (int i = 0; i < kCount; i++)
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + i * panel + line, 0, 2);
}

// kRows rows of neighbouring panels; `y` gets [rows, kVectors * kWidth].
template <Code kCode, class Parts, int kVectors, int kRows>
static void panel_rows(const PanelGemm& g, const uint8_t* record, int64_t row, float* y) {
  const int64_t numbers = g.number_bytes(), bytes = g.record_bytes(), panel = g.groups() * bytes;
  const int64_t part = Parts::kPart ? Parts::kPart : g.part, code_bytes = part * kPanel * bits_of(kCode) / 8;
  const int64_t parts = g.parts(), groups = g.groups(), head = (g.has_offsets ? 2 : 1) * numbers;
  const int8_t* x = g.rows.x + row * g.k;
  const float* scales = g.rows.scales + row * parts;
  const int32_t* starts = g.rows.starts + row * parts;
  constexpr int kCount = kVectors / kPanelVectors;
  const int64_t first_of_next = groups - kPanelBytesAhead / bytes;  // group with which those of the next panels come
  Floats total[kRows][kVectors] = {};
  for (int64_t group = 0; group < groups; group++, record += bytes) {
    const int64_t ahead = kPanelBytesAhead + (group < first_of_next ? 0 : (kCount - 1) * panel);
    bring_in<kCount>(record + ahead, panel, head);
    // In memory, as few registers are left until they are needed.
    alignas(64) float own_scales[kVectors * kWidth], own_offsets[kVectors * kWidth];
    for (int v = 0; v < kVectors; v++) {
      const uint8_t* const at = record + v / kPanelVectors * panel;
      store(own_scales + v * kWidth, load_numbers(at, g.numbers, v % kPanelVectors * kWidth));
      if (g.has_offsets)
        store(own_offsets + v * kWidth, load_numbers(at + numbers, g.numbers, v % kPanelVectors * kWidth));
    }
    Floats sums[kRows][kVectors] = {};
    const uint8_t *codes = record + head, *const end = record + bytes;
    do {
      bring_in<kCount>(codes + ahead, panel, code_bytes);
      Ints acc[kRows][kVectors];
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) acc[r][v] = Ints{} + starts[r * parts];
      add_part<kCode>(x, g.k, codes, panel, part, acc);
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) {
          const Floats product = __builtin_convertvector(acc[r][v], Floats);
          if constexpr (Parts::kIsOne)
            sums[r][v] = product * scales[r * parts];
          else
            sums[r][v] += product * scales[r * parts];
        }
      x += part, scales++, starts++, codes += code_bytes;
    } while (!Parts::kIsOne && codes < end);
    for (int v = 0; v < kVectors; v++) {
      const Floats scale = load(own_scales + v * kWidth);
      for (int r = 0; r < kRows; r++) total[r][v] += sums[r][v] * scale;
      if (!g.has_offsets) continue;
      const Floats offset = load(own_offsets + v * kWidth);
      for (int r = 0; r < kRows; r++) total[r][v] += offset * g.rows.offsets[(row + r) * groups + group];
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) store(y + (r * kVectors + v) * kWidth, total[r][v]);
}

template <Code kCode, class Parts, int kVectors, int kRows = kPanelRows>
static void panel_rows_of(int64_t rows, const PanelGemm& g, const uint8_t* record, int64_t row, float* y) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return panel_rows_of<kCode, Parts, kVectors, kRows - 1>(rows, g, record, row, y);
  }
  panel_rows<kCode, Parts, kVectors, kRows>(g, record, row, y);
}

// Puts sums[rows, count * kPanel] of `count` panels where they belong in y.
static void put_sums(const PanelGemm& g, const float* sums, int64_t row, int64_t rows, int64_t panel, int64_t count) {
  const int64_t column = panel * kPanel, columns = std::min(count * kPanel, g.n - column);
  for (int64_t r = 0; r < rows; r++) {
    float* const to = g.y + (row + r) * g.n + column;
    std::copy_n(sums + r * count * kPanel, columns, to);
    for (int64_t c = 0; g.outer && c < columns; c++) to[c] *= g.outer[column + c];
  }
}

// One to kPanels panels. Usual parts have code of their own; others, and a panel that is left, take one by one.
template <Code kCode>
static void few_panels(const PanelGemm& g, int64_t row, int64_t rows, int64_t panel, int64_t count) {
  constexpr int kAll = kPanels * kPanelVectors;
  alignas(64) float sums[kPanelRows * kPanels * kPanel];
  const int64_t bytes = g.groups() * g.record_bytes();
  const uint8_t* const record = g.panels + panel * bytes;
  const bool is_one = g.part == g.group;
  if (count < kPanels || (g.part != 32 && !(g.part == 16 && is_one))) {
    for (int64_t i = 0; i < count; i++) {
      panel_rows_of<kCode, OfAny, kPanelVectors>(rows, g, record + i * bytes, row, sums);
      put_sums(g, sums, row, rows, panel + i, 1);
    }
    return;
  }
  const auto multiply = g.part == 16 ? panel_rows_of<kCode, One16, kAll>
                        : is_one     ? panel_rows_of<kCode, One32, kAll>
                                     : panel_rows_of<kCode, Of32, kAll>;
  multiply(rows, g, record, row, sums);
  put_sums(g, sums, row, rows, panel, kPanels);
}

// Panels `begin` to `end` for all rows.
static void panel_gemm(const PanelGemm& g, int64_t begin, int64_t end) {
  const auto multiply = g.code == Code::kInt8 ? few_panels<Code::kInt8>
                        : g.code == Code::kF4 ? few_panels<Code::kF4>
                                              : few_panels<Code::kUint4>;
  const int64_t at_once = std::max<int64_t>(1, kRowBytes / g.k / kPanelRows) * kPanelRows;
  for (int64_t first = 0; first < g.num_rows; first += at_once) {
    const int64_t last = std::min(first + at_once, g.num_rows);
    for (int64_t panel = begin; panel < end; panel += kPanels)
      for (int64_t row = first; row < last; row += kPanelRows)
        multiply(g, row, std::min<int64_t>(kPanelRows, last - row), panel, std::min<int64_t>(kPanels, end - panel));
  }
}

static inline int32_t sum_of(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int lane = 0; lane < kWidth; lane++) sum += v[lane];
  return sum;
#endif
}

static inline void store_low_bytes(int8_t* to, Ints v) {
#if defined(__AVX512F__)  // GCC 12 makes one instruction of this, and a loop over lanes of the conversion below
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

// Rounds `count` numbers to integers times `scale`, and returns the sum of those integers.
static inline int32_t round_part(const float* x, int64_t count, int8_t* to, float* scale) {
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
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  Ints sums{};
  for (i = 0; i + kWidth <= count; i += kWidth) {
    const Ints shifted = (Ints)(load(x + i) * inverse + shifter);
    store_low_bytes(to + i, shifted);
    sums += (shifted << 24) >> 24;
  }
  int32_t sum = sum_of(sums);
  for (; i < count; i++) {
    const float shifted = x[i] * inverse + shifter;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    sum += to[i] = (int8_t)bits;
  }
  return sum;
}

static void round_row(const PanelGemm& g, const float* x, int64_t row) {
  const int64_t groups = g.groups(), each = g.group / g.part;  // parts of a group
  const int32_t zero = kTakesSigned && g.code == Code::kInt8 ? 0 : g.zero();
  int8_t* to = g.rows.x + row * g.k;
  int64_t part = row * g.parts();
  for (int64_t group = row * groups; group < (row + 1) * groups; group++) {
    float offset = 0;
    for (const int64_t end = part + each; part < end; part++, x += g.part, to += g.part) {
      float scale;
      const int32_t sum = round_part(x, g.part, to, &scale);
      g.rows.scales[part] = scale * g.unit();
      g.rows.starts[part] = -zero * sum;
      offset += scale * (float)sum;
    }
    g.rows.offsets[group] = offset;
  }
}

}  // namespace jaxllm::JAXLLM_ISA
