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

inline float widen(Bf16 b) {
  const uint32_t word = (uint32_t)b.bits << 16;
  float f;
  std::memcpy(&f, &word, sizeof f);
  return f;
}

inline float widen(float f) { return f; }

// Says how `rows` rows of x are read: each by itself, or by groups.
inline void take_rows(Gemm& gemm, int64_t rows, bool each) {
  gemm.rows = rows;
  gemm.groups = each ? 0 : (rows + kernels().group_rows - 1) / kernels().group_rows;
}

// Units `first` to `first + count` of a row of x, `step` apart.
template <class T>
inline void copy_units(const Gemm& gemm, const T* row, int64_t first, int64_t count, float* to, int64_t step) {
  if constexpr (std::is_same_v<T, Bf16>) {
    if (gemm.pairs) {
      for (int64_t i = 0; i < count; i++) {
        const Bf16* at = row + 2 * (first + i);
        const uint32_t second = 2 * (first + i) + 1 < gemm.k ? at[1].bits : 0, pair = at[0].bits | second << 16;
        std::memcpy(to + i * step, &pair, sizeof pair);
      }
      return;
    }
  }
  for (int64_t i = 0; i < count; i++) to[i * step] = widen(row[first + i]);
}

// Group `i` of the rows of x, which row(0), row(1), ... point to, as the kernel reads it (see Gemm): transposed by 8
// units, so that what is written stays in the cache until it is whole. Without groups all of the rows.
template <class Row>
void pack(const Gemm& gemm, const Row& row, float* to, int64_t i) {
  constexpr int64_t kUnits = 8;
  const int64_t units = gemm.units();
  if (gemm.groups == 0) {
    for (int64_t r = 0; r < gemm.rows; r++) copy_units(gemm, row(r), 0, units, to + r * units, 1);
    return;
  }
  const int64_t first = gemm.first_row(i), height = gemm.first_row(i + 1) - first;
  to += first * units;
  for (int64_t unit = 0; unit < units; unit += kUnits)
    for (int64_t r = 0; r < height; r++)
      copy_units(gemm, row(first + r), unit, std::min(kUnits, units - unit), to + unit * height + r, height);
}

// All of x as the kernel reads it.
template <class T>
void prepare(xla::ffi::ThreadPool& pool, const Gemm& gemm, const T* x, float* to) {
  const auto pack_group = [&](int64_t i) { pack(gemm, [&](int64_t row) { return x + row * gemm.k; }, to, i); };
  if (gemm.groups == 0 || gemm.rows * gemm.k < kAlonePacked)
    for (int64_t i = 0; i < std::max<int64_t>(gemm.groups, 1); i++) pack_group(i);
  else
    parallel(pool, gemm.groups, pack_group);
}

// Lets `gemm` read x as the kernel does, from the copy that it returns if it has made one.
inline std::unique_ptr<float[]> pack_rows(xla::ffi::ThreadPool& pool, Gemm& gemm, const xla::ffi::AnyBuffer& x) {
  const bool is_f32 = x.element_type() == xla::ffi::F32;
  gemm.x = static_cast<const float*>(x.untyped_data());
  const bool is_read_so = is_f32 || (gemm.pairs && gemm.k % 2 == 0);
  if (is_read_so && (gemm.groups == 0 || gemm.rows == 1)) return nullptr;
  std::unique_ptr<float[]> copy(new float[gemm.rows * gemm.units()]);  // not a vector, which would write zeros first
  gemm.x = copy.get();
  if (is_f32)
    prepare(pool, gemm, static_cast<const float*>(x.untyped_data()), copy.get());
  else
    prepare(pool, gemm, static_cast<const Bf16*>(x.untyped_data()), copy.get());
  return copy;
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

// Into how many parts to divide `size` columns or rows of w, which has `bytes`.
inline int64_t num_parts(const xla::ffi::ThreadPool& pool, int64_t size, int64_t bytes) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t wanted = size >= threads * kWidePart ? 2 * threads : threads;  // twice: a thread may start late
  return std::clamp<int64_t>(bytes / kPartBytes, 1, wanted);
}

// Calls work(begin, end) for all columns of w, which has `bytes`.
template <class Work>
void each_part(xla::ffi::ThreadPool& pool, const Gemm& gemm, int64_t bytes, const Work& work) {
  if (gemm.rows == 0 || gemm.n == 0) return;
  const int64_t step = kernels().columns, parts = num_parts(pool, gemm.n, bytes);
  const int64_t columns = ((gemm.n + parts - 1) / parts + step - 1) / step * step;
  parallel(pool, (gemm.n + columns - 1) / columns,
           [&](int64_t part) { work(part * columns, std::min((part + 1) * columns, gemm.n)); });
}

}  // namespace jaxllm
