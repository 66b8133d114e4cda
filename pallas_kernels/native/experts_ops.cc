// The custom calls of mixtures of experts: they check shapes and divide the work among threads.
#include <memory>
#include <string>

#include "experts.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Ints1D = ffi::Buffer<ffi::S32, 1>;

namespace jaxllm {
namespace {

bool is_float(ffi::DataType dtype) { return dtype == ffi::F32 || dtype == ffi::BF16; }

template <class T>
void multiply_all(ffi::ThreadPool& pool, Weight weight, const int32_t* offsets, const T* x, ffi::AnyBuffer& y) {
  Gemm& gemm = weight.first.gemm;
  gemm.pairs = std::is_same_v<T, Bf16> && weight.is_dense && gemm.dtype == DType::kBf16 && kernels().pairs;
  const int64_t n = weight.n(), k = weight.k(), rows = y.dimensions()[0];
  const bool rounds = y.element_type() != ffi::F32;
  std::unique_ptr<float[]> packed(new float[rows * k]), sums(rounds ? new float[rows * n] : nullptr);
  float* to = rounds ? sums.get() : static_cast<float*>(y.untyped_data());
  const Sums done{to, rounds ? static_cast<Bf16*>(y.untyped_data()) : nullptr, n};
  const std::vector<ExpertTile> tiles = tiles_of(weight, offsets, packed.get(), to);
  pack_rows(pool, tiles, x, packed.get());
  each_part(pool, weight, tiles, n, [&](const ExpertTile& tile, int64_t begin, int64_t end) {
    multiply(weight, tile, x, begin, end);
    done.round(tile.first, tile.rows(), begin, end);
  });
}

ffi::Error grouped_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, Ints1D offsets, ffi::AnyBuffer codes,
                          ffi::AnyBuffer scales, ffi::AnyBuffer weight_offsets, ffi::AnyBuffer outer,
                          ffi::Result<ffi::AnyBuffer> y, bool by_output) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  Weight weight;
  if (const char* fault = read_weight(codes, scales, weight_offsets, outer, by_output, true, weight))
    return ffi::Error::InvalidArgument(std::string("jaxllm_grouped_matmul: ") + fault);
  if (!is_float(x.element_type()) || !is_float(y->element_type()) || xs.size() != 2 || ys.size() != 2 ||
      xs[0] != ys[0] || xs[1] != weight.k() || ys[1] != weight.n() ||
      static_cast<int64_t>(offsets.element_count()) != weight.experts + 1)
    return ffi::Error::InvalidArgument("jaxllm_grouped_matmul: shapes or dtypes don't go together");
  const int32_t* ends = offsets.typed_data();
  if (!are_offsets(ends, weight.experts, xs[0]))
    return ffi::Error::InvalidArgument("jaxllm_grouped_matmul: the offsets fall or leave the rows");
  if (x.element_type() == ffi::F32)
    multiply_all(pool, weight, ends, static_cast<const float*>(x.untyped_data()), *y);
  else
    multiply_all(pool, weight, ends, static_cast<const Bf16*>(x.untyped_data()), *y);
  zero_other_rows(*y, ends[0], ends[weight.experts]);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_grouped_matmul, jaxllm::grouped_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints1D>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("by_output"));
