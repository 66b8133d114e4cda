// The custom call of products with a quantised matrix: it checks shapes and dtypes, and divides the work among threads.
#include <algorithm>
#include <memory>

#include "kernels.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Floats1D = ffi::Buffer<ffi::F32, 1>;
using Floats2D = ffi::Buffer<ffi::F32, 2>;

namespace jaxllm {
namespace {

bool find(ffi::DataType dtype, Code& code) {
  switch (dtype) {
    case ffi::S8: code = Code::kInt8; return true;
    case ffi::F8E4M3FN: code = Code::kF8; return true;
    case ffi::S4: code = Code::kInt4; return true;
    case ffi::U4: code = Code::kUint4; return true;
    case ffi::F4E2M1FN: code = Code::kF4; return true;
    default: return false;
  }
}

bool find(ffi::DataType dtype, Scale& scale) {
  switch (dtype) {
    case ffi::F32: scale = Scale::kF32; return true;
    case ffi::BF16: scale = Scale::kBf16; return true;
    case ffi::F16: scale = Scale::kF16; return true;
    case ffi::F8E4M3FN: scale = Scale::kF8; return true;
    case ffi::F8E8M0FNU: scale = Scale::kPower; return true;
    default: return false;
  }
}

ffi::Error quantized_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                            Floats2D offsets, Floats1D outer, ffi::Result<ffi::AnyBuffer> y, bool by_output) {
  const auto xs = x.dimensions(), cs = codes.dimensions(), ss = scales.dimensions(), ys = y->dimensions();
  const bool is_f32 = x.element_type() == ffi::F32, rounds = y->element_type() != ffi::F32;
  QuantizedGemm q{};
  if ((!is_f32 && x.element_type() != ffi::BF16) || (rounds && y->element_type() != ffi::BF16) ||
      !find(codes.element_type(), q.code) || !find(scales.element_type(), q.scale))
    return ffi::Error::InvalidArgument("jaxllm_quantized_matmul: dtypes");
  if (xs.size() != 2 || cs.size() != 2 || ys.size() != 2 || cs[by_output ? 1 : 0] != xs[1] || ys[0] != xs[0] ||
      ys[1] != cs[by_output ? 0 : 1] || ss.size() != (by_output ? 1 : 2) || ss.back() != ys[1])
    return ffi::Error::InvalidArgument("jaxllm_quantized_matmul: shapes don't go together");
  const int64_t rows = xs[0], k = xs[1], n = ys[1], num_groups = by_output ? 1 : ss[0];
  const int64_t num_offsets = offsets.element_count(), num_outer = outer.element_count();
  if (num_groups < 1 || k % num_groups || (num_offsets && (by_output || num_offsets != num_groups * n)) ||
      (num_outer && num_outer != n))
    return ffi::Error::InvalidArgument("jaxllm_quantized_matmul: groups, offsets or outer");
  const bool transposed = by_output && rows <= kDirectRows;
  const int64_t groups = transposed ? 1 : (rows + kernels().group_rows - 1) / kernels().group_rows;
  q.gemm = {nullptr, nullptr, static_cast<float*>(y->untyped_data()), rows, k, n, groups, DType::kF32, transposed};
  q.by_output = by_output;
  q.codes = static_cast<const uint8_t*>(codes.untyped_data());
  q.scales = scales.untyped_data();
  q.offsets = num_offsets ? offsets.typed_data() : nullptr;
  q.outer = num_outer ? outer.typed_data() : nullptr;
  q.group = k / num_groups;
  const std::unique_ptr<float[]> copy = pack_rows(pool, q.gemm, x);
  std::unique_ptr<float[]> sums;
  if (rounds) {
    sums.reset(new float[rows * n]);
    q.gemm.y = sums.get();
  }
  each_part(pool, q.gemm, k * n, [&](int64_t begin, int64_t end) { kernels().quantized_gemm(q, begin, end); });
  if (rounds) std::transform(sums.get(), sums.get() + rows * n, static_cast<Bf16*>(y->untyped_data()), narrow);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_quantized_matmul, jaxllm::quantized_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats2D>()
                                  .Arg<Floats1D>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("by_output"));
