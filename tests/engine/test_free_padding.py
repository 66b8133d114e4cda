"""Steps of fewer sizes where what pads them takes no time."""

import pytest
from flax import nnx

from jaxllm.models import qwen3
from jaxllm.pallas_kernels import native
from tests.tiny import Tiny, greedy, ids, make_llm, prompts_of, tokens

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")
MANY, FEW = [8, 16, 24], [8, 24]


class OfSomebody(qwen3.Model):
    """What it computes beside its layers is not known."""


def sizes(llm):
    return sorted(name[1] for name in llm.engine.runner.compile_plan.names if name[0] == "step")


@pytest.mark.parametrize("length", [9, 16, 17, 40])
def test_padded_further_they_say_the_same(llm, tiny, length):
    assert sizes(llm) == FEW
    (prompt,) = prompts_of([length])
    tiny.assert_greedy(prompt, tokens(llm.generate(ids(prompt), greedy(6)))[0])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_of_quantised_weights_too(tiny, quantization):
    with make_llm(tiny.model, quantization=quantization) as llm:
        assert sizes(llm) == FEW


def test_not_where_padding_may_be_computed(tiny):
    with make_llm(tiny.model, mesh="tensor=2") as on_mesh:
        assert sizes(on_mesh) == MANY
    with make_llm(OfSomebody(Tiny().cfg, rngs=nnx.Rngs(0))) as of_somebody:
        assert sizes(of_somebody) == MANY
