// What is compiled once per instruction set, as functions over a part of the work; `ops.cc` divides it.
#pragma once

#include <cstdint>

namespace jaxllm {

enum class DType { kF32, kBf16 };

struct Bf16 {
  uint16_t bits;
};

// y[rows, n] = x[rows, k] @ w, with w [k, n], or [n, k] if transposed. All arrays are dense and row-major.
struct Gemm {
  const float* x;  // [rows, k] if transposed, else [k, rows]: the latter is how the kernel reads it
  const void* w;
  float* y;
  int64_t rows, k, n;
  DType dtype;  // of w
  bool transposed;
};

// Attention of a ragged batch over paged keys and values; reference.py says what the arrays mean.
struct Attention {
  const void *q, *k, *v;  // [tokens, heads or kv_heads, head_dim]
  void* pool;             // [num_blocks, 2, kv_heads, block_size, head_dim]
  void* out;              // [tokens, heads, head_dim]
  const int32_t *block_tables, *cu_q_lens, *kv_lens;
  int64_t heads, kv_heads, head_dim, block_size, blocks_per_seq;
  int64_t window;  // tokens; 0: all
  float scale;
  float soft_cap;  // 0: none
  DType dtype;     // of all arrays
};

// Some query rows of sequence `seq` with one KV head: a token's heads of that KV head are rows one after the other.
struct AttentionTile {
  int64_t seq, begin, end, kv_head;
};

struct Kernels {
  const char* name;
  int64_t columns;  // a Gemm's columns are best divided at multiples of it
  int64_t tile_rows;  // query rows of a tile of attention, at most
  // Columns begin to end of y.
  void (*gemm)(const Gemm&, int64_t begin, int64_t end);
  // Writes K and V of tokens begin to end of sequence `seq`, counted from its first in the batch, into the pool.
  void (*write_kv)(const Attention&, int64_t seq, int64_t begin, int64_t end);
  // `scratch` holds `scratch_floats`.
  void (*attend)(const Attention&, const AttentionTile&, float* scratch);
  int64_t (*scratch_floats)(const Attention&);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

}  // namespace jaxllm
