// Jobs of several callers at once on the threads that kernels share, with pauses after which these sleep: what
// .ci/sanitizers runs under ThreadSanitizer. Each part of a job is done once, and seen by the caller.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "parallel.h"

namespace ffi = xla::ffi;

constexpr int kCallers = 3, kJobs = 2000, kThreads = 4;

static XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = kThreads;
  return nullptr;
}

int main() {
  XLA_FFI_Api api{};
  api.XLA_FFI_ThreadPool_NumThreads = num_threads;
  std::atomic<int> faults{0};
  const auto call = [&](int caller) {
    ffi::DiagnosticEngine diagnostic;
    auto pool = ffi::CtxDecoding<ffi::ThreadPool>::Decode(&api, nullptr, diagnostic);
    for (int job = 0; job < kJobs; job++) {
      std::vector<int> counts((caller + job) % 17);
      jaxllm::parallel(*pool, counts.size(), [&](int64_t part) { counts[part]++; });
      for (int count : counts) faults += count != 1;
      if (job % 64 == caller) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  std::vector<std::thread> callers;
  for (int caller = 1; caller < kCallers; caller++) callers.emplace_back(call, caller);
  call(0);
  for (std::thread& caller : callers) caller.join();
  call(0);  // alone
  std::printf("%d jobs, %d faults\n", (kCallers + 1) * kJobs, faults.load());
  return faults != 0;
}
