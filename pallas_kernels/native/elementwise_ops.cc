// The custom calls of what lies between products: they check shapes and divide tokens among threads.
#include <algorithm>

#include "kernels.h"
#include "parallel.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Floats2D = ffi::Buffer<ffi::F32, 2>;

namespace jaxllm {
namespace {

constexpr int64_t kAloneNumbers = 16 << 10;  // of which one thread is through before another would have begun

// Calls work(token) for all tokens, of `numbers` each.
template <class Work>
void each_token(ffi::ThreadPool& pool, int64_t tokens, int64_t numbers, const Work& work) {
  const int64_t wanted = tokens * numbers / kAloneNumbers, most = 4 * std::max<int64_t>(pool.num_threads(), 1);
  const int64_t parts = std::clamp<int64_t>(wanted, 1, std::min(most, std::max<int64_t>(tokens, 1)));
  parallel(pool, parts, [&](int64_t part) {
    for (int64_t token = tokens * part / parts; token < tokens * (part + 1) / parts; token++) work(token);
  });
}

ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats2D sin, Floats2D cos, NumRows num_rows,
                  ffi::Result<ffi::AnyBuffer> y, bool interleaved) {
  const auto xs = x.dimensions(), ss = sin.dimensions();
  Rotation r{x.untyped_data(), y->untyped_data(), sin.typed_data(), cos.typed_data()};
  if (xs.size() != 3 || ss[0] != xs[0] || 2 * ss[1] > xs[2] || cos.element_count() != sin.element_count() ||
      y->element_count() != x.element_count() || y->element_type() != x.element_type() ||
      !find(x.element_type(), r.dtype) || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_rotate: shapes or dtypes don't go together");
  r.heads = xs[1], r.head_dim = xs[2], r.pairs = ss[1], r.interleaved = interleaved;
  const int64_t tokens = used_rows(num_rows, xs[0]);
  each_token(pool, tokens, xs[1] * xs[2], [&](int64_t token) { kernels().rotate(r, token); });
  return ffi::Error::Success();
}

ffi::Error gated(ffi::ThreadPool pool, ffi::AnyBuffer x, NumRows num_rows, ffi::Result<ffi::AnyBuffer> y,
                 bool is_gelu) {
  const auto xs = x.dimensions();
  Gated g{x.untyped_data(), y->untyped_data()};
  if (xs.size() != 3 || xs[1] != 2 || 2 * y->element_count() != x.element_count() ||
      y->element_type() != x.element_type() || !find(x.element_type(), g.dtype) || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_gated: shapes or dtypes don't go together");
  g.width = xs[2], g.is_gelu = is_gelu;
  const int64_t tokens = used_rows(num_rows, xs[0]);
  each_token(pool, tokens, xs[2], [&](int64_t token) { kernels().gate(g, token); });
  return ffi::Error::Success();
}

// Without `added`, which is empty then, `sum` is, too.
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer added, ffi::AnyBuffer scale, NumRows num_rows,
                    ffi::Result<ffi::AnyBuffer> sum, ffi::Result<ffi::AnyBuffer> y, float eps, bool unit_offset,
                    bool scales_first) {
  const auto xs = x.dimensions();
  const size_t size = added.element_count();
  RmsNorm r{x.untyped_data(), size ? added.untyped_data() : nullptr, scale.untyped_data(), y->untyped_data(),
            size ? sum->untyped_data() : nullptr};
  if (xs.size() != 2 || (size && size != x.element_count()) || sum->element_count() != size ||
      y->element_count() != x.element_count() || static_cast<int64_t>(scale.element_count()) != xs[1] ||
      added.element_type() != x.element_type() || sum->element_type() != x.element_type() ||
      y->element_type() != x.element_type() || !find(x.element_type(), r.dtype) ||
      !find(scale.element_type(), r.scale_dtype) || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_rms_norm: shapes or dtypes don't go together");
  r.width = xs[1], r.eps = eps, r.unit_offset = unit_offset, r.scales_first = scales_first;
  const int64_t rows = used_rows(num_rows, xs[0]);
  each_token(pool, rows, xs[1], [&](int64_t row) { kernels().rms_norm(r, row); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_rotate, jaxllm::rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats2D>()
                                  .Arg<Floats2D>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("interleaved"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_gated, jaxllm::gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("is_gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_rms_norm, jaxllm::rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("unit_offset")
                                  .Attr<bool>("scales_first"));
