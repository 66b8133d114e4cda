// What custom calls of products share: rows as the kernels read them, and parts for threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxllm {

constexpr int64_t kPartBytes = 64 << 10;  // of w in a part of a GEMM, at least: some microseconds
constexpr int64_t kAlonePacked = 64 << 10;  // elements of x that one thread packs before another would have begun
constexpr int64_t kWidePart = 512;        // columns that a part has at least if there are more parts than threads

// Says how `rows` rows of x are read: each by itself, or by groups.
inline void take_rows(Gemm& gemm, int64_t rows, bool each) {
  gemm.rows = rows;
  each |= gemm.pairs && !gemm.transposed && kernels().reads_rows;
  gemm.groups = each ? 0 : (rows + kernels().group_rows - 1) / kernels().group_rows;
}

// The rows from x on if the kernel reads them as they lie, or null.
template <class T>
const float* as_read(const Gemm& gemm, const T* x) {
  const bool is_read_so = std::is_same_v<T, float> || (gemm.pairs && gemm.k % 2 == 0);
  return is_read_so && (gemm.groups == 0 || gemm.rows == 1) ? reinterpret_cast<const float*>(x) : nullptr;
}

// Group `i` of the rows of x as the kernel reads it (see Gemm). Without groups all of the rows.
template <class T>
void pack(const Gemm& gemm, const T* x, float* to, int64_t i) {
  const DType dtype = std::is_same_v<T, Bf16> ? DType::kBf16 : DType::kF32;
  const int64_t units = gemm.units();
  if (gemm.groups == 0) {
    for (int64_t r = 0; r < gemm.rows; r++) kernels().pack(x + r * gemm.k, dtype, gemm.pairs, 1, gemm.k, to + r * units);
    return;
  }
  const int64_t first = gemm.first_row(i), height = gemm.first_row(i + 1) - first;
  kernels().pack(x + first * gemm.k, dtype, gemm.pairs, height, gemm.k, to + first * units);
}

// All of x as the kernel reads it.
template <class T>
void prepare(xla::ffi::ThreadPool& pool, const Gemm& gemm, const T* x, float* to) {
  const auto pack_group = [&](int64_t i) { pack(gemm, x, to, i); };
  if (gemm.groups == 0 || gemm.rows * gemm.k < kAlonePacked)
    for (int64_t i = 0; i < std::max<int64_t>(gemm.groups, 1); i++) pack_group(i);
  else
    parallel(pool, gemm.groups, pack_group);
}

// Lets `gemm` read x as the kernel does, from the copy that it returns if it has made one.
inline std::unique_ptr<float[]> pack_rows(xla::ffi::ThreadPool& pool, Gemm& gemm, const xla::ffi::AnyBuffer& x) {
  const auto pack_from = [&](const auto* from) -> std::unique_ptr<float[]> {
    gemm.x = as_read(gemm, from);
    if (gemm.x) return nullptr;
    std::unique_ptr<float[]> copy(new float[gemm.rows * gemm.units()]);  // not a vector, which would write zeros first
    gemm.x = copy.get();
    prepare(pool, gemm, from, copy.get());
    return copy;
  };
  if (x.element_type() == xla::ffi::F32) return pack_from(static_cast<const float*>(x.untyped_data()));
  return pack_from(static_cast<const Bf16*>(x.untyped_data()));
}

// Sums, and where they go in bfloat16 (null: they stay), of rows of n.
struct Sums {
  const float* from;
  Bf16* to;
  int64_t n;

  void round(int64_t first, int64_t rows, int64_t begin, int64_t end) const {
    for (int64_t at = first * n; to && at < (first + rows) * n; at += n)
      kernels().round(from + at + begin, to + at + begin, end - begin);
  }
};

// Whether the rows of each expert e can be offsets[e] to offsets[e + 1].
inline bool are_offsets(const int32_t* offsets, int64_t experts, int64_t rows) {
  for (int64_t e = 0; e < experts; e++)
    if (offsets[e] > offsets[e + 1]) return false;
  return offsets[0] >= 0 && offsets[experts] <= rows;
}

// Writes zeros to those rows of y that lie before `begin` and from `end` on.
inline void zero_other_rows(xla::ffi::AnyBuffer& y, int64_t begin, int64_t end) {
  const int64_t row_bytes = y.dimensions()[1] * (y.element_type() == xla::ffi::F32 ? 4 : 2);
  char* const to = static_cast<char*>(y.untyped_data());
  std::memset(to, 0, begin * row_bytes);
  std::memset(to + end * row_bytes, 0, (y.dimensions()[0] - end) * row_bytes);
}

// Into how many parts to divide `size` columns or rows of w, which has `bytes`.
inline int64_t num_parts(const xla::ffi::ThreadPool& pool, int64_t size, int64_t bytes) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t wanted = size >= threads * kWidePart ? 2 * threads : threads;  // twice: a thread may start late
  return std::clamp<int64_t>(bytes / kPartBytes, 1, wanted);
}

// Calls work(begin, end) for all of n columns, for which `bytes` of w are read.
template <class Work>
void each_part(xla::ffi::ThreadPool& pool, int64_t rows, int64_t n, int64_t bytes, const Work& work) {
  if (rows == 0 || n == 0) return;
  const int64_t step = kernels().columns, parts = num_parts(pool, n, bytes);
  const int64_t columns = ((n + parts - 1) / parts + step - 1) / step * step;
  parallel(pool, (n + columns - 1) / columns,
           [&](int64_t part) { work(part * columns, std::min((part + 1) * columns, n)); });
}

}  // namespace jaxllm
