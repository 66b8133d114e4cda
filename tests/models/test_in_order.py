"""What dense models leave to XLA in a batch-invariant step of an accelerator: no sums, and in bfloat16 only what moves
numbers, so that no bit depends on what XLA runs together. Traced, not compiled."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.models import registry, token_logprobs
from jaxllm.models.served import Arithmetic
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.rounding import rounded
from tests.hf_models import config as hf_config

FAMILIES = {
    "Llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {},
    "Gemma3": {},
    "Phi3": {"hidden_size": 256},
    "OPT": {"hidden_size": 256, "word_embed_proj_dim": 64},
}
ATTENTION = {"gpu": "attend_in_order", "tpu": "ragged_paged_attention"}
MOVES = {
    *("bitcast_convert_type", "broadcast_in_dim", "clamp", "concatenate", "copy", "dynamic_slice", "gather", "max"),
    *("min", "neg", "pad", "reshape", "rev", "select_n", "slice", "split", "squeeze", "transpose"),
}
SUMS = {
    *("conv_general_dilated", "cumlogsumexp", "cumprod", "cumsum", "dot_general", "reduce", "reduce_prod"),
    *("reduce_sum", "reduce_window", "reduce_window_sum", "scatter-add", "scatter-mul"),
}


class LeftToXLA:
    """Walks a traced function, and fails where a sum is XLA's, or a rounding that XLA may leave out: one that is
    undone later, of a number that only XLA's operations have had."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def check(self, traced: Any) -> None:
        self._run(traced.jaxpr, [False] * len(traced.jaxpr.invars))

    def _run(self, jaxpr: Any, are_loose: list[bool]) -> list[bool]:
        """Which results are loose, that is, rounded to bfloat16 by nothing that XLA keeps."""
        loose = {var for var, is_loose in zip(jaxpr.invars, are_loose, strict=True) if is_loose}
        firm = set()  # in float32, and rounded
        for eqn in jaxpr.eqns:
            name, operands = eqn.primitive.name, [x for x in eqn.invars if isinstance(x, jax.extend.core.Var)]
            found = [not loose.isdisjoint(operands)] * len(eqn.outvars)
            if name == "pallas_call":  # which reads what is in memory
                self.kernels.append(eqn.params["name"])
                found = [False] * len(eqn.outvars)
            elif inner := list(jaxprs_of(eqn)):
                (body,) = inner
                given = [isinstance(x, jax.extend.core.Var) and x in loose for x in eqn.invars]
                found = self._run(body, given[len(given) - len(body.invars) :])
            elif any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.outvars):
                assert name not in SUMS, eqn
                if name == "convert_element_type":
                    wide = eqn.outvars[0].aval.dtype == jnp.float32
                    assert not (wide and found[0]), f"a rounding that may be left out: {eqn}"
                    found = [not wide and operands[0] not in firm]
                else:
                    assert all(x.aval.dtype != jnp.bfloat16 for x in eqn.outvars) or name in MOVES, eqn
            else:
                found = [False] * len(eqn.outvars)
            if name == "reduce_precision" or name in MOVES and firm.issuperset(operands):
                firm.update(eqn.outvars)
            loose.update(var for var, is_loose in zip(eqn.outvars, found, strict=True) if is_loose)
        return [isinstance(x, jax.extend.core.Var) and x in loose for x in jaxpr.outvars]


def jaxprs_of(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        if isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
            yield getattr(value, "jaxpr", value)


def trace(family: str, platform: str, monkeypatch, batch_invariant: bool = True):
    monkeypatch.setattr(Placement, "platform", property(lambda self: self.mesh and platform))
    module = registry.find(f"{family}ForCausalLM")
    heads = {} if "hidden_size" in FAMILIES[family] else {"head_dim": 64}
    cfg = module.Config.from_hf(hf_config(family, **heads | FAMILIES[family]).to_dict(), dtype=jnp.bfloat16)
    graph, state = nnx.split(nnx.eval_shape(lambda: module.Model(cfg, rngs=nnx.Rngs(0))))
    placement = Placement(Placement.default().mesh, batch_invariant=batch_invariant)
    arithmetic = Arithmetic(placement=placement, block_size=32, max_len=128)

    def logprobs(state, tokens):
        return token_logprobs(nnx.merge(graph, state), tokens, arithmetic=arithmetic)

    return cfg, jax.make_jaxpr(logprobs)(state, jax.ShapeDtypeStruct((2, 40), jnp.int32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("platform", ATTENTION)
def test_dense_families(platform, family, monkeypatch):
    cfg, traced = trace(family, platform, monkeypatch)
    left = LeftToXLA()
    left.check(traced)
    found = {name: left.kernels.count(name) for name in left.kernels}
    assert found["jaxllm_matmul"] >= 4 * cfg.num_layers + 1 and found[ATTENTION[platform]] == cfg.num_layers
    assert found["jaxllm_row_sums"] >= 2 * cfg.num_layers + 2


@pytest.mark.parametrize("platform", ATTENTION)
def test_an_ordinary_step_is_not_so(platform, monkeypatch):
    _, traced = trace("Qwen3", platform, monkeypatch, batch_invariant=False)
    with pytest.raises(AssertionError, match="dot_general"):
        LeftToXLA().check(traced)


def test_roundings_that_may_be_left_out():
    x = jnp.ones(4)
    LeftToXLA().check(jax.make_jaxpr(lambda x: rounded(x, jnp.bfloat16)[1:].astype(jnp.float32))(x))
    with pytest.raises(AssertionError, match="may be left out"):
        LeftToXLA().check(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16)[1:].astype(jnp.float32))(x))
