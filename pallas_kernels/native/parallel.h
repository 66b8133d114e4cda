// Work divided among the threads of XLA's pool and the calling one.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jaxllm {

// The processors on which a job's threads run, one each: Linux may wake a thread on the processor of the one that woke it,
// though another is idle, and parts them only milliseconds later, when most products are over.
class Processors {
 public:
  // Of the calling thread, which moves to another one if a thread of the job has this one.
  void take() {
#if defined(__linux__)
    std::lock_guard<std::mutex> lock(mutex_);
    const int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE) return;
    if (!CPU_ISSET(here, &taken_)) {
      CPU_SET(here, &taken_);
      return;
    }
    cpu_set_t allowed, shared, rest;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    CPU_AND(&shared, &allowed, &taken_);
    CPU_XOR(&rest, &allowed, &shared);
    if (CPU_COUNT(&rest) == 0 || sched_setaffinity(0, sizeof rest, &rest) != 0) return;
    const int there = sched_getcpu();
    if (there >= 0 && there < CPU_SETSIZE) CPU_SET(there, &taken_);
    sched_setaffinity(0, sizeof allowed, &allowed);  // it may move again, but has no reason to
#endif
  }

#if defined(__linux__)
 private:
  std::mutex mutex_;
  cpu_set_t taken_{};
#endif
};

// Parts are claimed, not assigned: the caller, which may itself be a thread of the pool, works through all that no other
// thread has begun, and waits only for those that one has. So a busy pool costs time but can't block.
template <class Work>
class Job {
 public:
  Job(const Work* work, int64_t parts) : work_(work), parts_(parts) { processors_.take(); }

  // By a thread other than the caller.
  void help() {
    if (next_.load() >= parts_) return;  // too late
    processors_.take();
    run();
  }

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
  Processors processors_;
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
  for (int64_t i = 1; i < threads && i < parts; i++) pool.Schedule([job] { job->help(); });
  job->run();
  job->wait();
}

}  // namespace jaxllm
