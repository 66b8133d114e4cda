// The custom calls: they check shapes, divide the work among threads, and pick the instruction set at run time.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "arm.h"
#include "kernels.h"
#include "parallel.h"
#include "products.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Ints1D = ffi::Buffer<ffi::S32, 1>;
using Ints2D = ffi::Buffer<ffi::S32, 2>;
using Floats1D = ffi::Buffer<ffi::F32, 1>;

namespace jaxllm {

namespace {

#if defined(__x86_64__)
// Older compilers don't know it by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Those that this CPU runs, the best first.
std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
      if (const Kernels* const amx = amx_kernels()) all.push_back(amx);
      all.push_back(&kAvx512Bf16);
    }
    if (const Kernels* const vnni = avx512_vnni_kernels()) all.push_back(vnni);
    all.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    if (const Kernels* const vnni = avx2_vnni_kernels()) all.push_back(vnni);
    all.push_back(&kAvx2);
  }
#elif defined(__aarch64__)
  if (has_bf16()) all.push_back(&kNeonBf16);
  if (const Kernels* const dotprod = neon_dotprod_kernels()) all.push_back(dotprod);
#endif
  all.push_back(&kPortable);
  return all;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{all_kernels().front()};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

namespace {

constexpr int64_t kLeastAlone = 64;   // rows of a thread, at least, for which it reads all of a weight alone,
constexpr int64_t kMostAtOnce = 256;  // and at most; of kernels that read rows without groups, both
constexpr int64_t kRoundedFloats = 128 << 10;  // sums that the second cache holds until they are rounded

// What becomes of the sums of a product: they stay, or are rounded, or those of the first half of the columns are an
// activation's that multiplies those of the other half.
struct Output {
  void* y;  // [rows, n]
  int64_t n;
  DType dtype;
  bool is_gated, is_gelu;

  bool is_of_sums() const { return !is_gated && dtype == DType::kF32; }

  void* at(int64_t row, int64_t column) const {
    return static_cast<char*>(y) + (row * n + column) * (dtype == DType::kF32 ? 4 : 2);
  }
};

// Columns begin to end of the output, some at a time, of its rows from `first` on.
void multiply_some(const Gemm& gemm, const Output& out, int64_t first, int64_t begin, int64_t end) {
  const int64_t step = kernels().columns, rows = gemm.rows, halves = out.is_gated ? 2 : 1;
  const int64_t columns = std::min(std::max<int64_t>(kRoundedFloats / (rows * halves) / step, 1) * step, end - begin);
  thread_local std::vector<float> sums;
  if (sums.size() < static_cast<size_t>(rows * columns * halves)) sums.resize(rows * columns * halves);
  Gemm part = gemm;
  part.ldy = columns * halves;
  for (int64_t at = begin; at < end; at += columns) {
    const int64_t count = std::min(columns, end - at);
    for (int64_t half = 0; half < halves; half++) {
      part.y = sums.data() + half * columns, part.first = half * out.n + at;
      kernels().gemm(part, part.first, part.first + count);
    }
    for (int64_t row = 0; row < rows; row++) {
      const float* const from = sums.data() + row * part.ldy;
      void* const to = out.at(first + row, at);
      if (out.is_gated)
        kernels().gate({count, out.is_gelu, DType::kF32, out.dtype}, from, from + columns, to);
      else
        kernels().round(from, static_cast<Bf16*>(to), count);
    }
  }
}

// Columns begin to end of the output's rows from `first` on, which are the rows of `gemm`.
void multiply(Gemm gemm, const Output& out, int64_t first, int64_t begin, int64_t end) {
  if (!out.is_of_sums()) return multiply_some(gemm, out, first, begin, end);
  gemm.y = static_cast<float*>(out.at(first, 0));
  kernels().gemm(gemm, begin, end);
}

// Each thread's rows by themselves: it reads what it has written, and packs its rows where it multiplies them. `gemm` says
// nothing of rows yet.
template <class T>
void multiply_by_rows(ffi::ThreadPool& pool, const Gemm& gemm, const T* x, int64_t rows, const Output& out) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1), parts = threads * ((rows - 1) / (threads * kMostAtOnce) + 1);
  parallel(pool, parts, [&](int64_t part) {
    const int64_t first = rows * part / parts;
    Gemm own = gemm;
    take_rows(own, rows * (part + 1) / parts - first, false);
    own.x = as_read(own, x + first * own.k);
    if (!own.x) {
      thread_local std::vector<float> packed;
      if (packed.size() < static_cast<size_t>(own.rows * own.units())) packed.resize(own.rows * own.units());
      for (int64_t i = 0; i < std::max<int64_t>(own.groups, 1); i++) pack(own, x + first * own.k, packed.data(), i);
      own.x = packed.data();
    }
    multiply(own, out, first, 0, out.n);
  });
}

// y[rows, n], or where it is gated [rows, n / 2], of x[rows, k] and w[k, n], or w in panels.
ffi::Error multiply_all(ffi::ThreadPool& pool, ffi::AnyBuffer& x, ffi::AnyBuffer& w, NumRows& num_rows, ffi::AnyBuffer& y,
                        bool transposed, bool batch_invariant, Output out, const char* name) {
  const auto xs = x.dimensions(), ys = y.dimensions();
  const bool is_f32 = x.element_type() == ffi::F32;
  Matrix matrix;
  if (xs.size() != 2 || ys.size() != 2 || !read_matrix(w, transposed, 0, matrix) || matrix.k != xs[1] || ys[0] != xs[0] ||
      matrix.n != ys[1] * (out.is_gated ? 2 : 1) || (matrix.in_panels && ys[1] % kDensePanel) || !is_one_or_none(num_rows) ||
      !find(y.element_type(), out.dtype) || (!is_f32 && x.element_type() != ffi::BF16) ||
      (out.dtype != DType::kF32 && is_f32) ||
      (w.element_type() != x.element_type() && (!is_f32 || batch_invariant)))  // float32 rows may have one of 16 bits
    return ffi::Error::InvalidArgument(std::string(name) + ": shapes or dtypes don't go together");
  const int64_t rows = used_rows(num_rows, xs[0]), k = xs[1], n = matrix.n;
  if (rows == 0) return ffi::Error::Success();
  out.y = y.untyped_data(), out.n = ys[1];
  Gemm gemm{nullptr, w.untyped_data(), nullptr, rows, k, n, 0, matrix.dtype, transposed,
            !is_f32 && kernels().pairs, matrix.in_panels};
  const int64_t least = gemm.pairs && kernels().reads_rows ? kMostAtOnce : kLeastAlone;
  if (rows >= pool.num_threads() * least && !(transposed && batch_invariant)) {
    if (is_f32)
      multiply_by_rows(pool, gemm, static_cast<const float*>(x.untyped_data()), rows, out);
    else
      multiply_by_rows(pool, gemm, static_cast<const Bf16*>(x.untyped_data()), rows, out);
    return ffi::Error::Success();
  }
  take_rows(gemm, rows, transposed && (batch_invariant || rows <= kDotRows));
  const std::unique_ptr<float[]> copy = pack_rows(pool, gemm, x);
  each_part(pool, rows, out.n, k * n * (matrix.dtype == DType::kF32 ? 4 : 2),
            [&](int64_t begin, int64_t end) { multiply(gemm, out, 0, begin, end); });
  return ffi::Error::Success();
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, NumRows num_rows,
                  ffi::Result<ffi::AnyBuffer> y, bool transposed, bool batch_invariant) {
  return multiply_all(pool, x, w, num_rows, *y, transposed, batch_invariant, {}, "jaxllm_matmul");
}

ffi::Error gated_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, NumRows num_rows,
                        ffi::Result<ffi::AnyBuffer> y, bool batch_invariant, bool is_gelu) {
  Output out{};
  out.is_gated = true, out.is_gelu = is_gelu;
  return multiply_all(pool, x, w, num_rows, *y, false, batch_invariant, out, "jaxllm_gated_matmul");
}

// What in the batch points outside of the arrays, or an empty string.
std::string fault(const Attention& a, int64_t tokens, int64_t seqs, int64_t num_blocks, const int32_t* distribution) {
  if (distribution[0] < 0 || distribution[0] > distribution[1] || distribution[1] > seqs || a.cu_q_lens[0] != 0)
    return "distribution or cu_q_lens";
  for (int64_t s = 0; s < distribution[1]; s++) {
    const int64_t q_len = a.cu_q_lens[s + 1] - a.cu_q_lens[s], blocks = (a.kv_lens[s] + a.block_size - 1) / a.block_size;
    if (q_len < 0 || a.cu_q_lens[s + 1] > tokens || a.kv_lens[s] < q_len || blocks > a.blocks_per_seq)
      return "lengths of sequence " + std::to_string(s);
    for (int64_t i = 0; i < blocks; i++)
      if (const int32_t block = a.block_tables[s * a.blocks_per_seq + i]; block < 0 || block >= num_blocks)
        return "block " + std::to_string(block) + " of sequence " + std::to_string(s);
  }
  return "";
}

constexpr int64_t kWriteTokens = 64;  // whose K and V one part writes
constexpr int64_t kTurns = 8;         // of each thread, at least where there are many tiles: some take longer than others
constexpr int64_t kMostTogether = 8;  // tiles of a part: a tile brings in what the next one begins with

void write_and_attend(ffi::ThreadPool& pool, const Attention& a, int64_t seqs) {
  const Kernels& best = kernels();
  const int64_t group = a.heads / a.kv_heads, rows = best.tile_rows;
  std::vector<AttentionTile> writes, tiles;
  for (int64_t s = 0; s < seqs; s++) {
    const int64_t q_len = a.cu_q_lens[s + 1] - a.cu_q_lens[s];
    for (int64_t i = 0; i < q_len; i += kWriteTokens) writes.push_back({s, i, std::min(i + kWriteTokens, q_len), 0});
    for (int64_t head = 0; head < a.kv_heads; head++)
      for (int64_t i = 0; i < q_len * group; i += rows)
        tiles.push_back({s, i, std::min(i + rows, q_len * group), head});
  }
  const auto write = [&](int64_t i) { best.write_kv(a, writes[i].seq, writes[i].begin, writes[i].end); };
  if (a.cu_q_lens[seqs] > 2 * kWriteTokens)
    parallel(pool, writes.size(), write);
  else
    for (size_t i = 0; i < writes.size(); i++) write(i);
  std::reverse(tiles.begin(), tiles.end());  // chunks, which take long, come last in a batch
  const int64_t count = tiles.size(), threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t together = std::clamp<int64_t>(count / (kTurns * threads), 1, kMostTogether);
  parallel(pool, (count + together - 1) / together, [&](int64_t part) {
    thread_local std::vector<float> scratch;
    const size_t floats = best.scratch_floats(a);
    if (scratch.size() < floats) scratch.resize(floats);
    const int64_t end = std::min((part + 1) * together, count);
    for (int64_t i = part * together; i < end; i++)
      best.attend(a, tiles[i], i + 1 < end ? &tiles[i + 1] : nullptr, scratch.data());
  });
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer kv_pool, Ints2D block_tables, Ints1D cu_q_lens, Ints1D kv_lens,
                           Ints1D distribution, Floats1D sinks, Floats1D kv_scales, ffi::Result<ffi::AnyBuffer> out,
                           ffi::Result<ffi::AnyBuffer> new_pool, float scale, bool causal, int64_t window,
                           float soft_cap, bool batch_invariant) {
  const auto qs = q.dimensions(), ks = k.dimensions(), ps = kv_pool.dimensions(), ts = block_tables.dimensions();
  const ffi::DataType dtype = q.element_type(), pool_dtype = kv_pool.element_type();
  const bool same_dtype = k.element_type() == dtype && v.element_type() == dtype && out->element_type() == dtype &&
                          new_pool->element_type() == pool_dtype;
  const bool is_int8 = pool_dtype == ffi::S8, is_quantised = is_int8 || pool_dtype == ffi::F8E4M3FN;
  const int64_t num_sinks = sinks.element_count(), num_scales = kv_scales.element_count();
  if (!same_dtype || (dtype != ffi::F32 && dtype != ffi::BF16) || (!is_quantised && pool_dtype != dtype))
    return ffi::Error::InvalidArgument("jaxllm_paged_attention: dtypes");
  if (qs.size() != 3 || ks.size() != 3 || ps.size() != 5 || ks[0] != qs[0] || ks[2] != qs[2] || ps[1] != 2 ||
      ps[2] != ks[1] || ps[4] != qs[2] || qs[1] % ks[1] || v.element_count() != k.element_count() ||
      out->element_count() != q.element_count() || static_cast<int64_t>(cu_q_lens.element_count()) != ts[0] + 1 ||
      static_cast<int64_t>(kv_lens.element_count()) != ts[0] || distribution.element_count() != 2 ||
      (num_sinks && num_sinks != qs[1]) || num_scales != (is_quantised ? 2 * ks[1] : 0))
    return ffi::Error::InvalidArgument("jaxllm_paged_attention: shapes don't go together");
  if (new_pool->untyped_data() != kv_pool.untyped_data())
    return ffi::Error::InvalidArgument("jaxllm_paged_attention: the pool must be aliased to the result");
  const DType own_dtype = dtype == ffi::F32 ? DType::kF32 : DType::kBf16;
  const Attention a{q.untyped_data(), k.untyped_data(), v.untyped_data(), new_pool->untyped_data(),
                    out->untyped_data(), block_tables.typed_data(), cu_q_lens.typed_data(), kv_lens.typed_data(),
                    num_sinks ? sinks.typed_data() : nullptr, is_quantised ? kv_scales.typed_data() : nullptr,
                    qs[1], ks[1], qs[2], ps[3], ts[1], window, scale, soft_cap, causal, batch_invariant,
                    own_dtype, is_int8 ? DType::kInt8 : is_quantised ? DType::kFloat8 : own_dtype};
  const int32_t* counts = distribution.typed_data();
  if (const std::string what = fault(a, qs[0], ts[0], ps[0], counts); !what.empty())
    return ffi::Error::InvalidArgument("jaxllm_paged_attention: out of range: " + what);
  write_and_attend(pool, a, counts[1]);
  const int64_t token_bytes = qs[1] * qs[2] * (dtype == ffi::F32 ? 4 : 2), used = a.cu_q_lens[counts[1]];
  std::memset(static_cast<char*>(a.out) + used * token_bytes, 0, (qs[0] - used) * token_bytes);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

extern "C" const char* jaxllm_instruction_set() { return jaxllm::kernels().name; }

// From now on, for tests of what other CPUs run. False, and nothing else, if this CPU doesn't run it.
extern "C" bool jaxllm_choose_instruction_set(const char* name) {
  for (const jaxllm::Kernels* kernels : jaxllm::all_kernels())
    if (!std::strcmp(kernels->name, name)) {
      jaxllm::chosen() = kernels;
      return true;
    }
  return false;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_matmul, jaxllm::matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("batch_invariant"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_gated_matmul, jaxllm::gated_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("batch_invariant")
                                  .Attr<bool>("is_gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_paged_attention, jaxllm::paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints2D>()
                                  .Arg<Ints1D>()
                                  .Arg<Ints1D>()
                                  .Arg<Ints1D>()
                                  .Arg<Floats1D>()
                                  .Arg<Floats1D>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("batch_invariant"));
