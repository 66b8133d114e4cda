// What is compiled once per instruction set, as functions over a part of the work; `ops.cc` divides it.
#pragma once

#include <cstdint>

namespace jaxllm {

enum class DType { kF32, kBf16, kF16, kInt8, kFloat8 };

struct Bf16 {
  uint16_t bits;
};

struct Half {  // float16, which only weights are
  uint16_t bits;
};

constexpr int64_t kDensePanel = 32;  // columns of a panel of a dense weight

// y[rows, n] = x[rows, k] @ w, with w [k, n], or [n, k] if transposed. All arrays are dense and row-major.
struct Gemm {
  const float* x;  // a [units, height] for each group of rows, as the kernel reads it; without groups [rows, units]
  const void* w;
  float* y;
  int64_t rows, k, n;
  int64_t groups;  // of rows, as even as they can be; 0: none
  DType dtype;  // of w
  bool transposed;
  bool pairs = false;  // x is in bfloat16, and two numbers of a row, one a zero if k is odd, take the place of a float
  bool in_panels = false;

  int64_t first = 0, ldy = 0;  // the column that y begins with, and floats from a row of y to the next one (0: n)

  int64_t y_step() const { return ldy ? ldy : n; }
  float* at(int64_t row, int64_t column) const { return y + (row * y_step() + column - first); }

  int64_t units() const { return pairs ? (k + 1) / 2 : k; }  // of a row of x

  int64_t first_row(int64_t group) const { return rows * group / groups; }
};

enum class Code { kInt8, kF8, kInt4, kUint4, kF4 };    // as quantized_matmul/panels.py counts them,
enum class Scale { kF32, kBf16, kF16, kF8, kPower };  // and these

inline int64_t bits_of(Code code) { return code == Code::kInt8 || code == Code::kF8 ? 8 : 4; }

inline int64_t bytes_of(Scale scale) {
  return scale == Scale::kF32 ? 4 : scale == Scale::kBf16 || scale == Scale::kF16 ? 2 : 1;
}

constexpr int64_t kDotRows = 31;    // of a transposed Gemm: up to here there are no groups,
constexpr int64_t kDirectRows = 4;  // and of a QuantizedGemm by output

// A Gemm whose w is (codes * scales + offsets) * outer. By group, codes are [k, n], scales and offsets [k / group, n]. By
// output, codes are [n, k], scales [n], and there are no offsets.
struct QuantizedGemm {
  Gemm gemm;             // its w, dtype and transposed say nothing
  bool by_output;
  const uint8_t* codes;  // of 4 bits: two a byte, the low bits first
  const void* scales;
  const float *offsets, *outer;  // or null; outer is [n]
  int64_t group;           // by output: k
  Code code;
  Scale scale;
};

constexpr int64_t kPanel = 16;  // columns of a panel

// Rows that are rounded to int8 part by part.
struct Int8Rows {
  int8_t* x;        // [rows, k]
  float* scales;    // [rows, parts]
  int32_t* starts;  // [rows, parts]: what a part's sum of products with codes begins with
  float* offsets;   // [rows, groups]: what the offsets of a group are multiplied by
};

// y[rows, n] = rows[rows, k] @ w, with w [k, n] in panels, see panels.h: (codes * scales + offsets) * outer.
struct PanelGemm {
  Int8Rows rows;
  const uint8_t* panels;  // [panels, groups, record_bytes]
  float* y;
  int64_t num_rows, k, n;
  int64_t group, part;  // inputs that share a scale, of w; and of a row, which are a part of a group
  Code code;            // not kF8
  Scale numbers;        // what scales and offsets are
  bool has_offsets;
  const float* outer;  // [n], or null

  // Codes are multiplied as unsigned ones: (codes + zero) / unit.
  int32_t zero() const { return code == Code::kInt8 ? 128 : code == Code::kInt4 ? 8 : code == Code::kF4 ? 12 : 0; }
  float unit() const { return code == Code::kF4 ? 0.5f : 1.0f; }

  int64_t groups() const { return k / group; }
  int64_t parts() const { return k / part; }
  int64_t number_bytes() const { return bytes_of(numbers) * kPanel; }
  int64_t record_bytes() const { return (has_offsets ? 2 : 1) * number_bytes() + group * kPanel * bits_of(code) / 8; }

  // Of the rows from `row` on.
  Int8Rows rows_from(int64_t row) const {
    return {rows.x + row * k, rows.scales + row * parts(), rows.starts + row * parts(), rows.offsets + row * groups()};
  }
};

// Attention of a ragged batch over paged keys and values; reference.py says what the arrays mean.
struct Attention {
  const void *q, *k, *v;  // [tokens, heads or kv_heads, head_dim]
  void* pool;             // [num_blocks, 2, kv_heads, block_size, head_dim]
  void* out;              // [tokens, heads, head_dim]
  const int32_t *block_tables, *cu_q_lens, *kv_lens;
  const float* sinks;      // [heads], or null
  const float* kv_scales;  // [2, kv_heads], of a pool of 8 bits
  int64_t heads, kv_heads, head_dim, block_size, blocks_per_seq;
  int64_t window;  // tokens; 0: all
  float scale;
  float soft_cap;  // 0: none
  bool causal;
  bool batch_invariant;  // a row's result depends on no other row of its step
  DType dtype, pool_dtype;  // of q, k, v and out; equal, or the pool's has 8 bits
};

// Some query rows of sequence `seq` with one KV head: a token's heads of that KV head are rows one after the other.
struct AttentionTile {
  int64_t seq, begin, end, kv_head;
};

// Rows of logits, of which `top` gets the largest (NaN if one is) and `normalizer` the log of the exponentials' sum.
struct Rows {
  const float* x;  // [rows, vocab]
  float *top, *normalizer;
  int64_t vocab;
};

// Draws of a token for each row; reference.py says what the arrays mean.
struct Draw {
  const float* logits;  // [rows, vocab]
  const float *temperature, *top_p, *at_least;
  const int32_t* top_k;
  const uint32_t* keys;  // [rows, 2]
  int32_t* tokens;
  float* top;
  int64_t vocab;
  bool partitionable;  // which bits jax.random makes
};

// The k best scores of each row; reference.py says what the arrays mean.
struct Best {
  const float *scores, *logits;  // [rows, vocab]
  const int32_t* tokens;         // [rows, num_tokens]
  int32_t* ids;                  // [rows, k]
  float* best;                   // [rows, k]
  float* own;                    // [rows, k + num_tokens]
  int32_t* ranks;                // [rows, k + num_tokens]
  int64_t vocab, k, num_tokens;
};

// The first 2 * pairs features of heads turned by angles of their token.
struct Rotation {
  const float *sin, *cos;  // [tokens, pairs]
  int64_t head_dim, pairs;
  bool interleaved;  // whether pairs are neighbours, not one of each half
  DType dtype;
};

// The activation of `width` numbers times as many others.
struct Gated {
  int64_t width;
  bool is_gelu;       // by tanh; else it is silu
  DType from, dtype;  // of them and of the result
};

// y[rows, width]: x + added.
struct Sum {
  const void *x, *added;
  void* y;
  int64_t width;
  DType dtype;
};

// y[rows, width]: rows of x, or of x + added, over their root mean square, times scale; and `sum` the rows of x + added.
struct RmsNorm {
  const void *x, *added;  // [rows, width]; added may be null
  const void* scale;      // [width]
  void *y, *sum;          // sum is null if added is
  int64_t width;
  float eps;
  bool unit_offset;   // whether scale is stored as its difference from one,
  bool scales_first;  // and applied before the result is rounded, rather than to what is rounded
  DType dtype, scale_dtype;
};

struct Kernels {
  const char* name;
  bool pairs;  // whether products of bfloat16 take a Gemm's x in pairs,
  bool reads_rows;  // and those of a w that isn't transposed read it without groups
  int64_t columns;  // a Gemm's columns are best divided at multiples of it
  int64_t group_rows;  // of a Gemm, at most
  int64_t tile_rows;  // query rows of a tile of attention, at most
  void (*round)(const float* from, Bf16* to, int64_t count);  // to the nearest, to even if there are two
  // Rows [height, k] of a Gemm's x as it reads them: [units, height].
  void (*pack)(const void* rows, DType dtype, bool pairs, int64_t height, int64_t k, float* to);
  // Columns begin to end of y.
  void (*gemm)(const Gemm&, int64_t begin, int64_t end);
  void (*quantized_gemm)(const QuantizedGemm&, int64_t begin, int64_t end);
  void (*round_row)(const PanelGemm&, const float* x, int64_t row);  // x[k] to the row of `rows`
  void (*panel_gemm)(const PanelGemm&, int64_t begin, int64_t end);  // panels begin to end
  // Writes K and V of tokens begin to end of sequence `seq`, counted from its first in the batch, into the pool.
  void (*write_kv)(const Attention&, int64_t seq, int64_t begin, int64_t end);
  // `scratch` holds `scratch_floats`. The first keys of `next`, unless it is null, are brought in.
  void (*attend)(const Attention&, const AttentionTile&, const AttentionTile* next, float* scratch);
  int64_t (*scratch_floats)(const Attention&);
  // Of one row each; `scratch` holds `draw_floats` or `best_floats`.
  void (*normalize)(const Rows&, int64_t row);
  void (*draw)(const Draw&, int64_t row, float* scratch);
  void (*best)(const Best&, int64_t row, float* scratch);
  int64_t (*draw_floats)(int64_t vocab);
  int64_t (*best_floats)(int64_t vocab, int64_t k);
  // Of one token: y[heads, head_dim] of x.
  void (*rotate)(const Rotation&, int64_t token, const void* x, void* y, int64_t heads);
  void (*gate)(const Gated&, const void* gate, const void* up, void* y);
  // Of one row.
  void (*add)(const Sum&, int64_t row);
  void (*rms_norm)(const RmsNorm&, int64_t row);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16;
#elif defined(__aarch64__)
extern const Kernels kNeonBf16;
#endif

// Those for AMX; null where the CPU has none, the system gives none to this process, or the compiler knows none.
const Kernels* amx_kernels();

// Of int8.cc; null where the CPU has none, or the compiler knows none.
const Kernels* avx512_vnni_kernels();
const Kernels* avx2_vnni_kernels();
const Kernels* neon_dotprod_kernels();

const Kernels& kernels();  // of the best instruction set that this CPU has, or the one that a test has chosen

}  // namespace jaxllm
