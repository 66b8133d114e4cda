"""Makes quantised weights of dense ones, each rounded to the nearest code: `--quantization int8|int4|fp8`.

Activations are not looked at. Sums, quotients and errors are float32, on JAX's devices.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxllm.checkpoint.quantized.module import StoredWeight
from jaxllm.models.quantized import WeightForm

KINDS = ("int8", "int4", "fp8")
_LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}  # code that the largest value of a scale becomes
_SMALLEST = {"int8": -127.0, "int4": -8.0, "float8_e4m3fn": -448.0}  # code there is; past the ends values are clipped
_GROUP, _LEAST_GROUP = 128, 16
_SHRINKS = tuple(1 - 0.01 * i for i in range(21))  # of int4's scales: 1 to 0.8
_CHUNK = 2**24  # values of a host's array that are on the device at once


def form_of(name: str, inputs: int) -> WeightForm:
    """The form of a weight with so many inputs that `--quantization` asks for by `name`.

    "int8" and "fp8" have a scale for each output, "int4" one for each group of 128 inputs, or of the largest power of
    two below it that divides them. `ValueError` for another name, and where no group of 16 or more divides the inputs.
    """
    if name == "int8":
        return WeightForm(codes="int8", group=None, scales="float32")
    if name == "fp8":
        return WeightForm(codes="float8_e4m3fn", group=None, scales="float32", activations="float8_e4m3fn")
    if name != "int4":
        raise ValueError(f"quantization={name!r:.100} is unknown; choose one of {', '.join(KINDS)}")
    group = math.gcd(inputs, _GROUP)
    if group < _LEAST_GROUP:
        raise ValueError(
            f"quantization='int4' has scales of groups of {_LEAST_GROUP} to {_GROUP} inputs, a power of two, and none "
            f"divides {inputs} inputs; choose int8 or fp8"
        )
    return WeightForm(codes="int4", group=group, scales="bfloat16")


def quantize(weight: Float[np.ndarray, "out in"] | Float[Array, "out in"], form: WeightForm) -> StoredWeight:
    """`weight` in this form, as arrays of the kind that it is: of a host's array some rows at a time are on the device.

    `ValueError` for values that are not finite, and for a form that is not one of codes and scales alone.
    """
    check_form(form, weight.shape[1])
    if isinstance(weight, jax.Array):
        codes, scales = codes_and_scales(weight, form)
        _check_finite(np.asarray(_finite_rows(scales)), 0)
        return StoredWeight(codes, scales)  # type: ignore[arg-type] - of the device's
    per_output = () if form.group is None else (weight.shape[1] // form.group,)
    codes = np.empty(weight.shape, jnp.dtype(form.codes))
    scales = np.empty((len(weight), *per_output), jnp.dtype(form.scales))
    num_rows = max(1, _CHUNK // weight.shape[1])
    for start in range(0, len(weight), num_rows):
        rows = slice(start, start + num_rows)
        of_rows = codes_and_scales(jnp.asarray(weight[rows]), form)
        codes[rows], scales[rows] = map(np.asarray, of_rows)
        _check_finite(np.asarray(_finite_rows(of_rows[1])), start)
    return StoredWeight(codes, scales)


@partial(jax.jit, static_argnames="form")
def codes_and_scales(
    weight: Float[Array, "*outputs in"], form: WeightForm
) -> tuple[Shaped[Array, "*outputs in"], Float[Array, "*outputs_and_groups"]]:
    """Codes and scales of `weight`: the largest magnitude of a scale's values over the largest code, rounded to the
    scales' dtype before codes are chosen by it. Of int4 it is the one of 21 scales, down to 0.8 of that, with the least
    squared error ("MSE clipping"). Values that are not finite make the scale NaN.
    """
    values = weight.astype(jnp.float32)
    values = values.reshape(*values.shape[:-1], -1, form.group or values.shape[-1])
    largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    # By the reciprocal, which XLA would make of a quotient by a constant, here and there.
    whole = jnp.where(jnp.isfinite(largest), largest, jnp.nan) * np.float32(1 / _LARGEST[form.codes])
    scales = _rounded(whole, form) if form.codes != "int4" else _best_scales(values, whole, form)
    codes = _codes(values, scales, form).astype(form.codes)
    shape = scales.shape[:-2] if form.group is None else scales.shape[:-1]
    return codes.reshape(weight.shape), scales.reshape(shape).astype(form.scales)


def _best_scales(
    values: Float[Array, "*outputs groups group"], whole: Float[Array, "*outputs groups 1"], form: WeightForm
) -> Float[Array, "*outputs groups 1"]:
    """Of `whole` times each of `_SHRINKS` the ones with the least squared error, the largest of equal ones."""

    def error(scales: Array) -> Array:
        return jnp.sum(jnp.square(_codes(values, scales, form) * scales - values), axis=-1, keepdims=True)

    def compare(best: tuple[Array, Array], shrink: Array) -> tuple[tuple[Array, Array], None]:
        scales = _rounded(whole * shrink, form)
        errors = error(scales)
        is_less = errors < best[1]
        return (jnp.where(is_less, scales, best[0]), jnp.where(is_less, errors, best[1])), None

    first = _rounded(whole * _SHRINKS[0], form)
    best, _ = jax.lax.scan(compare, (first, error(first)), jnp.asarray(_SHRINKS[1:], jnp.float32))
    return best[0]


def _codes(values: Float[Array, "*shape"], scales: Float[Array, "..."], form: WeightForm) -> Float[Array, "*shape"]:
    """The codes nearest to values, of two as near the even one, as float32."""
    codes = jnp.clip(values / scales, _SMALLEST[form.codes], _LARGEST[form.codes])
    if jnp.issubdtype(jnp.dtype(form.codes), jnp.integer):
        return jnp.round(codes)
    return codes  # rounded by the cast


def _rounded(scales: Float[Array, "*shape"], form: WeightForm) -> Float[Array, "*shape"]:
    """To the scales' dtype, as float32; 1 in the place of zero, and of what a device may take for it."""
    scales = scales.astype(form.scales).astype(jnp.float32)
    return jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)


@jax.jit
def _finite_rows(scales: Float[Array, "out ..."]) -> Shaped[Array, " out"]:
    return jnp.all(jnp.isfinite(scales.astype(jnp.float32)), axis=tuple(range(1, scales.ndim)))


def _check_finite(is_finite: np.ndarray, first_row: int) -> None:
    if not is_finite.all():
        raise ValueError(
            f"output {first_row + int(is_finite.argmin())} of the weight has values that are not finite, or too large "
            "for its scales; they can't be quantised. Download the file again"
        )


def check_form(form: WeightForm, inputs: int) -> None:
    """ValueError for a form that dense weights of so many inputs can't be given."""
    more = form.has_offsets or form.has_outer or form.is_reordered
    if form.codes not in _LARGEST or more or not form.scales.startswith(("float32", "bfloat16", "float16")):
        raise ValueError(
            f"dense weights can't be quantised to {form}; only to int8, int4 and fp8 codes with scales. Load the model "
            "dense for weights that change: its original checkpoint, or a GGUF file with a dtype"
        )
    if form.group is not None and inputs % form.group:
        raise ValueError(f"groups of {form.group} do not divide {inputs} inputs; choose a group that does")
