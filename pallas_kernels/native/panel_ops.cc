// The custom calls of products with a weight in panels: one puts it in them, one multiplies.
#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels.h"
#include "products.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxllm {
namespace {

constexpr int64_t kAloneRounded = 16 << 10;  // numbers of x that one thread rounds before another would have begun

int32_t zero_of(Code code) { return code == Code::kInt8 ? 128 : code == Code::kInt4 ? 8 : 0; }

bool is_integer(Code code) { return code == Code::kInt8 || code == Code::kInt4 || code == Code::kUint4; }

// Whether record_bytes of its groups are those of `panels`.
bool fits(const PanelGemm& g, const ffi::AnyBuffer& panels) {
  const auto ps = panels.dimensions();
  return panels.element_type() == ffi::U8 && ps.size() == 3 && ps[0] == (g.n + kPanel - 1) / kPanel && ps[1] > 0 &&
         g.k % ps[1] == 0 && g.k / ps[1] == g.group && g.part > 0 && g.part % 8 == 0 && g.group % g.part == 0 &&
         ps[2] == g.record_bytes();
}

bool are_numbers(Scale scale) { return scale == Scale::kF32 || scale == Scale::kBf16 || scale == Scale::kF16; }

// The records of a panel, one after the other, of which all bytes are zeros.
void fill_panel(const QuantizedGemm& q, const PanelGemm& g, int64_t panel, uint8_t* record) {
  const int64_t first = panel * kPanel, columns = std::min(kPanel, g.n - first), size = g.number_bytes() / kPanel;
  const uint8_t* const scales = static_cast<const uint8_t*>(q.scales);
  const uint8_t* const offsets = reinterpret_cast<const uint8_t*>(q.offsets);
  for (int64_t group = 0; group < g.groups(); group++, record += g.record_bytes()) {
    const int64_t numbers = (group * g.n + first) * size;
    std::memcpy(record, scales + numbers, columns * size);
    if (g.has_offsets) std::memcpy(record + g.number_bytes(), offsets + numbers, columns * size);
    uint8_t* const codes = record + (g.has_offsets ? 2 : 1) * g.number_bytes();
    for (int64_t i = 0; i < g.group; i++)
      for (int64_t c = 0; c < columns; c++) {
        const int64_t k = group * g.group + i, at = q.by_output ? (first + c) * g.k + k : k * g.n + first + c;
        if (g.bits == 8) {
          codes[i / 4 * 4 * kPanel + 4 * c + i % 4] = q.codes[at] + g.zero;
        } else {
          const int code = ((at % 2 ? q.codes[at / 2] >> 4 : q.codes[at / 2]) + g.zero) & 15;
          codes[i / 8 * 4 * kPanel + 4 * c + i % 4] |= i / 4 % 2 ? code << 4 : code;
        }
      }
  }
}

ffi::Error make_panels(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales, ffi::AnyBuffer offsets,
                       ffi::Result<ffi::AnyBuffer> panels) {
  const auto cs = codes.dimensions(), ss = scales.dimensions();
  const bool has_offsets = offsets.element_count() > 0, by_output = ss.size() == 1;
  QuantizedGemm q{};
  q.by_output = by_output;
  if (!find(codes.element_type(), q.code) || !is_integer(q.code) || !find(scales.element_type(), q.scale) ||
      !are_numbers(q.scale) || offsets.element_type() != scales.element_type())
    return ffi::Error::InvalidArgument("jaxllm_make_panels: dtypes");
  if (cs.size() != 2 || ss.size() < 1 || ss.size() > 2 || ss[0] < 1 || ss.back() != cs[by_output ? 0 : 1] ||
      (!by_output && cs[0] % ss[0]) || (has_offsets && offsets.element_count() != scales.element_count()))
    return ffi::Error::InvalidArgument("jaxllm_make_panels: shapes don't go together");
  q.codes = static_cast<const uint8_t*>(codes.untyped_data()), q.scales = scales.untyped_data();
  q.offsets = static_cast<const float*>(offsets.untyped_data());
  PanelGemm g{};
  g.k = cs[by_output ? 1 : 0], g.n = ss.back(), g.group = g.part = by_output ? g.k : g.k / ss[0];
  g.bits = bits_of(q.code), g.zero = zero_of(q.code), g.numbers = q.scale, g.has_offsets = has_offsets;
  if (!fits(g, *panels)) return ffi::Error::InvalidArgument("jaxllm_make_panels: the shape of the panels");
  const int64_t bytes = g.groups() * g.record_bytes();
  uint8_t* const to = static_cast<uint8_t*>(panels->untyped_data());
  parallel(pool, panels->dimensions()[0], [&](int64_t panel) {
    std::memset(to + panel * bytes, 0, bytes);
    fill_panel(q, g, panel, to + panel * bytes);
  });
  return ffi::Error::Success();
}

// Rows of x as int8.
struct RoundedRows {
  std::unique_ptr<int8_t[]> x;
  std::unique_ptr<float[]> scales, offsets;
  std::unique_ptr<int32_t[]> starts;

  // Of `rows`, for the product `g`.
  void take(ffi::ThreadPool& pool, PanelGemm& g, const float* rows) {
    x.reset(new int8_t[g.num_rows * g.k]);
    scales.reset(new float[g.num_rows * g.parts()]);
    starts.reset(new int32_t[g.num_rows * g.parts()]);
    offsets.reset(new float[g.num_rows * g.groups()]);
    g.rows = {x.get(), scales.get(), starts.get(), offsets.get()};
    const auto round_row = [&](int64_t row) { kernels().round_row(g, rows + row * g.k, row); };
    if (g.num_rows * g.k < kAloneRounded)
      for (int64_t row = 0; row < g.num_rows; row++) round_row(row);
    else
      parallel(pool, g.num_rows, round_row);
  }
};

ffi::Error panel_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, NumRows num_rows,
                        ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t zero, int64_t numbers, int64_t part,
                        bool has_offsets) {
  const auto xs = x.dimensions(), ys = y->dimensions(), ps = panels.dimensions();
  const bool rounds = y->element_type() != ffi::F32;
  if ((x.element_type() != ffi::F32 && x.element_type() != ffi::BF16) || (rounds && y->element_type() != ffi::BF16))
    return ffi::Error::InvalidArgument("jaxllm_panel_matmul: dtypes");
  if (xs.size() != 2 || ys.size() != 2 || ys[0] != xs[0] || ps.size() != 3 || ps[1] < 1 || (bits != 4 && bits != 8) ||
      !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_panel_matmul: shapes don't go together");
  const int64_t rows = used_rows(num_rows, xs[0]), k = xs[1], n = ys[1];
  PanelGemm g{};
  g.panels = static_cast<const uint8_t*>(panels.untyped_data()), g.y = static_cast<float*>(y->untyped_data());
  g.num_rows = rows, g.k = k, g.n = n, g.group = k / ps[1], g.part = part;
  g.bits = bits, g.zero = zero, g.numbers = static_cast<Scale>(numbers), g.has_offsets = has_offsets;
  if (!are_numbers(g.numbers)) return ffi::Error::InvalidArgument("jaxllm_panel_matmul: dtypes");
  if (!fits(g, panels)) return ffi::Error::InvalidArgument("jaxllm_panel_matmul: the shape of the panels");
  if (rows == 0) return ffi::Error::Success();
  Gemm plain{nullptr, nullptr, nullptr, rows, k, n, 0, DType::kF32, false};  // whose rows are read one by one
  const std::unique_ptr<float[]> copy = pack_rows(pool, plain, x);
  RoundedRows rounded;
  rounded.take(pool, g, plain.x);
  std::unique_ptr<float[]> sums;
  if (rounds) {
    sums.reset(new float[rows * n]);
    g.y = sums.get();
  }
  const Sums done{g.y, rounds ? static_cast<Bf16*>(y->untyped_data()) : nullptr, n};
  const int64_t parts = num_parts(pool, n, panels.element_count());
  parallel(pool, parts, [&](int64_t part) {
    const int64_t begin = ps[0] * part / parts, end = ps[0] * (part + 1) / parts;
    kernels().panel_gemm(g, begin, end);
    done.round(0, rows, begin * kPanel, std::min(end * kPanel, n));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_make_panels, jaxllm::make_panels,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_panel_matmul, jaxllm::panel_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("zero")
                                  .Attr<int64_t>("numbers")
                                  .Attr<int64_t>("part")
                                  .Attr<bool>("has_offsets"));
