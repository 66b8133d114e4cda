// What an Arm CPU has, as its system says.
#pragma once

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jaxllm {

#if defined(__APPLE__)
inline bool has_arm(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}

inline bool has_dotprod() { return has_arm("hw.optional.arm.FEAT_DotProd"); }
inline bool has_bf16() { return has_arm("hw.optional.arm.FEAT_BF16") && has_arm("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
inline bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }          // HWCAP_ASIMDDP
inline bool has_bf16() { return (getauxval(AT_HWCAP2) >> 13 & 3) == 3; }  // HWCAP2_I8MM and HWCAP2_BF16
#else
inline bool has_dotprod() { return false; }
inline bool has_bf16() { return false; }
#endif

}  // namespace jaxllm
#endif
