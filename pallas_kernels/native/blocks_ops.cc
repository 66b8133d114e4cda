// Copies of whole blocks within a pool, in place.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Moves = ffi::Buffer<ffi::S32, 2>;

namespace jaxllm {
namespace {

constexpr int64_t kPieceBytes = 16 << 10;  // that one part copies

using Copies = std::vector<std::pair<const char*, char*>>;

void copy_all(ffi::ThreadPool& pool, const Copies& copies, int64_t bytes) {
  const int64_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  parallel(pool, copies.size() * pieces, [&](int64_t i) {
    const auto [from, to] = copies[i / pieces];
    const int64_t at = i % pieces * kPieceBytes;
    std::memcpy(to + at, from + at, std::min(kPieceBytes, bytes - at));
  });
}

// `moves` is [2, n]: what is in block moves[0][i] also goes to moves[1][i]; ids outside of the pool are padding. All
// blocks are read before one is written.
ffi::Error copy_blocks(ffi::ThreadPool threads, ffi::AnyBuffer pool, Moves moves, ffi::Result<ffi::AnyBuffer> result) {
  char* const blocks = static_cast<char*>(result->untyped_data());
  if (blocks != pool.untyped_data() || !pool.element_count() || moves.dimensions()[0] != 2)
    return ffi::Error::InvalidArgument("jaxllm_copy_blocks: the pool must be aliased to the result, moves be [2, n]");
  const int64_t num_blocks = pool.dimensions()[0], n = moves.dimensions()[1];
  const int64_t bytes = static_cast<int64_t>(pool.size_bytes()) / num_blocks;
  const int32_t *sources = moves.typed_data(), *targets = sources + n;
  const auto inside = [&](int32_t block) { return block >= 0 && block < num_blocks; };
  Copies copies;
  bool overlap = false;
  for (int64_t i = 0; i < n; i++)
    if (inside(sources[i]) && inside(targets[i])) {
      copies.emplace_back(blocks + sources[i] * bytes, blocks + targets[i] * bytes);
      overlap = overlap || std::find(sources, sources + n, targets[i]) != sources + n;
    }
  std::unique_ptr<char[]> staged;
  if (overlap) {
    staged.reset(new char[copies.size() * bytes]);
    Copies first;
    for (size_t i = 0; i < copies.size(); i++) {
      char* const at = staged.get() + i * bytes;
      first.emplace_back(copies[i].first, at);
      copies[i].first = at;
    }
    copy_all(threads, first, bytes);
  }
  copy_all(threads, copies, bytes);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_copy_blocks, jaxllm::copy_blocks,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Moves>()
                                  .Ret<ffi::AnyBuffer>());
