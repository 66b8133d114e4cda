// Ragged paged attention: an online softmax (arXiv 1805.02867) over the blocks of a sequence, where they lie.
#pragma once

#include "narrow_attention.h"
#include "wide_attention.h"

namespace jaxllm::JAXLLM_ISA {

template <class T, class Pool>
static void attend_as(const Attention& a, const AttentionTile& tile, const AttentionTile* next, float* scratch) {
  Running run;
  run.q = scratch;
  run.sums = run.q + kTileRows * a.head_dim;
  run.weights = run.sums + kTileRows * a.head_dim;
  run.keys = run.weights + kKeys * kTileRows;
  run.pairs = run.keys + kKeys * a.head_dim;
  run.top = run.pairs + kKeys / 2 * kTileRows;
  run.total = run.top + kTileRows;
  run.rescale = run.total + kTileRows;
  int32_t position[kTileRows];
  run.position = position;
  run.rows = tile.end - tile.begin;
  run.narrow = run.rows <= kFewRows || a.batch_invariant;
  run.paired = kHasPairs && std::is_same_v<T, Bf16> && std::is_same_v<Pool, Bf16> && !run.narrow &&
               a.head_dim % kWidth == 0 && a.block_size % 2 == 0;
  run.filled = run.narrow ? (run.rows + kWidth - 1) / kWidth * kWidth : kTileRows;
  begin_tile<T>(a, tile, run);
  run.last_key = last_key(a, tile, run);
  const int64_t oldest = first_key(a, tile);
  for (int64_t key = run.paired ? oldest - oldest % 2 : oldest; key <= run.last_key;) {
    const Group<Pool> group = group_of<Pool>(a, tile, key, run.last_key);
    if (run.narrow)
      attend_narrow(a, tile, next, run, group);
    else
      attend_wide(a, tile, run, group);
    key = group.base + group.end;
  }
  end_tile<T>(a, tile, run);
}

static void attend(const Attention& a, const AttentionTile& tile, const AttentionTile* next, float* scratch) {
  with_types(a, [&](auto t, auto pool) {
    attend_as<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(pool)>>(a, tile, next, scratch);
  });
}

}  // namespace jaxllm::JAXLLM_ISA
