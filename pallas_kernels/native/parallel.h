// Work divided among the threads of XLA's pool and the calling one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jaxllm {

// Parts are claimed, not assigned: the caller, which may itself be a thread of the pool, works through all that no other
// thread has begun, and waits only for those that one has. So a busy pool costs time but can't block.
template <class Work>
class Job {
 public:
  Job(const Work* work, int64_t parts) : work_(work), parts_(parts) {}

  void run() {
    for (int64_t part; (part = next_.fetch_add(1)) < parts_;) {
      (*work_)(part);
      if (done_.fetch_add(1) + 1 == parts_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
      }
    }
  }

  void wait() {
    for (int i = 0; i < kSpins; i++) {
      if (done_.load() == parts_) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() == parts_; });
  }

 private:
  static constexpr int kSpins = 2000;  // some tens of microseconds: less than waking up costs

  const Work* const work_;  // the caller's; not touched once all parts are claimed
  const int64_t parts_;
  std::atomic<int64_t> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

// Calls work(0) to work(parts - 1), in any order and from several threads, and returns when all have returned.
template <class Work>
void parallel(xla::ffi::ThreadPool& pool, int64_t parts, const Work& work) {
  const int64_t threads = pool.num_threads();
  if (parts <= 1 || threads <= 1) {
    for (int64_t part = 0; part < parts; part++) work(part);
    return;
  }
  auto job = std::make_shared<Job<Work>>(&work, parts);
  for (int64_t i = 1; i < threads && i < parts; i++) pool.Schedule([job] { job->run(); });
  job->run();
  job->wait();
}

}  // namespace jaxllm
