// Products with a dense weight that lies in panels, which tiles read as they are: memory has what they need in their order.
#pragma once

#include <algorithm>

#include "gemm_tiles.h"

namespace jaxllm::JAXLLM_ISA {

constexpr int64_t kBytesAhead = 4096;  // from what few rows of x read to what is brought in

// What tiles do beside their work: they bring in what they read next. (See `Ahead`.)
template <class U>
struct Along {
  static constexpr int64_t kUnitBytes = kDensePanel * U::kRows * sizeof(Value<U>);

  const char* at = nullptr;
  int64_t left = 0;
  bool is_seldom = false;

  void move() {
    for (int64_t i = 0; i < kUnitBytes; i += kLine) __builtin_prefetch(at + i, 0, 2);
    at += kUnitBytes;
    left--;
  }
};

// Columns begin to end, which are those of whole tiles. One group of rows goes through a panel at once; several through a
// part of it each, and through as many columns' parts as let the second cache hold their x and y. Tiles of a part bring in the
// part that comes next, each of those side by side some of its rows: as it is there by then, parts may be longer than the first
// cache, and sums are stored more seldom.
template <class U>
static void gemm_by_panels(const Gemm& g, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kVectors * kWidth, kAcross = kDensePanel / kColumns;
  static_assert(kDensePanel % kColumns == 0);
  const int64_t most_units = g.groups == 1 ? g.units() : kManyDepth;
  const int64_t most_depth = most_units * U::kRows, most_columns = std::max<int64_t>(kBlock / most_units / kColumns, 1) * kColumns;
  const auto at = [&](int64_t k, int64_t n) {
    const int64_t bytes = (n / kDensePanel * g.k + k) * kDensePanel * sizeof(Value<U>) + n % kDensePanel * U::kColumn;
    return static_cast<const char*>(g.w) + bytes;
  };
  for (int64_t first = begin; first < end; first += most_columns)
    for (int64_t k = 0; k < g.k; k += most_depth)
      for (int64_t n = first, last = std::min(first + most_columns, end); n < last; n += kColumns) {
        const int64_t depth = std::min(most_depth, g.k - k), units = depth / U::kRows;
        Along<U> ahead{at(k, n) + kBytesAhead, units, false};
        if (g.groups > 1) {
          const int64_t across = n % kDensePanel / kColumns, next = n - across * kColumns + kDensePanel;
          const char* const part = next < last ? at(k, next) : k + depth < g.k ? at(k + depth, first) : at(0, last);
          const bool has_next = next < last || k + depth < g.k || last < end;
          ahead = {part + units / kAcross * across * Along<U>::kUnitBytes, has_next ? units / kAcross : 0,
                   g.groups >= kManyGroups};
        }
        for (int64_t i = 0; i < g.groups; i++) {
          const int64_t row = g.first_row(i), height = g.first_row(i + 1) - row;
          const float* const x = g.x + row * g.units() + k / U::kRows * height;
          const auto multiply = tile_of<kVectors, From::kPanel, U, Along<U>>(height);
          multiply(x, height, at(k, n), 0, g.at(row, n), g.y_step(), depth, k == 0, ahead);
        }
      }
}

}  // namespace jaxllm::JAXLLM_ISA
