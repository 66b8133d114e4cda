// The custom calls of sampling: they check shapes, and divide the rows among threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Floats1D = ffi::Buffer<ffi::F32, 1>;
using Floats2D = ffi::Buffer<ffi::F32, 2>;
using Ints1D = ffi::Buffer<ffi::S32, 1>;
using Ints2D = ffi::Buffer<ffi::S32, 2>;
using Words2D = ffi::Buffer<ffi::U32, 2>;

namespace jaxllm {
namespace {

// Nanoseconds, about: for a float that is read, that may win a draw, or that is compared in a search for the best.
constexpr double kReadTime = 0.1, kDrawTime = 1.0, kSearchTime = 0.5;
constexpr double kPartTime = 40e3;  // of a part at least, or it isn't worth waking a thread

// Calls work(row, scratch) for every row.
template <class Work>
void each_row(ffi::ThreadPool& pool, int64_t rows, double time, int64_t scratch_floats, const Work& work) {
  const int64_t most = std::min<int64_t>(rows, 2 * std::max<int64_t>(pool.num_threads(), 1));
  const int64_t parts = std::clamp<int64_t>(time / kPartTime, 1, std::max<int64_t>(most, 1));
  parallel(pool, parts, [&](int64_t part) {
    thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < scratch_floats) scratch.resize(scratch_floats);
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) work(row, scratch.data());
  });
}

ffi::Error normalize(ffi::ThreadPool pool, Floats2D logits, NumRows num_rows, ffi::Result<Floats1D> top,
                     ffi::Result<Floats1D> normalizer) {
  const int64_t all = logits.dimensions()[0], vocab = logits.dimensions()[1];
  if (top->dimensions()[0] != all || normalizer->dimensions()[0] != all || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_normalize: shapes don't go together");
  const int64_t rows = used_rows(num_rows, all);
  const Rows r{logits.typed_data(), top->typed_data(), normalizer->typed_data(), vocab};
  each_row(pool, rows, rows * vocab * kSearchTime, 0, [&](int64_t row, float*) { kernels().normalize(r, row); });
  return ffi::Error::Success();
}

ffi::Error draw(ffi::ThreadPool pool, Floats2D logits, Floats1D temperature, Ints1D top_k, Floats1D top_p,
                Floats1D at_least, Words2D keys, ffi::Result<Ints1D> tokens, ffi::Result<Floats1D> top,
                bool partitionable) {
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  for (const auto& size : {temperature.dimensions()[0], top_k.dimensions()[0], top_p.dimensions()[0],
                           at_least.dimensions()[0], keys.dimensions()[0], tokens->dimensions()[0],
                           top->dimensions()[0]})
    if (size != rows) return ffi::Error::InvalidArgument("jaxllm_draw: numbers of rows differ");
  if (keys.dimensions()[1] != 2) return ffi::Error::InvalidArgument("jaxllm_draw: keys have two words");
  const Draw d{logits.typed_data(), temperature.typed_data(), top_p.typed_data(), at_least.typed_data(),
               top_k.typed_data(), keys.typed_data(), tokens->typed_data(), top->typed_data(), vocab, partitionable};
  const int64_t random = std::count_if(d.temperature, d.temperature + rows, [](float t) { return t > 0; });
  const double time = (rows * kReadTime + random * kDrawTime) * vocab;
  each_row(pool, rows, time, random ? kernels().draw_floats(vocab) : 0,
           [&](int64_t row, float* scratch) { kernels().draw(d, row, scratch); });
  return ffi::Error::Success();
}

ffi::Error best(ffi::ThreadPool pool, Floats2D scores, Floats2D logits, Ints2D tokens, NumRows num_rows,
                ffi::Result<Ints2D> ids, ffi::Result<Floats2D> found, ffi::Result<Floats2D> own,
                ffi::Result<Ints2D> ranks) {
  const int64_t all = scores.dimensions()[0], vocab = scores.dimensions()[1];
  const int64_t k = ids->dimensions()[1], columns = k + tokens.dimensions()[1];
  const auto has_shape = [all](auto dims, int64_t width) { return dims[0] == all && dims[1] == width; };
  if (!has_shape(logits.dimensions(), vocab) || !has_shape(tokens.dimensions(), columns - k) || k > vocab ||
      !has_shape(ids->dimensions(), k) || !has_shape(found->dimensions(), k) ||
      !has_shape(own->dimensions(), columns) || !has_shape(ranks->dimensions(), columns) || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_best: shapes don't go together");
  const int64_t rows = used_rows(num_rows, all);
  const Best b{scores.typed_data(), logits.typed_data(), tokens.typed_data(), ids->typed_data(), found->typed_data(),
               own->typed_data(), ranks->typed_data(), vocab, k, columns - k};
  each_row(pool, rows, rows * vocab * kSearchTime, kernels().best_floats(vocab, k),
           [&](int64_t row, float* scratch) { kernels().best(b, row, scratch); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_normalize, jaxllm::normalize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats2D>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<Floats1D>()
                                  .Ret<Floats1D>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_draw, jaxllm::draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats2D>()
                                  .Arg<Floats1D>()
                                  .Arg<Ints1D>()
                                  .Arg<Floats1D>()
                                  .Arg<Floats1D>()
                                  .Arg<Words2D>()
                                  .Ret<Ints1D>()
                                  .Ret<Floats1D>()
                                  .Attr<bool>("partitionable"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_best, jaxllm::best,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats2D>()
                                  .Arg<Floats2D>()
                                  .Arg<Ints2D>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<Ints2D>()
                                  .Ret<Floats2D>()
                                  .Ret<Floats2D>()
                                  .Ret<Ints2D>());
