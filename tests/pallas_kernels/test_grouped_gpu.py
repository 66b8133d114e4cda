"""The GPU's products of groups of rows, interpreted, against numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxllm.pallas_kernels.grouped_matmul import gpu
from tests.pallas_kernels.grouped_cases import ROUTINGS, WEIGHTS, case, make


def check(case):
    case.check(jax.jit(partial(gpu.product, interpret=True))(case.x, case.weight, case.offsets))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_products_with_every_kind_of_weight(weight):
    check(case(weight, "late and early", "bfloat16"))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_products_of_every_routing(routing):
    check(case("dense", routing))


def test_products_of_split_inputs(monkeypatch):
    monkeypatch.setattr(gpu, "MIN_SPLIT", 32)
    for weight in ("dense", "int4 by group"):
        given = case(weight, "late and early")
        assert gpu.plan(*gpu.flatten(given.x, given.weight, 1)).splits > 1
        check(given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_products_of_any_width(dtype):
    check(make(77, (45,), None, 1, (3, 0, 20), 2, dtype))


def test_what_no_tile_divides_is_not_supported():
    given = make(40, (44,), ("int8", 8, "float32", False, False), 0, (1, 2), 0)
    assert not gpu.supports(given.x, given.weight, given.offsets)
    with pytest.raises(ValueError, match="choose implementation='reference'"):
        gpu.product(given.x, given.weight, given.offsets)


def test_weights_whose_offsets_overflow_are_not_supported():
    def supports(experts: int, dtype: str) -> bool:
        x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((experts, 4096, 4096), jnp.dtype(dtype))
        found = []
        offsets = jax.ShapeDtypeStruct((experts + 1,), jnp.int32)
        jax.eval_shape(lambda *given: found.append(gpu.supports(*given)), x, weight, offsets)
        return found[0]

    assert supports(120, "float8_e4m3fn") and not supports(128, "float8_e4m3fn")
    assert supports(300, "float8_e4m3fn") and supports(128, "bfloat16")
