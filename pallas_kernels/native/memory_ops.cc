// Memory of the host: zeros that cost nothing until they are written.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxllm {
namespace {

constexpr uintptr_t kPage = 2 << 20;      // bytes; of a huge page, hence a multiple of a small one
constexpr int64_t kLeast = 2 * kPage;     // bytes from which it is worth a system call

// Gives whole pages back, so that the next touch of each finds zeros, in huge pages if the system has them. False where
// that is not what happened.
bool drop(char* first, char* last) {
#if defined(__linux__)
  *first = 1;
  *(last - 1) = 1;
  if (madvise(first, last - first, MADV_DONTNEED) != 0) return false;
  madvise(first, last - first, MADV_HUGEPAGE);  // or small ones
  return *first == 0 && *(last - 1) == 0;       // memory that others share too would keep what it held
#else
  return false;
#endif
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> result) {
  char* const begin = static_cast<char*>(result->untyped_data());
  const int64_t bytes = static_cast<int64_t>(result->size_bytes());
  char *first = begin, *last = begin;
  if (bytes >= kLeast) {
    const auto up = [](uintptr_t at) { return (at + kPage - 1) / kPage * kPage; };
    first = begin + (up(reinterpret_cast<uintptr_t>(begin)) - reinterpret_cast<uintptr_t>(begin));
    last = first + (begin + bytes - first) / kPage * kPage;
    if (first == last || !drop(first, last)) first = last = begin;
  }
  std::memset(begin, 0, first - begin);
  std::memset(last, 0, begin + bytes - last);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_zeros, jaxllm::zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
