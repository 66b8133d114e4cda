"""Products with quantised weights: every implementation against the weight's float32 values, in numpy."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight, eight_bits, gpu, gpu_kernel, panels, product, tpu
from jaxllm.pallas_kernels.quantized_matmul.api import OP

needs_library = pytest.mark.skipif(
    not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build"
)
CODES = ("int8", "int4", "uint4", "float8_e4m3fn", "float4_e2m1fn")
# Of the sum of products' magnitudes. bfloat16 rounds the result, and the reference's products are of rounded codes.
TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-3}


def codes_of(name: str, shape, rng) -> np.ndarray:
    """Random codes of every bit pattern but NaN's."""
    if name == "float8_e4m3fn":
        bits = rng.integers(0, 256, shape).astype(np.uint8)
        return np.where(bits & 0x7F == 0x7F, 1, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    if name == "float4_e2m1fn":
        return np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)[rng.integers(0, 16, shape)]
    low, high = {"int8": (-128, 128), "int4": (-8, 8), "uint4": (0, 16)}[name]
    return rng.integers(low, high, shape).astype(name if name == "int8" else getattr(ml_dtypes, name))


def weight_of(codes, inputs, outputs, group=None, scales="float32", offsets=False, outer=False, seed=0):
    rng = np.random.default_rng(seed)
    groups = () if group is None else (*inputs[:-1], inputs[-1] // group)
    code_shape = (*outputs, *inputs) if group is None else (*groups, group, *outputs)
    scale_shape = outputs if group is None else (*groups, 1, *outputs)
    powers = scales == "float8_e8m0fnu"
    values = 2.0 ** rng.integers(-9, 4, scale_shape) if powers else rng.uniform(0.001, 1, scale_shape)
    return QuantizedWeight(
        jnp.asarray(codes_of(codes, code_shape, rng)),
        jnp.asarray(values.astype(np.float32)).astype(scales),
        jnp.asarray(rng.normal(size=scale_shape), jnp.float32) if offsets else None,
        jnp.asarray(rng.uniform(0.5, 2, outputs), jnp.float32) if outer else None,
    )


def check(weight, inputs, rows, fn, dtype="float32"):
    """That `fn(x, weight)` is as near as sums are, for each count of `rows`."""
    rng = np.random.default_rng(0)
    xs = [jnp.asarray(rng.normal(size=(count, *inputs)), dtype) for count in rows]

    def run(xs, weight):
        return [fn(x, weight) for x in xs], weight.dense(len(inputs))

    results, dense = jax.jit(run)(xs, weight)
    outputs = dense.shape[len(inputs) :]
    dense = np.asarray(dense).astype(np.float64).reshape(math.prod(inputs), -1)
    for x, got in zip(xs, results, strict=True):
        assert got.dtype == dtype and got.shape == (len(x), *outputs)
        flat, got = (np.asarray(array).astype(np.float64).reshape(len(x), -1) for array in (x, got))
        assert (np.abs(got - flat @ dense) / (np.abs(flat) @ np.abs(dense))).max() < TOLERANCE[dtype]


def implementation(name, inputs):
    return partial(product, num_inputs=len(inputs), implementation=name)


def rounded_in_parts(x, group, dtype):
    """Rows `[n, inputs]` as int8 has them, each part of a group of inputs by its own scale. `dtype`: of products before
    they are rounded, which machines that add to them at once have in more than float32."""
    part = math.gcd(group, panels.PART)
    parts = x.reshape(len(x), x.shape[1] // part, part).astype(np.float32)
    top = np.abs(parts).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(parts.astype(dtype) * inverse.astype(dtype))
    return (codes * (top / np.float32(127))).reshape(x.shape).astype(np.float64)


# Inputs, outputs, group, dtype of scales, offsets, outer.
FORMS = {
    "by output": ((2, 48), (3, 32), None, "bfloat16", False, True),
    "by group": ((2, 64), (4, 24), 32, "float16", True, False),
    "by group of power": ((96,), (64,), 16, "float8_e8m0fnu", False, False),
    "by group of float8": ((2, 64), (64,), 16, "float8_e4m3fn", False, True),
    "by large group": ((640,), (96,), 128, "float32", True, True),
}


@needs_library
@pytest.mark.parametrize("codes", panels.CODES)
@pytest.mark.parametrize("outputs", [14, 130])
@pytest.mark.parametrize(
    ("inputs", "group", "scales", "dtype"),
    [
        (*layout, *kind)
        for layout in [((32,), 32), ((2, 48), 8), ((256,), 128), ((2, 36), None)]
        for kind in [
            ("float16", "float32"),
            ("float32", "bfloat16"),
            ("bfloat16", "float32"),
            ("float8_e4m3fn", "float32"),
        ]
        if layout[1] or kind[0] != "float8_e4m3fn"  # one scale an output has 16 bits, or 32
    ],
)
def test_weights_in_panels(codes, outputs, inputs, group, scales, dtype):
    """The product is that of rows rounded in parts, to the last bits of float32, in whatever number they come. Scales
    may be given more bits than they have."""
    has_offsets, has_outer = codes in ("int8", "uint4") and group is not None, codes == "float4_e2m1fn"
    weight = weight_of(codes, inputs, (outputs,), group, scales, has_offsets, has_outer)
    scales = "float32" if scales in ("bfloat16", "float8_e4m3fn") and weight.offsets is not None else scales
    if weight.offsets is not None:
        weight = weight._replace(offsets=weight.offsets.astype(scales).astype(jnp.float32))
    depth = math.prod(inputs)
    kind = {"codes": codes, "scales": scales, "has_offsets": weight.offsets is not None}
    sizes = {"num_inputs": len(inputs), "outputs": (outputs,)}
    fn = jax.jit(partial(panels.panel_product, **sizes, outer=weight.outer, out_dtype=jnp.float32, **kind))
    held = jax.jit(partial(panels.to_panels, num_inputs=len(inputs), scales=scales))(weight)
    assert held.shape == panels.panels_shape(depth, outputs, group=group or depth, **kind)
    some = jnp.asarray([outputs - 1, 0, outputs // 2], jnp.int32)
    columns = panels.columns(held, some, outer=weight.outer, **kind)
    np.testing.assert_array_equal(columns, weight.dense(len(inputs)).reshape(depth, outputs)[:, some])
    rng = np.random.default_rng(0)
    dense, scaled = (
        np.asarray(each.dense(len(inputs))).astype(np.float64).reshape(-1, outputs)
        for each in (weight, weight._replace(offsets=None))
    )
    sizes = np.abs(scaled) + np.abs(dense - scaled)
    for rows in (1, 2, 7, 33):
        x = rng.normal(size=(rows, depth)) * 10.0 ** rng.integers(-3, 4, (rows, 1))
        x[:, : group or 8] *= rows != 2  # a group of zeros, or all of them
        x = np.asarray(jnp.asarray(x, dtype))
        got = np.asarray(fn(x.reshape(rows, *inputs), held)).astype(np.float64)
        known = (rounded_in_parts(x, group or depth, dtype) for dtype in (np.float32, np.float64))
        assert any((np.abs(got - each @ dense) <= 1e-6 * (np.abs(each) @ sizes)).all() for each in known)


def test_what_can_lie_in_panels():
    assert panels.fits("uint4", 32, "float16") and panels.fits("int8", 16, "float32")
    assert not panels.fits("float8_e4m3fn", 32, "float16") and not panels.fits("int4", 4, "float32")
    assert not panels.fits("int8", 12, "float8_e8m0fnu") and panels.fits("float4_e2m1fn", 16, "float8_e4m3fn")


@needs_library
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("form", FORMS)
def test_the_native_product(form, codes):
    """Every count of rows that has code of its own, and rows of several parts."""
    inputs, *rest = FORMS[form]
    weight = weight_of(codes, inputs, *rest)
    check(weight, inputs, (1, 2, 3, 4, 5, 12, 30), implementation("native", inputs))
    check(weight, inputs, (1, 7), implementation("native", inputs), "bfloat16")


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("form", FORMS)
def test_the_reference(form, codes):
    inputs, *rest = FORMS[form]
    weight = weight_of(codes, inputs, *rest)
    check(weight, inputs, [5], implementation("reference", inputs))
    check(weight, inputs, [5], implementation("tpu", inputs), "bfloat16")


@needs_library
@settings(max_examples=15, deadline=None)
@given(
    codes=st.sampled_from(CODES),
    rows=st.integers(1, 40),
    outputs=st.integers(1, 140),
    groups=st.integers(1, 40),
    group=st.sampled_from([None, 1, 3, 16, 64]),
    seed=st.integers(0, 99),
)
def test_native_products_of_any_shape(codes, rows, outputs, groups, group, seed):
    """Also of codes of 4 bits whose rows begin within a byte."""
    inputs = (groups * (group or 1),)
    weight = weight_of(codes, inputs, (outputs,), group, offsets=group is not None, seed=seed)
    x = np.random.default_rng(seed).normal(size=(rows, *inputs)).astype(np.float32)
    got = np.asarray(product(jnp.asarray(x), weight, num_inputs=1, implementation="native"))
    dense = np.asarray(jax.jit(partial(QuantizedWeight.dense, num_inputs=1))(weight)).astype(np.float64)
    assert (np.abs(got - x @ dense) <= 2e-6 * (np.abs(x) @ np.abs(dense)) + 1e-30).all()


@needs_library
def test_native_products_pass_on_values_that_are_not_finite():
    """Numbers that are NaN in codes and scales, and rows of padding, concern their own outputs and rows alone."""
    weight = weight_of("float8_e4m3fn", (64,), (64,), 32)
    codes = np.asarray(weight.codes).copy()
    codes.view(np.uint8)[0, 3, 5] = 0xFF
    weight = weight._replace(codes=jnp.asarray(codes), scales=weight.scales.at[1, 0, 7].set(jnp.nan))
    for rows in (2, 6):
        x = jnp.ones((rows, 64)).at[1].set(jnp.nan)
        got = np.isnan(np.asarray(product(x, weight, num_inputs=1, implementation="native")))
        assert got[1].all() and set(np.flatnonzero(got[0])) == {5, 7}


def test_small_floats_of_the_gpu_s_kernel():
    """All codes of all kinds, subnormal and NaN."""
    for name, count in (("float8_e4m3fn", 256), ("float8_e8m0fnu", 256), ("float4_e2m1fn", 16)):
        bits = np.arange(count, dtype=np.uint8)
        want = bits.view(getattr(ml_dtypes, name)).astype(np.float32)
        got = jax.jit(partial(gpu_kernel.numbers, name=name, dtype=jnp.float32))(bits)
        is_normal = ~(np.abs(want) < np.finfo(np.float32).tiny) | (want == 0)  # 2^-127, which CPUs may take for 0
        np.testing.assert_array_equal(want[is_normal], np.asarray(got)[is_normal])


@pytest.mark.parametrize(
    ("form", "codes", "rows", "dtype"),
    [
        ("by output", "int8", 3, "float32"),
        ("by output", "int4", 17, "bfloat16"),
        ("by output", "float8_e4m3fn", 1, "bfloat16"),
        ("by group", "uint4", 5, "float32"),
        ("by group of power", "float4_e2m1fn", 2, "bfloat16"),
        ("by group of float8", "int4", 64, "bfloat16"),
        ("by large group", "int8", 5, "float32"),
    ],
)
def test_the_gpu_s_kernel(form, codes, rows, dtype, monkeypatch):
    monkeypatch.setattr(gpu, "MIN_SPLIT", 64)
    inputs, *rest = FORMS[form]
    weight = weight_of(codes, inputs, *rest)
    spec = gpu.plan(*gpu.flatten(jnp.zeros((rows, *inputs)), weight, len(inputs)))
    assert spec.splits > 1 or spec.parts * spec.depth < 2 * gpu.MIN_SPLIT
    check(weight, inputs, [rows], partial(gpu.product, num_inputs=len(inputs), interpret=True), dtype)


@pytest.mark.parametrize("form", ["by output", "by large group"])
def test_gpu_products_of_many_rows(form):
    inputs, *rest = FORMS[form]
    check(weight_of("int4", inputs, *rest), inputs, [70], partial(gpu.product, num_inputs=len(inputs)))


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_rows_of_eight_bits(codes):
    """Equal to the product of the rounded rows; a row of zeros stays one."""
    inputs, *rest = FORMS["by output"]
    weight, dtype = weight_of(codes, inputs, *rest), jnp.dtype(codes)
    x = np.random.default_rng(0).normal(size=(6, *inputs)).astype(np.float32)
    x[1] = 0
    largest = {"int8": 127, "float8_e4m3fn": 448}[codes]
    scale = np.abs(x).max((1, 2), keepdims=True) / largest
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    rounded = np.clip(x / scale, -largest, largest)
    rounded = (np.round(rounded) if codes == "int8" else rounded.astype(dtype).astype(np.float32)) * scale
    want = np.einsum("rab,abcd->rcd", rounded, np.asarray(weight.dense(2)))
    got = np.asarray(jax.jit(partial(eight_bits.product, num_inputs=2))(x, weight))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.nanmax(np.abs(want)))
    assert (got[1] == 0).all()


def test_rows_are_rounded_only_to_what_the_codes_are():
    by_output, by_group = (weight_of("int8", (32,), (32,), group) for group in (None, 16))
    assert eight_bits.supports(by_output, "int8") and not eight_bits.supports(by_output, "float8_e4m3fn")
    assert not eight_bits.supports(by_output, None) and not eight_bits.supports(by_group, "int8")


@pytest.mark.parametrize(("kind", "rounds"), [("TPU v6 lite", True), ("TPU v5p slice", False), ("TPU7x", False)])
def test_tpus_round_many_rows_where_that_is_faster(monkeypatch, kind, rounds):
    monkeypatch.setattr(tpu, "device_kind", lambda: kind)
    weight = weight_of("int8", (32,), (32,))

    def text(rows):
        fn = partial(tpu.product, num_inputs=1, activations="int8")
        return jax.jit(fn).lower(jnp.ones((rows, 32), jnp.bfloat16), weight).as_text()

    assert ("tensor<512x32xi8>" in text(512)) == rounds
    assert "tensor<8x32xi8>" not in text(8)


@pytest.mark.parametrize("capability, rounds", [(80, False), (90, True)])
def test_gpus_that_have_float8_multiply_it(monkeypatch, capability, rounds):
    monkeypatch.setattr(gpu, "compute_capability", lambda: capability)
    weight = weight_of("float8_e4m3fn", (32,), (32,))
    fn = partial(gpu.product, num_inputs=1, activations="float8_e4m3fn")
    text = jax.jit(fn).lower(jnp.ones((128, 32), jnp.bfloat16), weight).as_text()
    assert ("tensor<128x32xf8E4M3FN>" in text) == rounds


@needs_library
def test_cpus_multiply_natively_on_one_device_and_on_a_mesh():
    weight, x = weight_of("int4", (64,), (64,), 32), jnp.ones((2, 64))
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    for placement in (Placement.default(), Placement(mesh)):
        assert OP.preferred_at(placement, x, weight, num_inputs=1) == "native"
    assert OP.preferred_at(Placement.default(), x.astype(jnp.float16), weight, num_inputs=1) == "reference"
