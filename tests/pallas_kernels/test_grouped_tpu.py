"""The TPU's products of groups of rows, interpreted, against numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.grouped_matmul import tpu, tpu_kernel
from tests.pallas_kernels.grouped_cases import ROUTINGS, WEIGHTS, case, make


def check(case, interpret=True):
    case.check(jax.jit(partial(tpu.product, interpret=interpret))(case.x, case.weight, case.offsets))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_products_with_every_kind_of_weight(weight):
    check(case(weight, "late and early", "bfloat16"))


@pytest.mark.parametrize("weight", ["dense", "dense, gate and up", "float4 by group"])
def test_products_of_float32(weight):
    check(case(weight, "late and early"))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_products_of_every_routing(routing):
    check(case("dense", routing))


def test_products_of_several_chunks_and_columns(monkeypatch):
    """Rows of an expert that are in two chunks, and outputs that no tile divides."""
    monkeypatch.setattr(tpu, "CHUNK_BYTES", 0)
    monkeypatch.setattr(tpu, "MANY_BYTES", 0)
    for form, outputs in ((None, (300,)), (None, (2, 300)), (("int8", None, "float32", False, False), (2, 300))):
        given = make(64, outputs, form, 3, (0, 61, 9, 150), 35)
        spec = tpu.plan(jnp.pad(given.x, ((0, -len(given.x) % 16), (0, 0))), given.weight)
        assert spec.chunk < len(given.x) and spec.columns == 3 and spec.tile == 128
        check(given)


@pytest.mark.parametrize("weight", ["dense", "int8 by output"])  # others reshape references, which it does not know
def test_transfers_have_no_races(weight):
    params = pltpu.InterpretParams(
        dma_execution_mode="eager",
        detect_races=True,
        vector_clock_size=16,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    check(case(weight, "late and early", "bfloat16"), params)


def test_numbers_of_few_bits():
    """All codes of all kinds, subnormal and NaN."""
    for name, bits in (
        ("float4_e2m1fn", np.arange(16, dtype=np.uint8)),
        ("float8_e8m0fnu", np.arange(256, dtype=np.uint8)),
        ("float16", np.arange(65536, dtype=np.uint16)),
        ("float8_e4m3fn", np.arange(256, dtype=np.uint8)),
    ):
        codes = bits[:, None].view(np.float16 if name == "float16" else getattr(ml_dtypes, name))
        given = jnp.asarray(codes)
        if name == "float16":
            given = jax.lax.bitcast_convert_type(given, jnp.int16)
        got = np.asarray(jax.jit(partial(tpu_kernel.numbers, name=name, dtype=jnp.float32))(given))
        want = codes.astype(np.float32)
        is_normal = ~(np.abs(want) < np.finfo(np.float32).tiny) | (want == 0)  # 2^-127, which CPUs may take for 0
        np.testing.assert_array_equal(got[is_normal], want[is_normal])


def test_what_experts_do_not_have_is_not_supported():
    given = make(64, (3, 32), None, 0, (1, 2), 0)
    assert not tpu.supports(given.x, given.weight, given.offsets)
    assert tpu.supports(given.x, given.weight[:, :, :2], given.offsets)
    narrow = make(40, (32,), ("int8", 8, "float32", False, False), 0, (1, 2), 0)
    assert not tpu.supports(narrow.x, narrow.weight, narrow.offsets)
