"""Dense weights made quantised, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.checkpoint.quantized import quantize as module
from jaxllm.checkpoint.quantized.quantize import form_of, quantize
from jaxllm.models.quantized import WeightForm

SHRINKS = [1 - 0.01 * i for i in range(21)]


def weight_of(*shape: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """Values of Student's t, of which a few are far out, as in models."""
    return (np.random.default_rng(seed).standard_t(4, shape) * scale).astype(np.float32)


def dense(stored, form: WeightForm) -> np.ndarray:
    codes, scales = np.asarray(stored.codes, np.float32), np.asarray(stored.scales, np.float32)
    if form.group is None:
        return codes * scales[:, None]
    return (codes.reshape(*scales.shape, -1) * scales[..., None]).reshape(codes.shape)


def test_forms_by_name():
    assert form_of("int8", 100) == WeightForm(codes="int8", group=None, scales="float32")
    fp8 = WeightForm(codes="float8_e4m3fn", group=None, scales="float32", activations="float8_e4m3fn")
    assert form_of("fp8", 100) == fp8
    int4 = WeightForm(codes="int4", group=128, scales="bfloat16")
    assert form_of("int4", 4096) == int4
    groups = {inputs: form_of("int4", inputs).group for inputs in (576, 1376, 11008, 48, 16)}
    assert groups == {576: 64, 1376: 32, 11008: 128, 48: 16, 16: 16}


@pytest.mark.parametrize("inputs", [8, 24, 100, 127])
def test_inputs_that_no_group_divides_are_refused(inputs):
    with pytest.raises(ValueError, match=rf"'int4' .* none divides {inputs} inputs; choose int8 or fp8"):
        form_of("int4", inputs)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="quantization='int3' is unknown; choose one of int8, int4, fp8"):
        form_of("int3", 128)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_int8_is_rounded_to_the_nearest_half_to_even(dtype):
    weight = weight_of(5, 24).astype(dtype)
    weight[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -127]  # a scale of 1, or next to it
    weight[0, 6:] = 0
    form = form_of("int8", 24)
    stored = quantize(weight, form)
    exact = weight.astype(np.float32)
    scales = np.abs(exact).max(axis=1) * np.float32(1 / 127)
    np.testing.assert_array_equal(stored.scales, scales)
    np.testing.assert_array_equal(stored.codes, np.rint(exact / scales[:, None]))
    assert stored.codes[0, :6].tolist() == [127, 0, 2, 2, 0, -127]
    assert (stored.codes.dtype, stored.scales.dtype) == (np.int8, np.float32)
    assert np.all(np.abs(dense(stored, form) - exact) <= scales[:, None] * 0.5001)


def test_fp8_is_that_of_ml_dtypes_and_never_nan():
    weight = weight_of(64, 48)
    weight[3] *= 1e-6
    form = form_of("fp8", 48)
    stored = quantize(weight, form)
    scales = np.abs(weight).max(axis=1) * np.float32(1 / 448)
    np.testing.assert_array_equal(stored.scales, scales)
    want = np.clip(weight / scales[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert stored.codes.dtype == want.dtype
    np.testing.assert_array_equal(stored.codes.view(np.uint8), want.view(np.uint8))
    largest = np.abs(stored.codes.astype(np.float32)).max(axis=1)
    assert np.all(largest == 448)


def best_int4(group: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Code and scale by trying every shrink factor, in float64 but for the scales."""
    whole = np.abs(group).max() * np.float32(1 / 7)
    scales = [np.float32(np.float32(whole * np.float32(shrink)).astype(dtype)) for shrink in SHRINKS]
    codes = [np.clip(np.rint(group / scale), -8, 7) for scale in scales]
    errors = [np.square(code.astype(float) * scale - group).sum() for code, scale in zip(codes, scales, strict=True)]
    best = int(np.argmin(errors))
    return codes[best], scales[best]


@pytest.mark.parametrize("scales", ["bfloat16", "float16", "float32"])
def test_int4_has_the_scale_of_least_squared_error(scales):
    weight = weight_of(6, 96)
    form = dataclasses.replace(form_of("int4", 96), scales=scales)
    assert form.group == 32
    stored = quantize(weight, form)
    assert stored.codes.dtype == ml_dtypes.int4 and stored.codes.shape == (6, 96)
    assert stored.scales.shape == (6, 3) and stored.scales.dtype == jnp.dtype(scales)
    for row, codes, of_row in zip(weight.reshape(6, 3, 32), stored.codes.reshape(6, 3, 32), stored.scales, strict=True):
        for group, code, scale in zip(row, codes, of_row, strict=True):
            want, want_scale = best_int4(group, jnp.dtype(scales))
            assert np.float32(scale) == want_scale
            np.testing.assert_array_equal(code.astype(np.float32), want)


def test_clipping_lessens_the_error_of_int4():
    weight, form = weight_of(32, 256), form_of("int4", 256)
    plain = np.abs(weight.reshape(32, 2, 128)).max(axis=2, keepdims=True) / 7
    rounded = (np.clip(np.rint(weight.reshape(32, 2, 128) / plain), -8, 7) * plain).reshape(32, 256)
    got = np.square(dense(quantize(weight, form), form) - weight).sum()
    assert got < 0.9 * np.square(rounded - weight).sum()


def test_the_most_negative_code_is_used():
    weight = np.full((1, 16), 0.07, np.float32)
    weight[0, 0] = -8 * 0.01
    assert -8 in quantize(weight, dataclasses.replace(form_of("int4", 16), scales="float32")).codes.astype(int)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_zeros_stay_zeros(name):
    weight = weight_of(4, 32)
    weight[1] = 0
    weight[2] = np.float32(1e-39)  # devices may take it for zero
    form = form_of(name, 32)
    stored = quantize(weight, form)
    assert np.all(stored.scales[1].astype(np.float32) == 1) and np.all(stored.codes[1].astype(np.float32) == 0)
    assert np.all(np.abs(dense(stored, form)[2]) < 1e-37)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_chunks_and_devices_make_the_same(name, monkeypatch):
    weight, form = weight_of(37, 64), form_of(name, 64)
    want = quantize(weight, form)
    on_device = quantize(jnp.asarray(weight), form)
    assert isinstance(on_device.codes, jax.Array) and isinstance(on_device.scales, jax.Array)
    monkeypatch.setattr(module, "_CHUNK", 64 * 10)
    in_chunks = quantize(weight, form)
    assert isinstance(in_chunks.codes, np.ndarray)
    for other in (on_device, in_chunks):
        for got, wanted in zip(other[:2], want[:2], strict=True):
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name, value, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 32 * 3)
    weight = weight_of(8, 32)
    weight[5, 31] = value
    for given in (weight, jnp.asarray(weight)):
        with pytest.raises(ValueError, match="output 5 of the weight has values that are not finite"):
            quantize(given, form_of(name, 32))


def test_scales_out_of_range_are_refused():
    weight, form = np.full((2, 16), 1e30, np.float32), dataclasses.replace(form_of("int4", 16), scales="float16")
    with pytest.raises(ValueError, match="output 0 of the weight has values .* too large for its scales"):
        quantize(weight, form)


@pytest.mark.parametrize(
    "changes", [{"codes": "uint4"}, {"has_offsets": True}, {"has_outer": True}, {"is_reordered": True}]
)
def test_forms_that_are_only_read_are_refused(changes):
    with pytest.raises(ValueError, match="dense weights can't be quantised to WeightForm"):
        quantize(weight_of(2, 32), dataclasses.replace(form_of("int4", 32), **changes))
    with pytest.raises(ValueError, match="groups of 32 do not divide 48 inputs"):
        quantize(weight_of(2, 48), form_of("int4", 32))
