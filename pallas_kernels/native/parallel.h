// Work divided among a team of threads and the calling one. XLA's pool says how many; its own threads sleep between two
// products, and waking one costs what a small product takes.
#pragma once

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxllm {

// The processors on which a job's threads run, one each: Linux may have two threads on one though another is idle, and parts
// them only milliseconds later, when most products are over.
class Processors {
 public:
  // Of the calling thread alone.
  void restart() {
#if defined(__linux__)
    std::lock_guard<std::mutex> lock(mutex_);
    CPU_ZERO(&taken_);
    if (const int here = sched_getcpu(); here >= 0 && here < CPU_SETSIZE) CPU_SET(here, &taken_);
#endif
  }

  // Of the calling thread too, which moves to another one if a thread of the job has this one.
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

// A thread of a team. As it may wake on the processor of the one that wakes it, and get no turn there, that one bars it from
// there for the moment.
class Helper {
 public:
  std::atomic<bool> is_asleep{false};

  void begin() {
#if defined(__linux__)
    thread_ = static_cast<pid_t>(syscall(SYS_gettid));
#endif
  }

  // By the one that is about to wake it.
  void bar() {
#if defined(__linux__)
    std::lock_guard<std::mutex> lock(mutex_);
    cpu_set_t allowed;
    const int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE || thread_ == 0 || barred_ >= 0) return;
    if (sched_getaffinity(thread_, sizeof allowed, &allowed) != 0 || !CPU_ISSET(here, &allowed)) return;
    CPU_CLR(here, &allowed);
    if (CPU_COUNT(&allowed) == 0 || sched_setaffinity(thread_, sizeof allowed, &allowed) != 0) return;
    barred_ = here;
#endif
  }

  // By itself: it may run there again.
  void unbar() {
#if defined(__linux__)
    std::lock_guard<std::mutex> lock(mutex_);
    cpu_set_t allowed;
    if (barred_ < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    CPU_SET(barred_, &allowed);
    sched_setaffinity(0, sizeof allowed, &allowed);
    barred_ = -1;
#endif
  }

#if defined(__linux__)
 private:
  std::atomic<pid_t> thread_{0};
  std::mutex mutex_;  // or one of the two would write a set of processors that the other has changed meanwhile
  int barred_ = -1;
#endif
};

// Waits for what another thread is about to do: at first it does nothing else, then lets others run; false once it has
// waited long enough to sleep.
class Patience {
 public:
  bool wait() {
    if (++turns_ <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("isb");  // some tens of cycles, which `yield` does not take
#endif
      return true;
    }
    if (turns_ == kSpins + 1) end_ = std::chrono::steady_clock::now() + kYielding;
    std::this_thread::yield();
    return std::chrono::steady_clock::now() < end_;
  }

 private:
  static constexpr int kSpins = 1000;  // some tens of microseconds: less than waking up costs
  static constexpr std::chrono::microseconds kYielding{200};  // most of what lies between two products, or two steps

  int turns_ = 0;
  std::chrono::steady_clock::time_point end_;
};

// Threads that wait for the next job: busily for a while, as there are hundreds in a step, then asleep. Parts of a job are
// claimed, not assigned: the caller works through all that nobody else has begun, and waits only for those that someone
// has. So it does without the others where they have no processor, or are not there, as in a forked process.
class Team {
 public:
  static Team& get() {
    static Team& team = *new Team;  // its threads outlive whatever ends a process
    return team;
  }

  // Calls work(0) to work(parts - 1) in any order on at most `threads` threads, and returns when all have returned. A
  // caller that finds the team at another one's work does its own alone.
  template <class Work>
  void run(int64_t threads, int64_t parts, const Work& work) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) {
      for (int64_t part = 0; part < parts; part++) work(part);
      return;
    }
    while (static_cast<int64_t>(helpers_.size()) + 1 < threads) {
      Helper& helper = helpers_.emplace_back();
      std::thread([this, &helper] { help(helper); }).detach();
    }
    processors_.restart();
    call_ = [](const void* work, int64_t part) { (*static_cast<const Work*>(work))(part); };
    work_ = &work, parts_ = parts;
    next_ = done_ = 0;
    is_open_ = true;
    if (sleeping_.count > 0)
      for (Helper& helper : helpers_)
        if (helper.is_asleep) helper.bar();
    number_++;
    wake(sleeping_);
    take_parts();
    is_open_ = false;
    wait_for(caller_, [this] { return done_ == parts_ && inside_ == 0; });
  }

 private:
  void take_parts() {
    for (int64_t part; (part = next_++) < parts_;) {
      call_(work_, part);
      done_++;
    }
  }

  // By a thread of the team, for ever.
  void help(Helper& self) {
    self.begin();
    for (int64_t last = 0;;) {
      wait_for(sleeping_, [&] { return number_ != last; }, &self.is_asleep);
      self.unbar();
      inside_++;  // before it looks: the caller closes the job, and then awaits those inside
      last = number_;
      if (is_open_ && next_ < parts_) {
        processors_.take();
        take_parts();
      }
      inside_--;
      wake(caller_);
    }
  }

  struct Sleepers {
    std::atomic<int> count{0};
    std::condition_variable woken;
  };

  void wake(Sleepers& sleepers) {
    if (sleepers.count == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    sleepers.woken.notify_all();
  }

  template <class Is>
  void wait_for(Sleepers& sleepers, const Is& is, std::atomic<bool>* is_asleep = nullptr) {
    for (Patience patience; !is();) {
      if (patience.wait()) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      if (is_asleep) *is_asleep = true;
      sleepers.count++;
      sleepers.woken.wait(lock, is);
      sleepers.count--;
      if (is_asleep) *is_asleep = false;
      return;
    }
  }

  std::mutex turn_;  // of the callers
  std::deque<Helper> helpers_;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  std::atomic<int64_t> parts_{0}, next_{0}, done_{0}, number_{0};
  std::atomic<int> inside_{0};
  std::atomic<bool> is_open_{false};
  std::mutex mutex_;
  Sleepers caller_, sleeping_;
  Processors processors_;
};

// How many of an array's rows belong to tokens of a step. What comes behind is padding, of which results are left as they
// were. Empty: all do.
using NumRows = xla::ffi::Buffer<xla::ffi::S32, 1>;

inline bool is_one_or_none(const NumRows& num_rows) { return num_rows.element_count() <= 1; }

inline int64_t used_rows(const NumRows& num_rows, int64_t rows) {
  return num_rows.element_count() == 0 ? rows : std::clamp<int64_t>(num_rows.typed_data()[0], 0, rows);
}

// Calls work(0) to work(parts - 1), in any order and from several threads, and returns when all have returned.
template <class Work>
void parallel(xla::ffi::ThreadPool& pool, int64_t parts, const Work& work) {
  const int64_t threads = pool.num_threads();
  if (parts > 1 && threads > 1) return Team::get().run(threads, parts, work);
  for (int64_t part = 0; part < parts; part++) work(part);
}

}  // namespace jaxllm
