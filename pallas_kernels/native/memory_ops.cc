// Memory of the host: zeros that cost nothing until they are written.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxllm {
namespace {

constexpr int64_t kLeast = 4 << 20;  // bytes from which it is worth a system call

uintptr_t page_bytes() {
#if defined(__linux__)
  return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
#else
  return 1;
#endif
}

// Gives whole pages back, so that the next touch of each finds zeros, in huge pages if the system has them. False where
// that is not what happened.
bool drop(char* first, char* last) {
#if defined(__linux__)
  *first = 1;
  *(last - 1) = 1;
  if (madvise(first, last - first, MADV_DONTNEED) != 0) return false;
  madvise(first, last - first, MADV_HUGEPAGE);  // where one fits, or small ones
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
    const uintptr_t page = page_bytes(), beyond = reinterpret_cast<uintptr_t>(begin) % page;
    first = begin + (beyond ? page - beyond : 0);
    last = first + (begin + bytes - first) / page * page;
    if (first == last || !drop(first, last)) first = last = begin;
  }
  std::memset(begin, 0, first - begin);
  std::memset(last, 0, begin + bytes - last);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_zeros, jaxllm::zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
