"""What is imported while tests run is checked."""

import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.packing import pick_bucket
from jaxllm.pallas_kernels.rms_norm import rms_norm


def test_shapes():
    with pytest.raises(TypeCheckError):
        rms_norm(jnp.ones((2, 8)), None, jnp.ones(7), eps=1e-6)


def test_functions_without_shapes():
    with pytest.raises(BeartypeCallHintParamViolation):
        pick_bucket((1, 2), "3")


def test_methods():
    with pytest.raises(BeartypeCallHintParamViolation):
        CompilePlan({}).want(3, is_awaited=False)
