// Sends the same frames to several sockets, in order, in a thread of its own: who hands over a frame waits for no system
// call but the one that wakes the thread, and a socket whose other side reads nothing keeps no other one waiting.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // Python ignores SIGPIPE
#endif

namespace {

struct Link {
  int socket;
  int64_t frame = 0;  // that it is sent next
  size_t sent = 0;    // bytes of that frame
  bool is_full = false;
  int error = 0;  // with which sending has failed, for good
};

class Sender {
 public:
  Sender(const int32_t* sockets, int32_t count) {
    for (int32_t i = 0; i < count; ++i) links_.push_back(Link{sockets[i]});
    if (pipe(wake_) != 0) {
      wake_[0] = wake_[1] = -1;
      return;
    }
    for (int end : wake_) {
      fcntl(end, F_SETFL, O_NONBLOCK);
      fcntl(end, F_SETFD, FD_CLOEXEC);
    }
    thread_ = std::thread(&Sender::run, this);
  }

  ~Sender() {
    if (thread_.joinable()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
      }
      wake();
      thread_.join();
    }
    for (int end : wake_) {
      if (end >= 0) close(end);
    }
  }

  bool works() const { return thread_.joinable(); }

  int64_t push(const char* data, int64_t bytes) {
    std::string frame(data, bytes);
    bool sleeps = false;
    int64_t waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (bytes > 0) {
        frames_.push_back(std::move(frame));
        std::swap(sleeps, sleeps_);
      }
      waiting = waiting_ += bytes;
    }
    if (sleeps) wake();
    return waiting;
  }

  int error(int32_t link) {
    std::lock_guard<std::mutex> lock(mutex_);
    return links_[link].error;
  }

  void flush(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    emptied_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return frames_.empty(); });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ends_) {
      bool has_moved = false;
      for (Link& link : links_) has_moved |= advance(link, lock);
      drop();
      if (!has_moved) sleep(lock);
    }
  }

  // Sends a piece of the link's next frame; whether there was one, and room for it. New frames may come meanwhile, but
  // only this thread takes them away.
  bool advance(Link& link, std::unique_lock<std::mutex>& lock) {
    if (link.error != 0 || link.is_full || link.frame == first_ + static_cast<int64_t>(frames_.size())) return false;
    const std::string& frame = frames_[link.frame - first_];
    lock.unlock();
    const ssize_t count =
        send(link.socket, frame.data() + link.sent, frame.size() - link.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    const int error = errno;
    lock.lock();
    if (count >= 0) {
      link.sent += count;
      if (link.sent == frame.size()) {
        link.sent = 0;
        ++link.frame;
      }
    } else if (error == EAGAIN || error == EWOULDBLOCK) {
      link.is_full = true;
    } else if (error != EINTR) {
      link.error = error;
    }
    return !link.is_full;
  }

  // Frees frames that all links have that still take any.
  void drop() {
    int64_t needed = first_ + static_cast<int64_t>(frames_.size());
    for (const Link& link : links_) {
      if (link.error == 0 && link.frame < needed) needed = link.frame;
    }
    for (; first_ < needed; ++first_) {
      waiting_ -= frames_.front().size();
      frames_.pop_front();
    }
    if (frames_.empty()) emptied_.notify_all();
  }

  // Until there is a new frame, or room in a socket that had none.
  void sleep(std::unique_lock<std::mutex>& lock) {
    std::vector<pollfd> polled{{wake_[0], POLLIN, 0}};
    for (const Link& link : links_) {
      if (link.is_full) polled.push_back({link.socket, POLLOUT, 0});
    }
    sleeps_ = true;
    lock.unlock();
    poll(polled.data(), polled.size(), -1);
    char drained[16];
    while (read(wake_[0], drained, sizeof drained) > 0) {
    }
    lock.lock();
    sleeps_ = false;
    for (Link& link : links_) link.is_full = false;
  }

  void wake() {
    const char one = 1;
    while (write(wake_[1], &one, 1) < 0 && errno == EINTR) {
    }
  }

  std::mutex mutex_;
  std::condition_variable emptied_;
  std::deque<std::string> frames_;  // that not every link has; references stay valid while others are added
  std::vector<Link> links_;
  int64_t first_ = 0;    // the number of the first of `frames_`
  int64_t waiting_ = 0;  // bytes of `frames_`
  bool sleeps_ = false, ends_ = false;
  int wake_[2];
  std::thread thread_;
};

}  // namespace

extern "C" {

// Null if there is no thread or pipe to be had. The sockets are to stay open until `jaxllm_sender_close`.
void* jaxllm_sender_open(const int32_t* sockets, int32_t count) {
  Sender* sender = new Sender(sockets, count);
  if (sender->works()) return sender;
  delete sender;
  return nullptr;
}

// How many bytes of frames there are now that not every socket has.
int64_t jaxllm_sender_push(void* sender, const char* data, int64_t bytes) {
  return static_cast<Sender*>(sender)->push(data, bytes);
}

// The errno with which sending to a socket has failed; 0 if it has not.
int32_t jaxllm_sender_error(void* sender, int32_t link) { return static_cast<Sender*>(sender)->error(link); }

// Waits until every socket has every frame or has failed, so many seconds at the most, and ends the thread.
void jaxllm_sender_close(void* sender, double seconds) {
  static_cast<Sender*>(sender)->flush(seconds);
  delete static_cast<Sender*>(sender);
}
}
