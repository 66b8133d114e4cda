// The kernels for CPUs with AMX: those of avx512_bf16 but for products and attention of bfloat16.
#include "kernels.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define JAXLLM_ISA amx
#include "tiled_attention.h"
#include "tiles.h"

namespace jaxllm {

// Whether this CPU has AMX, and the system lets this process use it from now on.
static bool is_amx_allowed() {
  constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24, kOsXsave = 1u << 27;
  constexpr unsigned kTileStates = 3u << 17;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (kBf16Bit | kTileBit))) return false;
  unsigned enabled, high;
  __asm__("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  if (~enabled & kTileStates) return false;
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM; for all threads of the process
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    Kernels own = kAvx512Bf16;
    own.name = "amx", own.reads_rows = true, own.gemm = amx::multiply_by_tiles;
    own.attend = amx::attend_by_tiles, own.scratch_floats = amx::tiled_scratch_floats;
    return own;
  }();
  static const bool is_allowed = is_amx_allowed();
  return is_allowed ? &kernels : nullptr;
}

}  // namespace jaxllm

#else

namespace jaxllm {

const Kernels* amx_kernels() { return nullptr; }

}  // namespace jaxllm

#endif
