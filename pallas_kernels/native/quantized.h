// Products of rows with a matrix of few bits. Codes become floats part by part: for few rows in registers, for more in
// a dense part that the cache holds, which serves them all.
#pragma once

#include "gemm.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int64_t kPair = 2 * kWidth;  // codes that become floats at once
constexpr int64_t kPairs = 2;          // of few rows: columns that are summed at once
constexpr int64_t kInputs = 256;       // that are dequantised before they are multiplied

static inline Floats widen(Bytes b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&b)));
#else
  return __builtin_convertvector(__builtin_convertvector(b, Ints), Floats);
#endif
}

// Each kind of code: how a pair of vectors is read from `at`, and what its numbers are to be multiplied by.
struct Codes8 {
  static constexpr int kBits = 8;
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* at, Floats* to) {
    Bytes b[2];
    std::memcpy(b, at, sizeof b);
    to[0] = widen(b[0]), to[1] = widen(b[1]);
  }
};

struct Floats8 {
  static constexpr int kBits = 8;
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* at, Floats* to) { to[0] = load_float8(at), to[1] = load_float8(at + kWidth); }
};

// Two codes a byte, the low bits first; Table has the number of each.
template <class Table>
struct Nibbles {
  static constexpr int kBits = 4;
  static constexpr float kUnit = Table::kUnit;
  static inline void load(const uint8_t* at, Floats* to) {
    int8_t numbers[kPair < 16 ? 16 : kPair];
#if defined(__AVX2__)
    __m128i packed{};
    std::memcpy(&packed, at, kWidth);
    const __m128i table = _mm_load_si128((const __m128i*)Table::kNumbers), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(packed, mask));
    const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
    const __m128i ordered[2] = {_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high)};
    std::memcpy(numbers, ordered, kPair);
#else
    for (int i = 0; i < kWidth; i++)
      numbers[2 * i] = Table::kNumbers[at[i] & 15], numbers[2 * i + 1] = Table::kNumbers[at[i] >> 4];
#endif
    Codes8::load((const uint8_t*)numbers, to);
  }
};

struct SignedTable {
  static constexpr float kUnit = 1.0f;
  alignas(16) static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};
struct UnsignedTable {
  static constexpr float kUnit = 1.0f;
  alignas(16) static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
struct Float4Table {  // of halves
  static constexpr float kUnit = 0.5f;
  alignas(16) static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

// Code `i` alone.
template <class Kind>
static float code_at(const QuantizedGemm& q, int64_t i) {
  uint8_t bytes[kPair] = {};
  if (Kind::kBits == 8)
    bytes[0] = q.codes[i];
  else
    bytes[0] = i & 1 ? q.codes[i / 2] >> 4 : q.codes[i / 2] & 15;
  Floats pair[2];
  Kind::load(bytes, pair);
  return pair[0][0];
}

// `kWidth` scales from the i-th on.
static inline Floats load_scales(const QuantizedGemm& q, int64_t i) { return load_numbers(q.scales, q.scale, i); }

static float scale_at(const QuantizedGemm& q, int64_t i) {
  alignas(64) char some[kWidth * 4] = {};
  const int64_t bytes = bytes_of(q.scale);
  std::memcpy(some, static_cast<const char*>(q.scales) + i * bytes, bytes);
  QuantizedGemm one = q;
  one.scales = some;
  return load_scales(one, 0)[0];
}

// Calls work(group, from, to) for the inputs from `k` on, `depth` of them, by groups that share scales.
template <class Work>
static inline void each_group(const QuantizedGemm& q, int64_t k, int64_t depth, const Work& work) {
  for (int64_t i = k; i < k + depth;) {
    const int64_t group = i / q.group, next = (group + 1) * q.group, end = next < k + depth ? next : k + depth;
    work(group, i, end);
    i = end;
  }
}

template <class Kind>
static inline const uint8_t* codes_at(const QuantizedGemm& q, int64_t i) {
  return q.codes + i * Kind::kBits / 8;
}

// Sums of kRows rows for the columns of some pairs from `n` on. `ahead` bytes from each code that is read lies one that
// will be.
template <class Kind, int kRows, int kSome>
static void few_rows(const QuantizedGemm& q, int64_t k, int64_t depth, int64_t n, int64_t ahead) {
  const Gemm& g = q.gemm;
  Floats total[kRows][2 * kSome];
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < 2 * kSome; j++) total[r][j] = k == 0 ? Floats{} : load(g.y + r * g.n + n + j * kWidth);
  each_group(q, k, depth, [&](int64_t group, int64_t from, int64_t to) {
    Floats acc[kRows][2 * kSome] = {};
    float sums[kRows] = {};
    const uint8_t* at = codes_at<Kind>(q, from * g.n + n);
    for (int64_t i = from; i < to; i++, at += g.n * Kind::kBits / 8) {
      __builtin_prefetch(at + ahead, 0, 2);
      for (int p = 0; p < kSome; p++) {
        Floats w[2];
        Kind::load(at + p * kPair * Kind::kBits / 8, w);
        for (int r = 0; r < kRows; r++)
          for (int j = 0; j < 2; j++) acc[r][2 * p + j] += broadcast(g.x[i * kRows + r]) * w[j];
      }
      for (int r = 0; r < kRows; r++) sums[r] += g.x[i * kRows + r];
    }
    for (int j = 0; j < 2 * kSome; j++) {
      const int64_t first = group * g.n + n + j * kWidth;
      const Floats scale = load_scales(q, first) * Kind::kUnit;
      for (int r = 0; r < kRows; r++) {
        total[r][j] += acc[r][j] * scale;
        if (q.offsets) total[r][j] += load(q.offsets + first) * sums[r];
      }
    }
  });
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < 2 * kSome; j++) store(g.y + r * g.n + n + j * kWidth, total[r][j]);
}

template <class Kind, int kSome, int kRows = kDirectRows>
static void few_rows_of(const QuantizedGemm& q, int64_t k, int64_t depth, int64_t n, int64_t ahead) {
  if constexpr (kRows > 1) {
    if (q.gemm.rows < kRows) return few_rows_of<Kind, kSome, kRows - 1>(q, k, depth, n, ahead);
  }
  few_rows<Kind, kRows, kSome>(q, k, depth, n, ahead);
}

// Inputs `from` to `to` of a pair of columns, dense; they share `scale` and `offset`.
template <class Kind>
static void dequantize(const QuantizedGemm& q, int64_t n, int64_t from, int64_t to, const Floats* scale,
                       const Floats* offset, int64_t ahead, float* dense) {
  const uint8_t* at = codes_at<Kind>(q, from * q.gemm.n + n);
  for (int64_t i = from; i < to; i++, at += q.gemm.n * Kind::kBits / 8) {
    __builtin_prefetch(at + ahead, 0, 2);
    Floats w[2];
    Kind::load(at, w);
    for (int j = 0; j < 2; j++) store(dense + (i - from) * kPair + j * kWidth, w[j] * scale[j] + offset[j]);
  }
}

// Likewise of a matrix by output, whose codes it transposes by squares.
template <class Kind>
static void dequantize_by_output(const QuantizedGemm& q, int64_t n, int64_t from, int64_t to, const Floats* scale,
                                 float* dense) {
  for (; from < to; from += kPair, dense += kPair * kPair) {
    const int64_t size = to - from < kPair ? to - from : kPair;
    alignas(64) float square[kPair * kPair];
    for (int64_t c = 0; c < kPair; c++) {
      const int64_t first = (n + c) * q.gemm.k + from;
      Floats w[2];
      if (size == kPair) {
        Kind::load(codes_at<Kind>(q, first), w);
        for (int j = 0; j < 2; j++) store(square + c * kPair + j * kWidth, w[j]);
      } else {
        for (int64_t i = 0; i < size; i++) square[c * kPair + i] = code_at<Kind>(q, first + i);
      }
    }
    for (int64_t i = 0; i < size; i++)
      for (int j = 0; j < 2; j++) {
        Floats w;
        for (int lane = 0; lane < kWidth; lane++) w[lane] = square[(j * kWidth + lane) * kPair + i];
        store(dense + i * kPair + j * kWidth, w * scale[j]);
      }
  }
}

// All rows of a pair of columns, by way of their dense part.
template <class Kind>
static void many_rows(const QuantizedGemm& q, int64_t k, int64_t depth, int64_t n, int64_t ahead) {
  const Gemm& g = q.gemm;
  alignas(64) float dense[kInputs * kPair];
  each_group(q, k, depth, [&](int64_t group, int64_t from, int64_t to) {
    Floats scale[2], offset[2];
    for (int j = 0; j < 2; j++) {
      const int64_t first = group * g.n + n + j * kWidth;
      scale[j] = load_scales(q, first) * Kind::kUnit;
      offset[j] = q.offsets ? load(q.offsets + first) : Floats{};
    }
    float* part = dense + (from - k) * kPair;
    if (q.by_output)
      dequantize_by_output<Kind>(q, n, from, to, scale, part);
    else
      dequantize<Kind>(q, n, from, to, scale, offset, ahead, part);
  });
  Ahead nothing;
  panel<Single<float>>(g, k, depth, n, kPair, dense, nothing);
}

// Columns that fill no pair, or whose codes begin within a byte.
template <class Kind>
static void odd_columns(const QuantizedGemm& q, int64_t k, int64_t depth, int64_t n, int64_t end) {
  const Gemm& g = q.gemm;
  for (; n < end; n++) {
    if (k == 0)
      for (int64_t r = 0; r < g.rows; r++) g.y[r * g.n + n] = 0;
    each_group(q, k, depth, [&](int64_t group, int64_t from, int64_t to) {
      const float scale = scale_at(q, group * g.n + n) * Kind::kUnit;
      const float offset = q.offsets ? q.offsets[group * g.n + n] : 0.0f;
      for (int64_t i = from; i < to; i++) {
        const float w = code_at<Kind>(q, q.by_output ? n * g.k + i : i * g.n + n) * scale + offset;
        for (int64_t rows = 0; rows < g.groups; rows++) {
          const int64_t first = g.first_row(rows), height = g.first_row(rows + 1) - first;
          const float* x = g.x + first * g.k + i * height;
          for (int64_t r = 0; r < height; r++) g.y[(first + r) * g.n + n] += x[r] * w;
        }
      }
    });
  }
}

template <class Kind>
static void quantized_by_columns(const QuantizedGemm& q, int64_t begin, int64_t end) {
  const Gemm& g = q.gemm;
  const bool is_whole = Kind::kBits == 8 || (q.by_output ? g.k : g.n) % 2 == 0, is_few = g.rows <= kDirectRows;
  const int64_t step = is_few ? kPairs * kPair : kPair;
  for (int64_t k = 0; k < g.k; k += kInputs) {
    const int64_t depth = g.k - k < kInputs ? g.k - k : kInputs;
    int64_t n = begin;
    const auto ahead = [&](int64_t width) -> int64_t {  // the next line of these inputs, or the first of the next ones
      const int64_t here = n * Kind::kBits / 8, next = here + (width * Kind::kBits / 8 > kLine ? 2 : 1) * kLine;
      if (next < end * Kind::kBits / 8) return next - here;
      return k + 2 * kInputs > g.k ? 0 : (kInputs * g.n + begin) * Kind::kBits / 8 - here;
    };
    for (; is_whole && n + step <= end; n += step)
      is_few ? few_rows_of<Kind, kPairs>(q, k, depth, n, ahead(step)) : many_rows<Kind>(q, k, depth, n, ahead(step));
    for (; is_whole && is_few && n + kPair <= end; n += kPair) few_rows_of<Kind, 1>(q, k, depth, n, ahead(kPair));
    odd_columns<Kind>(q, k, depth, n, end);
  }
}

// Of a matrix by output: kColumns columns of kRows rows, straight from the codes.
template <class Kind, int kRows, int kColumns>
static void few_dots(const QuantizedGemm& q, int64_t n) {
  const Gemm& g = q.gemm;
  const int64_t whole = Kind::kBits == 8 || g.k % 2 == 0 ? g.k / kPair * kPair : 0;
  Floats acc[kRows][kColumns] = {};
  for (int64_t i = 0; i < whole; i += kPair)
    for (int c = 0; c < kColumns; c++) {
      Floats w[2];
      Kind::load(codes_at<Kind>(q, (n + c) * g.k + i), w);
      for (int r = 0; r < kRows; r++)
        acc[r][c] += load(g.x + r * g.k + i) * w[0] + load(g.x + r * g.k + i + kWidth) * w[1];
    }
  for (int c = 0; c < kColumns; c++) {
    const float scale = scale_at(q, n + c) * Kind::kUnit;
    for (int r = 0; r < kRows; r++) {
      float total = sum(acc[r][c]);
      for (int64_t i = whole; i < g.k; i++) total += g.x[r * g.k + i] * code_at<Kind>(q, (n + c) * g.k + i);
      g.y[r * g.n + n + c] = total * scale;
    }
  }
}

template <class Kind, int kColumns, int kRows = kDirectRows>
static void few_dots_of(const QuantizedGemm& q, int64_t n) {
  if constexpr (kRows > 1) {
    if (q.gemm.rows < kRows) return few_dots_of<Kind, kColumns, kRows - 1>(q, n);
  }
  few_dots<Kind, kRows, kColumns>(q, n);
}

template <class Kind>
static void quantized_by_dots(const QuantizedGemm& q, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kRegisters == 32 ? 4 : 2;
  const Gemm& g = q.gemm;
  int64_t n = begin;
  for (; n + kColumns <= end; n += kColumns) few_dots_of<Kind, kColumns>(q, n);
  for (; n < end; n++) few_dots_of<Kind, 1>(q, n);
}

template <class Kind>
static void quantized_gemm_of(const QuantizedGemm& q, int64_t begin, int64_t end) {
  const Gemm& g = q.gemm;
  (g.groups == 0 ? quantized_by_dots<Kind> : quantized_by_columns<Kind>)(q, begin, end);
  for (int64_t r = 0; q.outer && r < g.rows; r++)
    for (int64_t n = begin; n < end; n++) g.y[r * g.n + n] *= q.outer[n];
}

static void quantized_gemm(const QuantizedGemm& q, int64_t begin, int64_t end) {
  switch (q.code) {
    case Code::kInt8: return quantized_gemm_of<Codes8>(q, begin, end);
    case Code::kF8: return quantized_gemm_of<Floats8>(q, begin, end);
    case Code::kInt4: return quantized_gemm_of<Nibbles<SignedTable>>(q, begin, end);
    case Code::kUint4: return quantized_gemm_of<Nibbles<UnsignedTable>>(q, begin, end);
    case Code::kF4: return quantized_gemm_of<Nibbles<Float4Table>>(q, begin, end);
  }
}

}  // namespace jaxllm::JAXLLM_ISA
