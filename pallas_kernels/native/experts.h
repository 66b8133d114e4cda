// Products of rows with the weights of experts, which lie one after the other: one list of work for all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "products.h"
#include "weights.h"

namespace jaxllm {

constexpr int64_t kSmallPart = 256;  // columns of those that come last
constexpr int64_t kTileGroups = 20;  // groups of rows, at most, for which an expert's weight is read once

// Some rows of one expert. Its x and y lie where those of the tile's rows do.
struct ExpertTile {
  QuantizedGemm q;
  int64_t first;  // row

  int64_t rows() const { return q.gemm.rows; }
};

// Rows offsets[e] to offsets[e + 1] of x and y for each expert e; of experts without rows there is none.
inline std::vector<ExpertTile> tiles_of(const Weight& weight, const int32_t* offsets, const float* x, float* y) {
  std::vector<ExpertTile> tiles;
  const int64_t most = kTileGroups * kernels().group_rows;
  for (int64_t e = 0; e < weight.experts; e++) {
    const int64_t rows = offsets[e + 1] - offsets[e], count = (rows + most - 1) / most;
    for (int64_t i = 0; i < count; i++) {
      const int64_t first = offsets[e] + rows * i / count;
      ExpertTile tile{weight.of(e), first};
      tile.q.gemm.x = x + first * tile.q.gemm.units(), tile.q.gemm.y = y + first * weight.n();
      const int64_t height = offsets[e] + rows * (i + 1) / count - first;
      take_rows(tile.q.gemm, height, weight.takes_each(height));
      tiles.push_back(tile);
    }
  }
  return tiles;
}

// Copies those rows of `from` that are of tiles of several groups to where they are read, from x on.
template <class T>
void pack_rows(xla::ffi::ThreadPool& pool, const std::vector<ExpertTile>& tiles, const T* from, float* x) {
  struct Group {
    const ExpertTile* tile;
    int64_t index;
  };
  std::vector<Group> groups;
  int64_t size = 0;
  for (const ExpertTile& tile : tiles) {
    if (tile.q.gemm.groups <= 1) continue;
    for (int64_t i = 0; i < tile.q.gemm.groups; i++) groups.push_back({&tile, i});
    size += tile.rows() * tile.q.gemm.k;
  }
  const auto work = [&](int64_t i) {
    const ExpertTile& tile = *groups[i].tile;
    const Gemm& gemm = tile.q.gemm;
    pack(gemm, from + tile.first * gemm.k, x + tile.first * gemm.units(), groups[i].index);
  };
  if (size < kAlonePacked)
    for (size_t i = 0; i < groups.size(); i++) work(i);
  else
    parallel(pool, groups.size(), work);
}

// The product of a tile, whose rows, some of `from`, are copied now if they are a group.
template <class T>
void multiply(const Weight& weight, const ExpertTile& tile, const T* from, int64_t begin, int64_t end) {
  if (tile.q.gemm.groups > 1) return weight.multiply(tile.q, begin, end);
  QuantizedGemm q = tile.q;
  const T* const rows = from + tile.first * q.gemm.k;
  q.gemm.x = as_read(q.gemm, rows);
  if (!q.gemm.x) {
    thread_local std::vector<float> copy;
    const size_t size = tile.rows() * q.gemm.units();
    if (copy.size() < size) copy.resize(size);
    pack(q.gemm, rows, copy.data(), 0);
    q.gemm.x = copy.data();
  }
  weight.multiply(q, begin, end);
}

// Calls work(tile, begin, end) for columns 0 to `columns` of all tiles. The parts take about as long as each other: to
// read a weight costs what it costs to multiply it with a group of rows. Of many, the last are small, so that no thread
// waits long for another.
template <class Work>
void each_part(xla::ffi::ThreadPool& pool, const Weight& weight, const std::vector<ExpertTile>& tiles,
               int64_t columns, const Work& work) {
  struct Part {
    const ExpertTile* tile;
    int64_t begin, end;
  };
  const int64_t step = kernels().columns, reading = kernels().group_rows;
  int64_t total = 0;
  for (const ExpertTile& tile : tiles) total += reading + tile.rows();
  const int64_t wanted = num_parts(pool, columns * tiles.size(), weight.bytes() * tiles.size());
  const size_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const size_t last = threads > 1 && tiles.size() >= 4 * threads ? tiles.size() - threads : tiles.size();
  std::vector<Part> parts;
  for (size_t i = 0; i < tiles.size(); i++) {
    int64_t own = std::max<int64_t>(1, (wanted * (reading + tiles[i].rows()) + total / 2) / total);
    if (i >= last) own = std::max(own, columns / kSmallPart);
    const int64_t width = std::max<int64_t>(1, ((columns + own - 1) / own + step - 1) / step) * step;
    for (int64_t n = 0; n < columns; n += width) parts.push_back({&tiles[i], n, std::min(n + width, columns)});
  }
  parallel(pool, parts.size(), [&](int64_t i) { work(*parts[i].tile, parts[i].begin, parts[i].end); });
}

}  // namespace jaxllm
