// The kernels for CPUs that sum four products of int8 at once and lack bfloat16: those of JAXLLM_BASE but for products with
// a weight in panels. Compiled once per instruction set that has those: JAXLLM_ISA names it.
#include "kernels.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#include "panels.h"
#if defined(__aarch64__)
#include "arm.h"
#else
#include <cpuid.h>
#endif

namespace jaxllm {

static bool is_supported() {
#if defined(__aarch64__)
  return has_dotprod();
#elif defined(__AVX512VNNI__)
  return __builtin_cpu_supports("avx512vnni");
#else
  unsigned a, b, c, d;
  constexpr unsigned kAvxVnniBit = 1u << 4;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnniBit);
#endif
}

const Kernels* JAXLLM_KERNELS() {
  static const Kernels kernels = [] {
    Kernels own = JAXLLM_BASE;
    own.name = JAXLLM_ISA_NAME, own.round_row = JAXLLM_ISA::round_row, own.panel_gemm = JAXLLM_ISA::panel_gemm;
    return own;
  }();
  static const bool has_them = is_supported();
  return has_them ? &kernels : nullptr;
}

}  // namespace jaxllm

#else

namespace jaxllm {

const Kernels* JAXLLM_KERNELS() { return nullptr; }

}  // namespace jaxllm

#endif
