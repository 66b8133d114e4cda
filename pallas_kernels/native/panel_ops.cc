// The custom calls of products with weights in panels: one puts them in panels, one multiplies, and one multiplies groups
// of rows with the weights of experts, which lie one after the other.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "products.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Ints1D = ffi::Buffer<ffi::S32, 1>;

namespace jaxllm {
namespace {

constexpr int64_t kAloneRounded = 16 << 10;  // numbers of x that one thread rounds before another would have begun
constexpr int64_t kPartsOfThread = 8;        // of the work of experts, of whom some have more rows than others

int64_t num_panels(const PanelGemm& g) { return (g.n + kPanel - 1) / kPanel; }

int64_t matrix_bytes(const PanelGemm& g) { return num_panels(g) * g.groups() * g.record_bytes(); }

// Whether `panels` are those of as many matrices as g says.
bool fits(const PanelGemm& g, const ffi::AnyBuffer& panels, int64_t experts, bool has_experts) {
  const auto ps = panels.dimensions();
  const size_t lead = has_experts ? 1 : 0;
  return panels.element_type() == ffi::U8 && ps.size() == lead + 3 && (!has_experts || ps[0] == experts) &&
         g.part > 0 && g.part % 8 == 0 && g.group % g.part == 0 && g.k % g.group == 0 && ps[lead] == num_panels(g) &&
         ps[lead + 1] == g.groups() && ps[lead + 2] == g.record_bytes();
}

// The records of a panel, one after the other, of which all bytes are zeros. q.codes and q.scales are of the matrix.
void fill_panel(const QuantizedGemm& q, const PanelGemm& g, int64_t panel, uint8_t* record) {
  const int64_t first = panel * kPanel, columns = std::min(kPanel, g.n - first), size = bytes_of(g.numbers);
  const uint8_t* const scales = static_cast<const uint8_t*>(q.scales);
  const uint8_t* const offsets = reinterpret_cast<const uint8_t*>(q.offsets);
  const int moved = g.code == Code::kF4 ? 0 : g.zero();  // those keep their bits
  for (int64_t group = 0; group < g.groups(); group++, record += g.record_bytes()) {
    const int64_t numbers = (group * g.n + first) * size;
    std::memcpy(record, scales + numbers, columns * size);
    if (g.has_offsets) std::memcpy(record + g.number_bytes(), offsets + numbers, columns * size);
    uint8_t* const codes = record + (g.has_offsets ? 2 : 1) * g.number_bytes();
    for (int64_t i = 0; i < g.group; i++)
      for (int64_t c = 0; c < columns; c++) {
        const int64_t k = group * g.group + i, at = q.by_output ? (first + c) * g.k + k : k * g.n + first + c;
        if (g.code == Code::kInt8) {
          codes[i / 4 * 4 * kPanel + 4 * c + i % 4] = q.codes[at] + moved;
        } else {
          const int code = ((at % 2 ? q.codes[at / 2] >> 4 : q.codes[at / 2]) + moved) & 15;
          codes[i / 8 * 4 * kPanel + 4 * c + i % 4] |= i / 4 % 2 ? code << 4 : code;
        }
      }
  }
}

ffi::Error make_panels(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales, ffi::AnyBuffer offsets,
                       ffi::Result<ffi::AnyBuffer> panels) {
  const auto cs = codes.dimensions(), ss = scales.dimensions();
  const bool has_experts = cs.size() == 3, has_offsets = offsets.element_count() > 0, by_output = ss.size() < cs.size();
  const size_t lead = has_experts ? 1 : 0;
  QuantizedGemm q{};
  q.by_output = by_output;
  if (!find(codes.element_type(), q.code) || q.code == Code::kF8 || !find(scales.element_type(), q.scale) ||
      offsets.element_type() != scales.element_type())
    return ffi::Error::InvalidArgument("jaxllm_make_panels: dtypes");
  if (cs.size() < 2 || cs.size() > 3 || ss.size() != lead + (by_output ? 1 : 2) || (has_experts && ss[0] != cs[0]) ||
      ss.back() != cs[lead + (by_output ? 0 : 1)] || (!by_output && (ss[lead] < 1 || cs[lead] % ss[lead])) ||
      (has_offsets && offsets.element_count() != scales.element_count()))
    return ffi::Error::InvalidArgument("jaxllm_make_panels: shapes don't go together");
  PanelGemm g{};
  g.k = cs[lead + (by_output ? 1 : 0)], g.n = ss.back(), g.group = g.part = by_output ? g.k : g.k / ss[lead];
  g.code = q.code, g.numbers = q.scale, g.has_offsets = has_offsets;
  const int64_t experts = has_experts ? cs[0] : 1, count = num_panels(g), bits = g.k * g.n * bits_of(q.code);
  if (!fits(g, *panels, experts, has_experts))
    return ffi::Error::InvalidArgument("jaxllm_make_panels: the shape of the panels");
  if (experts > 1 && bits % 8) return ffi::Error::InvalidArgument("jaxllm_make_panels: an expert begins within a byte");
  const int64_t bytes = g.groups() * g.record_bytes(), numbers = g.groups() * g.n * bytes_of(g.numbers);
  const uint8_t *const first_codes = static_cast<const uint8_t*>(codes.untyped_data()),
                *const first_scales = static_cast<const uint8_t*>(scales.untyped_data()),
                *const first_offsets = static_cast<const uint8_t*>(offsets.untyped_data());
  uint8_t* const to = static_cast<uint8_t*>(panels->untyped_data());
  parallel(pool, experts * count, [&](int64_t panel) {
    const int64_t expert = panel / count;
    QuantizedGemm own = q;
    own.codes = first_codes + expert * bits / 8, own.scales = first_scales + expert * numbers;
    own.offsets = reinterpret_cast<const float*>(first_offsets + (has_offsets ? expert * numbers : 0));
    std::memset(to + panel * bytes, 0, bytes);
    fill_panel(own, g, panel % count, to + panel * bytes);
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

// What both products are given.
struct Given {
  ffi::AnyBuffer x, panels, outer;
  ffi::Result<ffi::AnyBuffer> y;
  int64_t code, numbers, part;
  bool has_offsets;

  // Of all `rows` of x, or what is wrong. `experts`: 0 for a single matrix.
  const char* read(int64_t rows, int64_t experts, PanelGemm& g) {
    const auto xs = x.dimensions(), ys = y->dimensions(), ps = panels.dimensions();
    DType dtype;
    if (!find(x.element_type(), dtype) || !find(y->element_type(), dtype) || outer.element_type() != ffi::F32 ||
        code < 0 || code > static_cast<int64_t>(Code::kF4) || code == static_cast<int64_t>(Code::kF8) || numbers < 0 ||
        numbers > static_cast<int64_t>(Scale::kPower))
      return "dtypes";
    if (xs.size() != 2 || ys.size() != 2 || ys[0] != xs[0] || ps.size() < 3 || ps[ps.size() - 2] < 1)
      return "shapes don't go together";
    g.panels = static_cast<const uint8_t*>(panels.untyped_data()), g.y = static_cast<float*>(y->untyped_data());
    g.num_rows = rows, g.k = xs[1], g.n = ys[1], g.group = g.k / ps[ps.size() - 2], g.part = part;
    g.code = static_cast<Code>(code), g.numbers = static_cast<Scale>(numbers), g.has_offsets = has_offsets;
    const int64_t num_outer = outer.element_count();
    g.outer = num_outer ? static_cast<const float*>(outer.untyped_data()) : nullptr;
    if (num_outer && num_outer != std::max<int64_t>(experts, 1) * g.n) return "outer";
    return g.group > 0 && fits(g, panels, experts, experts > 0) ? nullptr : "the shape of the panels";
  }

  // Rounds rows of x, and calls work(g, sums), where sums go to y in time.
  template <class Work>
  void with_rows(ffi::ThreadPool& pool, PanelGemm& g, const Work& work) {
    Gemm plain{nullptr, nullptr, nullptr, g.num_rows, g.k, g.n, 0, DType::kF32, false};  // whose rows are read one by one
    const std::unique_ptr<float[]> copy = pack_rows(pool, plain, x);
    RoundedRows rounded;
    rounded.take(pool, g, plain.x);
    const bool rounds = y->element_type() != ffi::F32;
    std::unique_ptr<float[]> sums;
    if (rounds) {
      sums.reset(new float[g.num_rows * g.n]);
      g.y = sums.get();
    }
    work(Sums{g.y, rounds ? static_cast<Bf16*>(y->untyped_data()) : nullptr, g.n});
  }
};

ffi::Error panel_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, ffi::AnyBuffer outer,
                        NumRows num_rows, ffi::Result<ffi::AnyBuffer> y, int64_t code, int64_t numbers, int64_t part,
                        bool has_offsets) {
  Given given{x, panels, outer, y, code, numbers, part, has_offsets};
  PanelGemm g{};
  if (x.dimensions().size() != 2 || !is_one_or_none(num_rows))
    return ffi::Error::InvalidArgument("jaxllm_panel_matmul: shapes don't go together");
  const int64_t rows = used_rows(num_rows, x.dimensions()[0]);
  if (const char* fault = given.read(rows, 0, g))
    return ffi::Error::InvalidArgument(std::string("jaxllm_panel_matmul: ") + fault);
  if (rows == 0) return ffi::Error::Success();
  given.with_rows(pool, g, [&](const Sums& done) {
    const int64_t parts = num_parts(pool, g.n, panels.element_count()), count = num_panels(g);
    parallel(pool, parts, [&](int64_t part) {
      const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
      kernels().panel_gemm(g, begin, end);
      done.round(0, rows, begin * kPanel, std::min(end * kPanel, g.n));
    });
  });
  return ffi::Error::Success();
}

// Some panels of an expert that has rows.
struct ExpertPart {
  int64_t expert, begin, end;
};

std::vector<ExpertPart> expert_parts(ffi::ThreadPool& pool, const PanelGemm& g, const int32_t* offsets, int64_t experts) {
  const int64_t count = num_panels(g), threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t rows = offsets[experts] - offsets[0], wanted = threads * kPartsOfThread;
  std::vector<ExpertPart> parts;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t own = offsets[e + 1] - offsets[e];
    if (own == 0) continue;
    const int64_t most = std::max<int64_t>(1, matrix_bytes(g) / kPartBytes);
    const int64_t pieces = std::min({most, count, (wanted * own + rows - 1) / rows});
    for (int64_t i = 0; i < pieces; i++) parts.push_back({e, count * i / pieces, count * (i + 1) / pieces});
  }
  return parts;
}

ffi::Error grouped_panel_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, ffi::AnyBuffer outer,
                                Ints1D offsets, ffi::Result<ffi::AnyBuffer> y, int64_t code, int64_t numbers,
                                int64_t part, bool has_offsets) {
  Given given{x, panels, outer, y, code, numbers, part, has_offsets};
  PanelGemm g{};
  const int64_t experts = static_cast<int64_t>(offsets.element_count()) - 1;
  if (x.dimensions().size() != 2 || experts < 1)
    return ffi::Error::InvalidArgument("jaxllm_grouped_panel_matmul: shapes don't go together");
  const int32_t* const ends = offsets.typed_data();
  if (!are_offsets(ends, experts, x.dimensions()[0]))
    return ffi::Error::InvalidArgument("jaxllm_grouped_panel_matmul: the offsets fall or leave the rows");
  if (const char* fault = given.read(ends[experts], experts, g))
    return ffi::Error::InvalidArgument(std::string("jaxllm_grouped_panel_matmul: ") + fault);
  zero_other_rows(*y, ends[0], ends[experts]);
  if (ends[0] == ends[experts]) return ffi::Error::Success();
  given.with_rows(pool, g, [&](const Sums& done) {
    const std::vector<ExpertPart> parts = expert_parts(pool, g, ends, experts);
    parallel(pool, parts.size(), [&](int64_t i) {
      const auto [expert, begin, end] = parts[i];
      const int64_t first = ends[expert];
      PanelGemm own = g;
      own.num_rows = ends[expert + 1] - first, own.rows = g.rows_from(first);
      own.panels += expert * matrix_bytes(g), own.y += first * g.n;
      if (own.outer) own.outer += expert * g.n;
      kernels().panel_gemm(own, begin, end);
      done.round(first, own.num_rows, begin * kPanel, std::min(end * kPanel, g.n));
    });
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxllm::NumRows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("code")
                                  .Attr<int64_t>("numbers")
                                  .Attr<int64_t>("part")
                                  .Attr<bool>("has_offsets"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_grouped_panel_matmul, jaxllm::grouped_panel_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints1D>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("code")
                                  .Attr<int64_t>("numbers")
                                  .Attr<int64_t>("part")
                                  .Attr<bool>("has_offsets"));
