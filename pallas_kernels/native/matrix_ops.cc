// Dense weights into panels, in the order in which products read them, by many threads in one call, which holds no lock of
// Python's.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels.h"

namespace jaxllm {
namespace {

constexpr int64_t kStripPanels = 32;  // that are written at once: of each row of a weight a page is read,
constexpr int64_t kStripRows = 256;   // for so many rows

// Rows `begin` to `end` of w[k, n], each row a number's bits, to those of panels from `first` to `last`.
template <class T>
void place(const T* w, int64_t k, int64_t n, int64_t begin, int64_t end, int64_t first, int64_t last, T* to) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t panel = first; panel < last; panel++)
      std::memcpy(to + (panel * k + row) * kDensePanel, w + row * n + panel * kDensePanel, kDensePanel * sizeof(T));
}

// Likewise, by pairs of rows.
void place(const Bf16* w, int64_t k, int64_t n, int64_t begin, int64_t end, int64_t first, int64_t last, Bf16* to) {
  for (int64_t row = begin; row < end; row += 2)
    for (int64_t panel = first; panel < last; panel++) {
      const Bf16* const even = w + row * n + panel * kDensePanel;
      const Bf16* const odd = even + n;
      Bf16* const at = to + (panel * k + row) * kDensePanel;
      for (int64_t c = 0; c < kDensePanel; c++) at[2 * c] = even[c], at[2 * c + 1] = odd[c];
    }
}

template <class T>
void to_panels(const T* from, T* to, int64_t matrices, int64_t k, int64_t n, int32_t num_threads) {
  const int64_t panels = n / kDensePanel, across = (panels + kStripPanels - 1) / kStripPanels;
  const int64_t down = (k + kStripRows - 1) / kStripRows, strips = matrices * across * down;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < strips;) {
      const int64_t matrix = i / (across * down), row = i % down * kStripRows, panel = i / down % across * kStripPanels;
      place(from + matrix * k * n, k, n, row, std::min(row + kStripRows, k), panel, std::min(panel + kStripPanels, panels),
            to + matrix * k * n);
    }
  };
  std::vector<std::thread> threads;
  for (int32_t i = 1; i < std::min<int64_t>(num_threads, strips); i++) threads.emplace_back(work);
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace jaxllm

// `matrices` of [k, n], of numbers of 4 bytes or of 2, in panels (see Matrix): by pairs if they are bfloat16. n is a multiple
// of kDensePanel, and k one of 2 by pairs.
extern "C" void jaxllm_put_in_panels(const void* from, void* to, int64_t matrices, int64_t k, int64_t n, int32_t bytes,
                                     int32_t by_pairs, int32_t num_threads) {
  const auto put = [&](auto number) {
    using T = decltype(number);
    jaxllm::to_panels(static_cast<const T*>(from), static_cast<T*>(to), matrices, k, n, num_threads);
  };
  if (by_pairs)
    put(jaxllm::Bf16{});
  else if (bytes == 4)
    put(uint32_t{});
  else
    put(uint16_t{});
}
