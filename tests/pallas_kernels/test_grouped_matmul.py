"""Products of groups of rows with a weight each: every implementation against a loop over the experts, in numpy."""

import math
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.grouped_matmul import product
from jaxllm.pallas_kernels.grouped_matmul.api import OP
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from tests.pallas_kernels.test_quantized_matmul import CODES, FORMS, TOLERANCE, weight_of

needs_library = pytest.mark.skipif(
    not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build"
)
IMPLEMENTATIONS = ["reference", pytest.param("native", marks=needs_library)]
# Rows of each of six experts, and of nobody before and after them.
ROUTINGS = {
    "one row each of some": ([0, 1, 0, 1, 1, 1], 0, 0),
    "uneven": ([3, 0, 40, 1, 0, 13], 2, 5),
    "all to one": ([0, 0, 0, 300, 0, 0], 0, 0),
    "nobody's": ([0, 0, 0, 0, 0, 0], 4, 3),
}


def experts_of(weights) -> QuantizedWeight:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *weights)


def check(fn, weight, inputs, routing, dtype="float32", out_dtype=None, seed=0):
    """That `fn(x, weight, offsets)` is as near to the sums as they are to each other in another order. Rows of nobody
    and the weights of experts without rows are NaN, where the dtype has one."""
    sizes, before, after = routing
    rng, offsets = np.random.default_rng(seed), before + np.cumsum([0, *sizes])
    x = rng.normal(size=(offsets[-1] + after, *inputs))
    x[:before] = x[offsets[-1] :] = np.nan
    x = jnp.asarray(x, dtype)
    unused = np.flatnonzero(np.asarray(sizes) == 0)
    poisoned = weight
    if len(unused) and isinstance(weight, QuantizedWeight):
        poisoned = weight._replace(scales=weight.scales.at[unused].set(jnp.nan))
    elif len(unused):
        poisoned = weight.at[unused].set(jnp.nan)
    got = jax.jit(fn)(x, poisoned, jnp.asarray(offsets, jnp.int32))
    if isinstance(weight, QuantizedWeight):
        weight = jax.jit(jax.vmap(partial(QuantizedWeight.dense, num_inputs=len(inputs))))(weight)
    dense = np.asarray(weight).astype(np.float64)
    outputs = dense.shape[1 + len(inputs) :]
    assert got.shape == (len(x), *outputs) and got.dtype == (out_dtype or dtype)
    dense = dense.reshape(len(dense), math.prod(inputs), -1)
    flat = np.asarray(x).astype(np.float64).reshape(len(x), math.prod(inputs))
    got = np.asarray(got).astype(np.float64).reshape(len(x), math.prod(outputs))
    assert (got[:before] == 0).all() and (got[offsets[-1] :] == 0).all()
    for expert, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        rows = flat[begin:end]
        error, size = np.abs(got[begin:end] - rows @ dense[expert]), np.abs(rows) @ np.abs(dense[expert])
        assert (error <= TOLERANCE[out_dtype or dtype] * size + 1e-30).all(), expert


def implementation(name, inputs, **options):
    return partial(product, num_inputs=len(inputs), implementation=name, **options)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_dense_experts(name, dtype, routing):
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(6, 2, 35, 3, 15)), dtype)
    check(implementation(name, (2, 35)), weight, (2, 35), ROUTINGS[routing], dtype)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sums_that_are_not_rounded(name):
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(6, 64, 40)), "bfloat16")
    options = {"out_dtype": "float32"}
    check(implementation(name, (64,), **options), weight, (64,), ROUTINGS["uneven"], "bfloat16", **options)


@needs_library
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("form", FORMS)
def test_quantised_experts_natively(form, codes):
    inputs, *rest = FORMS[form]
    weight = experts_of([weight_of(codes, inputs, *rest, seed=seed) for seed in range(6)])
    check(implementation("native", inputs), weight, inputs, ROUTINGS["uneven"])
    check(implementation("native", inputs), weight, inputs, ROUTINGS["one row each of some"], "bfloat16")


@pytest.mark.parametrize(("form", "codes"), list(zip(FORMS, CODES, strict=True)))
def test_quantised_experts_by_the_reference(form, codes):
    inputs, *rest = FORMS[form]
    weight = experts_of([weight_of(codes, inputs, *rest, seed=seed) for seed in range(6)])
    check(implementation("reference", inputs), weight, inputs, ROUTINGS["uneven"])


@needs_library
@settings(max_examples=25, deadline=None)
@given(
    codes=st.sampled_from([None, *CODES]),
    sizes=st.lists(st.integers(0, 5) | st.sampled_from([12, 13, 100, 241]), min_size=1, max_size=5),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    outputs=st.integers(1, 100),
    groups=st.integers(1, 20),
    group=st.sampled_from([None, 1, 3, 16, 64]),
    seed=st.integers(0, 99),
)
def test_native_products_of_any_shape(codes, sizes, before, after, outputs, groups, group, seed):
    inputs = (groups * (group or 1),)
    if codes is None:
        weight = jnp.asarray(np.random.default_rng(seed).normal(size=(len(sizes), *inputs, outputs)), "float32")
    else:
        outputs += outputs % 2 if inputs[0] % 2 else 0  # no expert begins within a byte
        options = {"group": group, "offsets": group is not None}
        weight = experts_of([weight_of(codes, inputs, (outputs,), seed=i, **options) for i in range(len(sizes))])
    check(implementation("native", inputs), weight, inputs, (sizes, before, after), seed=seed)


def test_the_reference_s_gradient():
    """Equal to that of all rows times all experts, of which each row's own is kept."""
    rng = np.random.default_rng(0)
    sizes, before = [3, 0, 40, 1], 2
    offsets = jnp.asarray(before + np.cumsum([0, *sizes]), jnp.int32)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((50, 8), (4, 8, 5)))
    target = jnp.asarray(rng.normal(size=(50, 5)), jnp.float32)
    owners = jnp.asarray(np.repeat([4, 0, 1, 2, 3, 4], [before, *sizes, 4]))

    def masked(x, weight):
        return jnp.einsum("ra,eab,re->rb", x, weight, jax.nn.one_hot(owners, 4))

    def gradient(fn):
        return jax.jit(jax.grad(lambda x, weight: jnp.sum((fn(x, weight) - target) ** 2), argnums=(0, 1)))(x, weight)

    got = gradient(lambda x, weight: product(x, weight, offsets, implementation="reference"))
    for own, want in zip(got, gradient(masked), strict=True):
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-4)


_CHECKSUMS = """
import jax.numpy as jnp, numpy as np
from jaxllm.pallas_kernels.grouped_matmul import product
rng = np.random.default_rng(0)
sizes = [1, 0, 60, 2, 300]
offsets = jnp.asarray(np.cumsum([0, *sizes]), jnp.int32)
x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((sum(sizes), 300), (5, 300, 485)))
print(np.asarray(product(x, weight, offsets, implementation="native")).tobytes().hex()[::37])
"""


@needs_library
@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit():
    results = [
        subprocess.run(
            [sys.executable, "-c", _CHECKSUMS],
            env=os.environ | {"NPROC": threads, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            check=True,
            capture_output=True,
        ).stdout
        for threads in ("1", "7")
    ]
    assert len(results[0]) > 1000 and results[0] == results[1]


@needs_library
@pytest.mark.parametrize("offsets", [[0, 2, 1], [0, 1, 4], [-1, 1, 2]])
def test_native_offsets_that_fall_or_leave_the_rows_are_an_error(offsets):
    x, weight = jnp.ones((3, 4)), jnp.ones((2, 4, 5))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the offsets fall or leave the rows"):
        jax.block_until_ready(product(x, weight, jnp.array(offsets, jnp.int32), implementation="native"))


@needs_library
def test_cpus_multiply_natively_on_one_device_and_on_a_mesh():
    x, offsets = jnp.ones((2, 64)), jnp.zeros(4, jnp.int32)
    quantised = experts_of([weight_of("int4", (64,), (64,), 32)] * 3)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    for placement in (Placement.default(), Placement(mesh)):
        for weight in (quantised, *(jnp.ones((3, 64, 8), dtype) for dtype in ("float32", "bfloat16", "float16"))):
            assert OP.preferred_at(placement, x, weight, offsets, num_inputs=1) == "native"
    within_a_byte = experts_of([weight_of("int4", (3,), (5,))] * 3)
    others = ((x.astype(jnp.float16), quantised), (x, jnp.ones((3, 64, 8), jnp.int8)), (x[:, :3], within_a_byte))
    for operands in others:
        assert OP.preferred_at(Placement.default(), *operands, offsets, num_inputs=1) == "reference"
