// The custom call of products with a quantised matrix: it checks shapes and divides the work among threads.
#include <algorithm>
#include <memory>
#include <string>

#include "kernels.h"
#include "products.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxllm {
namespace {

ffi::Error quantized_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                            ffi::AnyBuffer offsets, ffi::AnyBuffer outer, NumRows num_rows,
                            ffi::Result<ffi::AnyBuffer> y, bool by_output) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  const bool is_f32 = x.element_type() == ffi::F32, rounds = y->element_type() != ffi::F32;
  Weight weight;
  if (const char* fault = read_weight(codes, scales, offsets, outer, by_output, false, weight))
    return ffi::Error::InvalidArgument(std::string("jaxllm_quantized_matmul: ") + fault);
  if ((!is_f32 && x.element_type() != ffi::BF16) || (rounds && y->element_type() != ffi::BF16) || weight.is_dense)
    return ffi::Error::InvalidArgument("jaxllm_quantized_matmul: dtypes");
  if (xs.size() != 2 || ys.size() != 2 || weight.k() != xs[1] || ys[0] != xs[0] || ys[1] != weight.n() ||
      !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_quantized_matmul: shapes don't go together");
  const int64_t rows = used_rows(num_rows, xs[0]), n = ys[1];
  if (rows == 0) return ffi::Error::Success();
  QuantizedGemm q = weight.first;
  take_rows(q.gemm, rows, weight.takes_each(rows));
  q.gemm.y = static_cast<float*>(y->untyped_data());
  const std::unique_ptr<float[]> copy = pack_rows(pool, q.gemm, x);
  std::unique_ptr<float[]> sums;
  if (rounds) {
    sums.reset(new float[rows * n]);
    q.gemm.y = sums.get();
  }
  const Sums done{q.gemm.y, rounds ? static_cast<Bf16*>(y->untyped_data()) : nullptr, n};
  each_part(pool, q.gemm.rows, n, q.gemm.k * n, [&](int64_t begin, int64_t end) {
    kernels().quantized_gemm(q, begin, end);
    done.round(0, rows, begin, end);
  });
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("by_output"));
