"""Log-probabilities of a trainer's tokens, with gradients: by XLA, or by an engine's own kernels, to the bit."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.models.layers import Norm
from jaxllm.models.state_cache import dense_caches
from jaxllm.pallas_kernels import sampling
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How an engine with `batch_invariant` computes: `LLM.arithmetic`."""

    placement: Placement
    block_size: int
    max_len: int  # which some ropes depend on


def token_logprobs(model: Any, tokens: Any, *, arithmetic: Any = None) -> Float32[Array, "batch len_less_one"]:
    """The log-probability, in nats, of each token after the first of its row, given those before it: of `tokens`,
    integers `[batch, len]`, rows of texts from their first token on, with any ids behind their ends. `model` is a
    module of `jaxllm.models`. JAX differentiates it.

        new = token_logprobs(model, tokens, arithmetic=llm.arithmetic)

    With the `arithmetic` of an `LLM(batch_invariant=True)` the forward pass takes the engine's kernels and its orders
    of additions: the results are the raw log-probabilities of that engine with the same parameters, whatever it
    computed them with. The backward pass is XLA's. Raises `ValueError`.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens has the shape {tokens.shape}; rows of texts are [batch, len]")
    if not isinstance(arithmetic, Arithmetic | None):
        raise ValueError(f"arithmetic is of {type(arithmetic).__name__}; give an LLM's `arithmetic`")
    placement, cache = UNPLACED, Dense()
    if arithmetic is not None:
        placement = arithmetic.placement
        cache = Dense(block_size=arithmetic.block_size, placement=placement)
        model = _in_order(model, arithmetic)
    ctx = StepContext.of(tokens, placement=placement)
    hidden, _ = model(tokens, ctx, dense_caches(model, cache))
    logits = model.logits(hidden, ctx)[:, :-1]
    rows = logits.reshape(-1, logits.shape[-1])
    normalizer = sampling.normalize(rows, placement=placement).normalizer.reshape(logits.shape[:-1])
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0] - normalizer


def _in_order(model: Any, arithmetic: Arithmetic) -> Any:
    """A module of the same arrays whose sums have the engine's order."""
    copy = nnx.merge(*nnx.split(model))
    copy.cfg = dataclasses.replace(copy.cfg, max_len=arithmetic.max_len)
    for _, node in nnx.iter_graph(copy):
        if isinstance(node, Norm):
            node.fixed_order = True
    return copy
