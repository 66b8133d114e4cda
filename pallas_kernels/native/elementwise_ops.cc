// The custom calls of what lies between products: they check shapes and divide tokens among threads.
#include <algorithm>
#include <cstring>

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

// Sets `r` to the angles of heads x[tokens, ..., head_dim]; false if they don't go together.
bool find(const ffi::AnyBuffer& x, const Floats2D& sin, const Floats2D& cos, bool interleaved, Rotation& r) {
  const auto xs = x.dimensions(), ss = sin.dimensions();
  r.sin = sin.typed_data(), r.cos = cos.typed_data();
  r.head_dim = xs.back(), r.pairs = ss[1], r.interleaved = interleaved;
  return ss[0] == xs[0] && 2 * ss[1] <= xs.back() && cos.element_count() == sin.element_count() &&
         find(x.element_type(), r.dtype);
}

int64_t size_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats2D sin, Floats2D cos, NumRows num_rows,
                  ffi::Result<ffi::AnyBuffer> y, bool interleaved) {
  const auto xs = x.dimensions();
  Rotation r{};
  if (xs.size() != 3 || !find(x, sin, cos, interleaved, r) || y->element_count() != x.element_count() ||
      y->element_type() != x.element_type() || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_rotate: shapes or dtypes don't go together");
  const int64_t tokens = used_rows(num_rows, xs[0]), bytes = xs[1] * xs[2] * size_of(r.dtype);
  each_token(pool, tokens, xs[1] * xs[2], [&](int64_t token) {
    const int64_t at = token * bytes;
    kernels().rotate(r, token, static_cast<char*>(x.untyped_data()) + at, static_cast<char*>(y->untyped_data()) + at, xs[1]);
  });
  return ffi::Error::Success();
}

// Of qkv [tokens, kv_heads, group + 2, head_dim]: queries and keys, rotated, and values, each by themselves.
ffi::Error rotate_qkv(ffi::ThreadPool pool, ffi::AnyBuffer qkv, Floats2D sin, Floats2D cos, NumRows num_rows,
                      ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v,
                      bool interleaved) {
  const auto xs = qkv.dimensions();
  Rotation r{};
  const auto dtype = qkv.element_type();
  if (xs.size() != 4 || xs[2] < 3 || !find(qkv, sin, cos, interleaved, r) || q->element_type() != dtype ||
      k->element_type() != dtype || v->element_type() != dtype || !is_one_or_none(num_rows) ||
      static_cast<int64_t>(k->element_count()) != xs[0] * xs[1] * xs[3] || v->element_count() != k->element_count() ||
      q->element_count() + 2 * k->element_count() != qkv.element_count())
    return ffi::Error::InvalidArgument("jaxllm_rotate_qkv: shapes or dtypes don't go together");
  const int64_t kv_heads = xs[1], group = xs[2] - 2, head = xs[3] * size_of(r.dtype);
  each_token(pool, used_rows(num_rows, xs[0]), kv_heads * xs[2] * xs[3], [&](int64_t token) {
    for (int64_t i = token * kv_heads; i < (token + 1) * kv_heads; i++) {
      const char* const from = static_cast<const char*>(qkv.untyped_data()) + i * xs[2] * head;
      kernels().rotate(r, token, from, static_cast<char*>(q->untyped_data()) + i * group * head, group);
      kernels().rotate(r, token, from + group * head, static_cast<char*>(k->untyped_data()) + i * head, 1);
      std::memcpy(static_cast<char*>(v->untyped_data()) + i * head, from + (group + 1) * head, head);
    }
  });
  return ffi::Error::Success();
}

ffi::Error gated(ffi::ThreadPool pool, ffi::AnyBuffer x, NumRows num_rows, ffi::Result<ffi::AnyBuffer> y,
                 bool is_gelu) {
  const auto xs = x.dimensions();
  DType dtype;
  if (xs.size() != 3 || xs[1] != 2 || 2 * y->element_count() != x.element_count() ||
      y->element_type() != x.element_type() || !find(x.element_type(), dtype) || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_gated: shapes or dtypes don't go together");
  const Gated g{xs[2], is_gelu, dtype, dtype};
  const int64_t row = xs[2] * size_of(dtype);
  each_token(pool, used_rows(num_rows, xs[0]), xs[2], [&](int64_t token) {
    const char* const gate = static_cast<const char*>(x.untyped_data()) + 2 * token * row;
    kernels().gate(g, gate, gate + row, static_cast<char*>(y->untyped_data()) + token * row);
  });
  return ffi::Error::Success();
}

ffi::Error add(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer added, NumRows num_rows,
               ffi::Result<ffi::AnyBuffer> y) {
  const auto xs = x.dimensions();
  Sum s{x.untyped_data(), added.untyped_data(), y->untyped_data()};
  if (xs.size() != 2 || added.element_count() != x.element_count() || y->element_count() != x.element_count() ||
      added.element_type() != x.element_type() || y->element_type() != x.element_type() ||
      !find(x.element_type(), s.dtype) || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_add: shapes or dtypes don't go together");
  s.width = xs[1];
  each_token(pool, used_rows(num_rows, xs[0]), xs[1], [&](int64_t row) { kernels().add(s, row); });
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_rotate_qkv, jaxllm::rotate_qkv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats2D>()
                                  .Arg<Floats2D>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("interleaved"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_gated, jaxllm::gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("is_gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_add, jaxllm::add,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>());

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
