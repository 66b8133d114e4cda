// A weight as the custom calls of products get it, dense or quantised, of one matrix or of several experts.
#pragma once

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxllm {

inline bool find(xla::ffi::DataType dtype, DType& found) {
  switch (dtype) {
    case xla::ffi::F32: found = DType::kF32; return true;
    case xla::ffi::BF16: found = DType::kBf16; return true;
    default: return false;
  }
}

inline bool find(xla::ffi::DataType dtype, Code& code) {
  switch (dtype) {
    case xla::ffi::S8: code = Code::kInt8; return true;
    case xla::ffi::F8E4M3FN: code = Code::kF8; return true;
    case xla::ffi::S4: code = Code::kInt4; return true;
    case xla::ffi::U4: code = Code::kUint4; return true;
    case xla::ffi::F4E2M1FN: code = Code::kF4; return true;
    default: return false;
  }
}

inline bool find(xla::ffi::DataType dtype, Scale& scale) {
  switch (dtype) {
    case xla::ffi::F32: scale = Scale::kF32; return true;
    case xla::ffi::BF16: scale = Scale::kBf16; return true;
    case xla::ffi::F16: scale = Scale::kF16; return true;
    case xla::ffi::F8E4M3FN: scale = Scale::kF8; return true;
    case xla::ffi::F8E8M0FNU: scale = Scale::kPower; return true;
    default: return false;
  }
}

inline bool find_of_weight(xla::ffi::DataType dtype, DType& found) {
  if (dtype != xla::ffi::F16) return find(dtype, found);
  found = DType::kF16;
  return true;
}

// A dense weight: [k, n], [n, k] if it is transposed, or in panels, [panels, k, kDensePanel] in float32 and float16, and
// [panels, k / 2, kDensePanel, 2] in bfloat16.
struct Matrix {
  int64_t k, n;
  DType dtype;
  bool in_panels;
};

// Whether `w` is one, or several if it has so many axes before, which `to` then tells of.
inline bool read_matrix(const xla::ffi::AnyBuffer& w, bool transposed, size_t lead, Matrix& to) {
  const auto dims = w.dimensions();
  if (dims.size() < lead + 2 || !find_of_weight(w.element_type(), to.dtype)) return false;
  const auto* const ws = dims.begin() + lead;
  const size_t rank = dims.size() - lead;
  to.in_panels = rank > 2;
  if (!to.in_panels) {
    to.k = ws[transposed ? 1 : 0], to.n = ws[transposed ? 0 : 1];
    return true;
  }
  const bool by_pairs = to.dtype == DType::kBf16;
  to.k = ws[1] * (by_pairs ? 2 : 1), to.n = ws[0] * kDensePanel;
  return !transposed && rank == (by_pairs ? 4 : 3) && ws[2] == kDensePanel && (!by_pairs || ws[3] == 2);
}

// Of experts that lie one after the other; without experts, of one.
struct Weight {
  QuantizedGemm first{};  // of expert 0: its x, y, rows and groups are not set
  bool is_dense = false;
  int64_t experts = 1;

  int64_t k() const { return first.gemm.k; }
  int64_t n() const { return first.gemm.n; }

  // Of a matrix.
  int64_t bytes() const {
    const int64_t bits = !is_dense ? bits_of(first.code) : first.gemm.dtype == DType::kF32 ? 32 : 16;
    return k() * n() * bits / 8;
  }

  QuantizedGemm of(int64_t expert) const {
    QuantizedGemm q = first;
    if (is_dense) {
      q.gemm.w = static_cast<const char*>(q.gemm.w) + expert * bytes();
      return q;
    }
    const int64_t scales = q.by_output ? n() : k() / q.group * n();
    q.codes += expert * bytes();
    q.scales = static_cast<const char*>(q.scales) + expert * scales * bytes_of(q.scale);
    if (q.offsets) q.offsets += expert * scales;
    if (q.outer) q.outer += expert * n();
    return q;
  }

  void multiply(const QuantizedGemm& q, int64_t begin, int64_t end) const {
    is_dense ? kernels().gemm(q.gemm, begin, end) : kernels().quantized_gemm(q, begin, end);
  }

  // Whether each row of x is read by itself.
  bool takes_each(int64_t rows) const { return !is_dense && first.by_output && rows <= kDirectRows; }
};

// The arrays of a weight as `to`, or what is wrong with them. Without scales it is dense, see Matrix; see QuantizedGemm for
// the others. Offsets and outer scales may be empty. `has_experts`: all have one more axis before.
inline const char* read_weight(const xla::ffi::AnyBuffer& codes, const xla::ffi::AnyBuffer& scales,
                               const xla::ffi::AnyBuffer& offsets, const xla::ffi::AnyBuffer& outer, bool by_output,
                               bool has_experts, Weight& to) {
  const auto cs = codes.dimensions(), ss = scales.dimensions();
  const size_t lead = has_experts ? 1 : 0;
  if (cs.size() < lead + 2) return "rank of codes";
  to = {};
  to.experts = has_experts ? cs[0] : 1;
  QuantizedGemm& q = to.first;
  q.by_output = by_output;
  Matrix matrix;
  to.is_dense = scales.element_count() == 0 && read_matrix(codes, by_output, lead, matrix);
  if (to.is_dense) {
    q.gemm.w = codes.untyped_data(), q.gemm.dtype = matrix.dtype, q.gemm.in_panels = matrix.in_panels;
    q.gemm.k = matrix.k, q.gemm.n = matrix.n;
    return by_output ? "a dense weight by output" : nullptr;
  }
  if (cs.size() != lead + 2) return "rank of codes";
  q.gemm.k = cs[lead + (by_output ? 1 : 0)], q.gemm.n = cs[lead + (by_output ? 0 : 1)];
  if (!find(codes.element_type(), q.code) || !find(scales.element_type(), q.scale)) return "dtypes";
  if (ss.size() != lead + (by_output ? 1 : 2) || ss.back() != to.n() || (has_experts && ss[0] != to.experts))
    return "shapes of codes and scales";
  const int64_t groups = by_output ? 1 : ss[lead], experts = to.experts, n = to.n();
  const int64_t num_offsets = offsets.element_count(), num_outer = outer.element_count();
  if (groups < 1 || to.k() % groups || (num_offsets && (by_output || num_offsets != experts * groups * n)) ||
      (num_outer && num_outer != experts * n) || offsets.element_type() != xla::ffi::F32 ||
      outer.element_type() != xla::ffi::F32)
    return "groups, offsets or outer";
  if (experts > 1 && to.k() * n * bits_of(q.code) % 8) return "an expert that begins within a byte";
  q.codes = static_cast<const uint8_t*>(codes.untyped_data());
  q.scales = scales.untyped_data();
  q.offsets = num_offsets ? static_cast<const float*>(offsets.untyped_data()) : nullptr;
  q.outer = num_outer ? static_cast<const float*>(outer.untyped_data()) : nullptr;
  q.group = to.k() / groups;
  return nullptr;
}

}  // namespace jaxllm
