"""Native products of any shapes, in memory that ends where the arrays do, by every instruction set that this CPU has,
against numpy in float64. What is NaN stays in its own row or column.
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.quantized_matmul import panels as in_panels
from tests.pallas_kernels.guarded import call, fuzzed, using, with_each_set
from tests.pallas_kernels.test_quantized_matmul import CODES, codes_of, rounded_in_parts

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

BF16 = ml_dtypes.bfloat16
TOLERANCE = {"float32": 3e-6, "bfloat16": 5e-3}  # of the sum of products' magnitudes; bfloat16 rounds the result
NOTHING = np.zeros(0, np.float32)
ALL = np.zeros(0, np.int32)  # rows
WIDTHS = (np.float32, np.float64)  # of products, which machines that add to them at once have in more than float32
DTYPES = [(np.float32, np.float32), (BF16, BF16), (BF16, np.float32)]  # of what is multiplied, and of the result
OF_16_BITS = (BF16, np.float16)  # weights that float32 may be multiplied with
SCALES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu")

rows_of_x = st.integers(0, 30) | st.integers(31, 300)
sizes = st.integers(1, 80) | st.sampled_from([127, 128, 129, 255, 256, 257, 511, 512, 513, 600])
wide = st.just(0) | sizes | st.sampled_from([1023, 1024, 1025, 1100, 2100])
dtypes, threads, seeds = st.sampled_from(DTYPES), st.integers(1, 3), st.integers(0, 2**16)


def check(got, x, dense, sizes=None, tolerance=None):
    """That `got` is `x @ dense`; `sizes` are the magnitudes that `dense` is a sum of."""
    x, dense = x.astype(np.float64), dense.astype(np.float64)
    with np.errstate(invalid="ignore"):
        want, scale = x @ dense, np.abs(x) @ (np.abs(dense) if sizes is None else sizes)
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(want))
    error, limit = np.abs(got.astype(np.float64) - want), (tolerance or TOLERANCE[got.dtype.name]) * scale + 1e-30
    assert (error <= limit)[~np.isnan(want)].all(), (error / limit)[~np.isnan(want)].max()


def poisoned(x, axis, rng):
    """With NaN at one index of the axis, if there are several."""
    if x.shape[axis] > 1:
        np.moveaxis(x, axis, 0)[rng.integers(x.shape[axis])] = np.nan
    return x


def some_rows(x, rng):
    """How many rows of x are no padding, which becomes NaN, and that as the custom calls take it: they may be all."""
    if rng.random() < 0.5:
        return len(x), ALL
    used = int(rng.integers(len(x) + 1))
    x[used:] = np.nan
    return used, np.array([used], np.int32)


def dtype_of_weight(dtype, batch_invariant, seed):
    """That of the rows, or by turns one of 16 bits."""
    return OF_16_BITS[seed // 2 % 2] if dtype == np.float32 and seed % 2 and not batch_invariant else dtype


@fuzzed
@given(rows_of_x, sizes, wide, st.booleans(), dtypes, st.booleans(), threads, seeds)
def test_products(rows, depth, columns, transposed, dtypes, batch_invariant, threads, seed):
    rng, (dtype, out_dtype) = np.random.default_rng(seed), dtypes
    x = poisoned(rng.normal(size=(rows, depth)), 0, rng).astype(dtype)
    weight = poisoned(rng.normal(size=(depth, columns)), 1, rng).astype(dtype_of_weight(dtype, batch_invariant, seed))
    held = np.ascontiguousarray(weight.T) if transposed else weight

    used, count = some_rows(x, rng)

    def multiply(x, count):
        options = {"transposed": transposed, "batch_invariant": batch_invariant, "threads": threads}
        return call("jaxllm_matmul", [x, held, count], [((len(x), columns), out_dtype)], **options)[0]

    def of_one_set():
        got = multiply(x, count)
        check(got[:used], x[:used], weight)
        if batch_invariant and used:
            row = rng.integers(used)
            alone = multiply(x[row : row + 1], ALL)[0]
            np.testing.assert_array_equal(alone.astype(np.float32), got[row].astype(np.float32))

    with_each_set(of_one_set)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("depth", [12, 39, 70])
def test_a_row_is_the_same_beside_any_others_where_depth_fills_no_vector(depth, dtype):
    rng = np.random.default_rng(0)
    x, held = rng.normal(size=(9, depth)).astype(dtype), rng.normal(size=(33, depth)).astype(dtype)

    def of_one_set():
        options = {"transposed": True, "batch_invariant": True, "threads": 1}
        together, *alone = (
            call("jaxllm_matmul", [rows, held, ALL], [((len(rows), 33), np.float32)], **options)[0]
            for rows in (x, *np.split(x, len(x)))
        )
        np.testing.assert_array_equal(np.concatenate(alone), together)

    with_each_set(of_one_set)


@fuzzed
@given(rows_of_x, sizes, sizes, st.booleans(), dtypes, st.booleans(), threads, seeds)
def test_gated_products(rows, depth, width, is_gelu, dtypes, batch_invariant, threads, seed):
    rng, (dtype, out_dtype) = np.random.default_rng(seed), dtypes
    x = rng.normal(size=(rows, depth)).astype(dtype)
    weight = rng.normal(size=(depth, 2 * width)) / depth**0.5
    weight = weight.astype(dtype_of_weight(dtype, batch_invariant, seed))
    gate, up = np.split(x.astype(np.float64) @ weight.astype(np.float64), 2, axis=1)
    slope = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3) if is_gelu else gate
    want = gate / (1 + np.exp(-slope)) * up
    used, count = some_rows(x, rng)

    def multiply(x, count):
        options = {"batch_invariant": batch_invariant, "is_gelu": is_gelu, "threads": threads}
        return call("jaxllm_gated_matmul", [x, weight, count], [((len(x), width), out_dtype)], **options)[0]

    def of_one_set():
        got = multiply(x, count)
        limit = (1e-2 if got.dtype.name == "bfloat16" else 1e-5) * (1 + np.abs(gate)) * (1 + np.abs(up))
        assert (np.abs(got.astype(np.float64) - want) <= limit)[:used].all()
        if batch_invariant and used:
            row = rng.integers(used)
            alone = multiply(x[row : row + 1], ALL)[0]
            np.testing.assert_array_equal(alone.astype(np.float32), got[row].astype(np.float32))

    with_each_set(of_one_set)


class Weight(NamedTuple):
    """As the custom calls take it (see kernels.h), its numbers, and the magnitudes that they are sums of."""

    arrays: list[np.ndarray]  # codes, scales, offsets, outer
    dense: np.ndarray
    sizes: np.ndarray


def weight_of(rng, codes, scales, inputs, outputs, group, has_offsets, has_outer):
    by_output = group is None
    shape = (outputs, inputs) if by_output else (inputs, outputs)
    scale_shape = (outputs,) if by_output else (inputs // group, outputs)
    held = codes_of(codes, shape, rng)
    values = (
        2.0 ** rng.integers(-9, 4, scale_shape) if scales == "float8_e8m0fnu" else rng.uniform(0.01, 1, scale_shape)
    )
    scale = poisoned(values, -1, rng).astype(np.dtype(scales))
    offsets = rng.normal(size=scale_shape).astype(np.float32) if has_offsets and not by_output else NOTHING
    outer = rng.uniform(0.5, 2, outputs).astype(np.float32) if has_outer else NOTHING
    wide, wide_scale = held.astype(np.float32).astype(np.float64), scale.astype(np.float64)
    dense = wide.T * wide_scale if by_output else wide * wide_scale.repeat(group, axis=0)
    added = offsets.astype(np.float64).repeat(group, axis=0) if offsets.size else np.zeros(1)
    factor = outer.astype(np.float64) if has_outer else 1
    return Weight([held, scale, offsets, outer], (dense + added) * factor, (np.abs(dense) + np.abs(added)) * factor)


weights = {
    "codes": st.sampled_from(CODES),
    "scales": st.sampled_from(SCALES),
    "group": st.sampled_from([None, None, 1, 3, 16, 32, 64, 128]),
    "groups": st.integers(1, 30),
    "has_offsets": st.booleans(),
    "has_outer": st.booleans(),
}


@fuzzed
@given(rows=rows_of_x, outputs=wide, dtypes=dtypes, threads=threads, seed=seeds, **weights)
def test_quantised_products(rows, outputs, dtypes, threads, seed, codes, scales, group, groups, has_offsets, has_outer):
    rng, (dtype, out_dtype) = np.random.default_rng(seed), dtypes
    inputs = groups * min(group or 17, 600 // groups) if group is None else groups * group
    rows = min(rows, 2**22 // max(inputs * outputs, 1))  # the portable code is slow
    weight = weight_of(rng, codes, scales, inputs, outputs, group, has_offsets, has_outer)
    x = poisoned(rng.normal(size=(rows, inputs)), 0, rng).astype(dtype)
    used, count = some_rows(x, rng)

    def of_one_set():
        options = {"by_output": group is None, "threads": threads}
        (got,) = call("jaxllm_quantized_matmul", [x, *weight.arrays, count], [((rows, outputs), out_dtype)], **options)
        check(got[:used], x[:used], weight.dense, weight.sizes)

    with_each_set(of_one_set)


class PanelWeight(NamedTuple):
    """Of some experts; `values` are float64 `[experts, inputs, outputs]`, and what they are a sum of."""

    panels: np.ndarray
    outer: np.ndarray
    options: dict
    values: np.ndarray
    sizes: np.ndarray


def panel_weight(rng, experts, codes, scales, group, groups, outputs, layout, has_outer, threads) -> PanelWeight:
    """Put in panels by code without vectors. One by output has a group alone."""
    inputs, has_offsets, by_output = groups * group, layout == "with offsets", layout == "by output"
    group = inputs if by_output else group
    scales = "float16" if has_offsets and scales.startswith("float8") else scales  # which hold no sign, or few numbers
    each = [weight_of(rng, codes, "float32", inputs, outputs, group, has_offsets, has_outer) for _ in range(experts)]
    codes_, scale, offsets, outer = (np.stack(arrays) for arrays in zip(*(w.arrays for w in each), strict=True))
    scale = np.nan_to_num(scale, nan=0.5)
    scale = (2.0 ** np.rint(np.log2(scale)) if scales == "float8_e8m0fnu" else scale).astype(np.dtype(scales))
    offsets = offsets.astype(np.dtype(scales)) if has_offsets else np.zeros(0, np.dtype(scales))
    lead = () if experts == 1 else (experts,)
    kind = {"codes": codes, "group": group, "scales": scales, "has_offsets": has_offsets}
    shape = lead + in_panels.panels_shape(inputs, outputs, **kind)
    with using("portable"):
        given = [codes_.swapaxes(1, 2).copy(), scale[:, 0]] if by_output else [codes_, scale]
        given = [array.reshape(*lead, *array.shape[1:]) for array in given]
        offsets_ = offsets.reshape(given[1].shape) if has_offsets else offsets
        (panels,) = call("jaxllm_make_panels", [*given, offsets_], [(shape, np.uint8)], threads=threads)
    numbers = {"code": in_panels.CODES[codes][0], "numbers": in_panels.SCALES[scales][0]}
    numbers["part"] = math.gcd(group, in_panels.PART)
    options = {name: np.int64(value) for name, value in numbers.items()} | {"has_offsets": has_offsets}
    factor = outer.astype(np.float64)[:, None] if has_outer else 1.0
    scaled = codes_.astype(np.float32).astype(np.float64) * scale.astype(np.float64).repeat(group, axis=1)
    added = offsets.astype(np.float64).repeat(group, axis=1) if has_offsets else np.zeros(1)
    outer = outer.reshape(-1) if has_outer else NOTHING
    return PanelWeight(panels, outer, options, (scaled + added) * factor, (np.abs(scaled) + np.abs(added)) * factor)


def check_rounded(got, x, part, values, sizes):
    """That `got` is the product of rows that were rounded in parts."""
    limit, known = (1e-6 if got.dtype == np.float32 else 5e-3), [rounded_in_parts(x, part, kind) for kind in WIDTHS]
    errors = [np.abs(got.astype(np.float64) - each @ values) for each in known]
    assert any((error <= limit * (np.abs(each) @ sizes)).all() for each, error in zip(known, errors, strict=True))


panel_weights = {
    "codes": st.sampled_from([*in_panels.CODES]),
    "scales": st.sampled_from([*in_panels.SCALES]),
    "group": st.sampled_from([8, 16, 16, 24, 32, 32, 96, 128]),
    "groups": st.integers(1, 8),
    "layout": st.sampled_from(["by group", "with offsets", "by output"]),
    "has_outer": st.booleans(),
    "dtypes": dtypes,
    "threads": threads,
    "seed": seeds,
}


def rows_for(rng, rows, inputs, dtype):
    x = (rng.normal(size=(rows, inputs)) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(dtype)
    x[rng.integers(rows), : inputs // 2] = 0
    return x


@fuzzed
@given(rows=st.integers(1, 40), outputs=sizes, **panel_weights)
def test_products_in_panels(rows, outputs, dtypes, threads, seed, groups, group, **kind):
    """Every instruction set reads the panels that another one has made."""
    rng, (dtype, out_dtype) = np.random.default_rng(seed), dtypes
    weight = panel_weight(rng, 1, outputs=outputs, groups=groups, group=group, threads=threads, **kind)
    x = rows_for(rng, rows, groups * group, dtype)
    used, count = some_rows(x, rng)

    def of_one_set():
        arrays, results = [x, weight.panels, weight.outer, count], [((rows, outputs), out_dtype)]
        (got,) = call("jaxllm_panel_matmul", arrays, results, threads=threads, **weight.options)
        if used:
            part = int(weight.options["part"])
            check_rounded(got[:used], x[:used], part, weight.values[0], weight.sizes[0])

    with_each_set(of_one_set)


@fuzzed
@given(
    lengths=st.lists(st.integers(0, 5) | st.sampled_from([12, 13, 40]), min_size=2, max_size=5),
    around=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    outputs=sizes,
    **panel_weights,
)
def test_experts_in_panels(lengths, around, outputs, dtypes, threads, seed, groups, group, **kind):
    """Rows of nobody are NaN."""
    rng, (dtype, out_dtype), experts = np.random.default_rng(seed), dtypes, len(lengths)
    weight = panel_weight(rng, experts, outputs=outputs, groups=groups, group=group, threads=threads, **kind)
    offsets = around[0] + np.cumsum([0, *lengths], dtype=np.int32)
    x = rows_for(rng, max(1, offsets[-1] + around[1]), groups * group, dtype)
    x[: offsets[0]] = x[offsets[-1] :] = np.nan

    def of_one_set():
        arrays, results = [x, weight.panels, weight.outer, offsets], [((len(x), outputs), out_dtype)]
        (got,) = call("jaxllm_grouped_panel_matmul", arrays, results, threads=threads, **weight.options)
        assert (got[: offsets[0]] == 0).all() and (got[offsets[-1] :] == 0).all()
        for i in range(experts):
            some = slice(offsets[i], offsets[i + 1])
            part = int(weight.options["part"])
            check_rounded(got[some], x[some], part, weight.values[i], weight.sizes[i])

    with_each_set(of_one_set)


@fuzzed
@given(
    lengths=st.lists(st.integers(0, 5) | st.sampled_from([12, 13, 100, 241]), min_size=1, max_size=5),
    around=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    outputs=sizes,
    is_dense=st.booleans(),
    dtypes=dtypes,
    threads=threads,
    seed=seeds,
    **weights,
)
def test_products_of_experts(
    lengths, around, outputs, is_dense, dtypes, threads, seed, codes, scales, group, groups, has_offsets, has_outer
):
    """Rows of nobody are NaN, and so are weights of experts without rows, where their dtype has one."""
    rng, (dtype, out_dtype), experts = np.random.default_rng(seed), dtypes, len(lengths)
    inputs = groups * (group or 1)
    if inputs % 2:
        outputs += outputs % 2  # no expert begins within a byte
    offsets = around[0] + np.cumsum([0, *lengths], dtype=np.int32)
    x = rng.normal(size=(offsets[-1] + around[1], inputs)).astype(dtype)
    x[: offsets[0]] = x[offsets[-1] :] = np.nan
    if is_dense:
        kind = np.float32 if dtype == np.float32 or seed % 2 else BF16
        each = [rng.normal(size=(inputs, outputs)).astype(kind) for _ in lengths]
        each = [Weight([w, *[NOTHING] * 3], w.astype(np.float64), np.abs(w.astype(np.float64))) for w in each]
        poison = 0
    else:
        parts = codes, scales, inputs, outputs, group, has_offsets, has_outer
        each, poison = [weight_of(rng, *parts) for _ in lengths], 1
    arrays = [
        np.stack(stacked) if stacked[0].size else NOTHING for stacked in zip(*(w.arrays for w in each), strict=True)
    ]
    arrays[poison][np.array(lengths) == 0] = np.nan

    def of_one_set():
        options = {"by_output": not is_dense and group is None, "threads": threads}
        result = (len(x), outputs), out_dtype
        (got,) = call("jaxllm_grouped_matmul", [x, offsets, *arrays], [result], **options)
        assert (got[: offsets[0]] == 0).all() and (got[offsets[-1] :] == 0).all()
        for i in range(experts):
            some = slice(offsets[i], offsets[i + 1])
            check(got[some], x[some], each[i].dense, each[i].sizes)

    with_each_set(of_one_set)
