"""Mixtures of experts (arXiv 2101.03961): a router that chooses a few of many MLPs for each token."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jaxllm.models.context import StepContext
from jaxllm.models.layers import ACTIVATIONS, MLP
from jaxllm.models.linear import Linear
from jaxllm.sharding import rules

GATES = frozenset({"router", "shared_gate"})  # outputs of products that stay as they are where others are quantised


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the router's logits choose `top_k` experts for a token and weigh them, in float32.

    A score for each expert: "softmax" over all of them, or "sigmoid" of each. Those of the largest scores are chosen,
    to which a correction bias is added for the choice alone, in the `top_groups` best of `groups` equal groups. Their
    weights are the scores, with `renormalise` divided by their sum (at least `eps`), times `scale`.
    """

    experts: int
    top_k: int
    score: str = "softmax"
    renormalise: bool = True
    eps: float = 1e-20
    scale: float = 1.0
    has_bias: bool = False  # of the logits
    is_float32: bool = False  # the weight that makes them, whatever the model's dtype is
    has_correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"  # a group is as good as its best two experts together, or "max": as its best

    def __post_init__(self) -> None:
        """ValueError for values that don't go together."""
        if self.score not in ("softmax", "sigmoid") or self.group_score not in ("top2", "max"):
            raise ValueError(f"score={self.score!r} or group_score={self.group_score!r} is unknown")
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups can't be taken of {self.experts} experts")
        if not 1 <= self.top_k <= self.top_groups * (self.experts // self.groups):
            raise ValueError(
                f"{self.top_k} experts a token can't be chosen of {self.experts}, of which "
                f"{self.top_groups} of {self.groups} groups are taken"
            )

    def choose(
        self, logits: Float32[Array, "t experts"], correction: Float32[Array, " experts"] | None = None
    ) -> tuple[Float32[Array, "t top_k"], Int[Array, "t top_k"]]:
        """The weights and numbers of each token's experts."""
        scores = jax.nn.softmax(logits, axis=-1) if self.score == "softmax" else jax.nn.sigmoid(logits)
        # Of softmax, the largest logits are the largest scores, and no two of those are rounded to the same.
        choice = logits if correction is None and self.groups == 1 else scores
        if correction is not None:
            choice = choice + jnp.broadcast_to(correction, choice.shape)
        if self.groups > 1:
            choice = self._in_best_groups(choice)
        ids = jax.lax.top_k(choice, self.top_k)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.renormalise:
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), self.eps)
        return weights * self.scale, ids.astype(jnp.int32)

    def _in_best_groups(self, choice: Float32[Array, "t experts"]) -> Float32[Array, "t experts"]:
        """Minus infinity in the other groups."""
        grouped = choice.reshape(len(choice), self.groups, -1)
        best = jax.lax.top_k(grouped, min(2 if self.group_score == "top2" else 1, grouped.shape[-1]))[0]
        groups = jax.lax.top_k(jnp.sum(best, axis=-1), self.top_groups)[1]
        is_in = jnp.any(groups[:, :, None] == jnp.arange(self.groups)[None, None, :], axis=1)
        return jnp.where(is_in[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def top_k_of(hf: dict) -> dict[str, int]:
    """`experts` and `top_k` of a checked `config.json`, by the names that families have for them."""
    return {
        "experts": _first(hf, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "top_k": _first(hf, "num_experts_per_tok", "experts_per_token", "moe_k"),
    }


def _first(hf: dict, *keys: str) -> int:
    found = [hf[key] for key in keys if hf.get(key) is not None]
    return found[0] if found else hf[keys[0]]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """Of an expert's hidden layer: `act(gate) * up`, with `act` by its name in `config.json`. With `limit` the clamped
    form of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up at most that far from zero."""

    name: str = "silu"
    limit: float | None = None
    alpha: float = 1.702

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        if self.limit is None:
            return ACTIVATIONS[self.name](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A layer's mixture, as `LayerSpec.feed_forward`: experts of hidden width `mlp`, and what all tokens take beside
    them, if `shared_mlp` is not 0, times the sigmoid of a product with the token if `has_shared_gate`."""

    routing: Routing
    mlp: int
    activation: Activation | None = None  # None: the model's
    has_bias: bool = False  # of the experts' products
    weighs_input: bool = False  # rather than the expert's result
    shared_mlp: int = 0
    has_shared_gate: bool = False

    def __call__(self, cfg: Any, *, rngs: nnx.Rngs) -> "MoE":
        return MoE(cfg, self, rngs=rngs)


class Router(nnx.Module):
    """Chooses each token's experts, in float32."""

    def __init__(self, cfg: Any, routing: Routing, *, rngs: nnx.Rngs):
        self.routing = routing
        # Every device routes every token: the axis is not that of the experts, which a mesh splits.
        outputs = {"router": routing.experts}
        dtype = jnp.float32 if routing.is_float32 else cfg.dtype
        self.gate = Linear.random({"embed": cfg.embed}, outputs, bias=routing.has_bias, dtype=dtype, rngs=rngs)
        zeros = jnp.zeros(routing.experts, jnp.float32)
        self.correction = nnx.Param(zeros, axes=("router",)) if routing.has_correction else nnx.data(None)

    def __call__(
        self, x: Float[Array, "t embed"], ctx: StepContext
    ) -> tuple[Float32[Array, "t top_k"], Int[Array, "t top_k"]]:
        x = x.astype(jnp.float32) if self.routing.is_float32 else x
        logits = self.gate(x, ctx, out_dtype=jnp.float32)
        return self.routing.choose(logits, None if self.correction is None else self.correction[...])


class MoE(nnx.Module):
    """A mixture of experts: `gate_up[experts, embed, 2, mlp]` and `down[experts, mlp, embed]`, of which a token's rows
    go through those of its experts alone. Combined in float32."""

    def __init__(self, cfg: Any, spec: Experts, *, rngs: nnx.Rngs):
        options = {"bias": spec.has_bias, "experts": spec.routing.experts, "dtype": cfg.dtype, "rngs": rngs}
        outputs = {"gate_up": {"gate": 1, "up": 1}, "mlp": spec.mlp}
        self.router = Router(cfg, spec.routing, rngs=rngs)
        self.gate_up = Linear.random({"embed": cfg.embed}, outputs, **options)
        self.down = Linear.random({"mlp": spec.mlp}, {"embed": cfg.embed}, **options)
        shared = {"dtype": cfg.dtype, "rngs": rngs}
        self.shared = MLP(cfg, width=spec.shared_mlp, rngs=rngs) if spec.shared_mlp else None
        gate = Linear.random({"embed": cfg.embed}, {"shared_gate": 1}, **shared) if spec.has_shared_gate else None
        self.shared_gate = gate
        self.spec = spec
        self.activation = spec.activation or Activation(name=cfg.activation)

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t embed"]:
        rows = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(rows, ctx)
        if ctx.is_token is not None:  # padding goes to nobody
            ids = jnp.where(ctx.is_token.reshape(-1, 1), ids, self.spec.routing.experts)
        y = self._of_experts(rows, weights, ids, ctx).reshape(x.shape)
        if self.shared is not None:
            shared = self.shared(x, ctx)
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(self.shared_gate(x, ctx, out_dtype=jnp.float32))
                shared = shared * jnp.broadcast_to(gate.astype(shared.dtype), shared.shape)
            y = y + shared
        return y

    def _of_experts(self, x: Array, weights: Array, ids: Array, ctx: StepContext) -> Float[Array, "t embed"]:
        """On a mesh each device takes the experts, or the parts of all, that it holds: one sum over devices."""
        products = nnx.List([self.gate_up, self.down])
        graph, state = nnx.split(products)
        leaves, tree = jax.tree.flatten(state)
        variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        axes = [tuple(variable.get_metadata("axes")) for variable in variables]
        mesh = ctx.placement.mesh
        summed = () if mesh is None else _split(("experts", "mlp"), mesh)

        def combine(x: Array, weights: Array, ids: Array, *leaves: Array) -> tuple[Array]:
            gate_up, down = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            if down.bias is not None and "tensor" in summed:  # a part of each product: its bias is one device's alone
                is_first = jax.lax.axis_index("tensor") == 0
                down.bias.set_value(jnp.where(is_first, down.bias[...], jnp.zeros((), down.bias.dtype)))
            y = self._combine(gate_up, down, x, weights, ids, ctx)
            return ((jax.lax.psum(y, summed) if summed else y).astype(x.dtype),)

        run = rules.shard_map(combine, mesh, [(None, None)] * 3 + axes, [(None, None)])
        return run(x, weights, ids, *leaves)[0]

    def _combine(
        self, gate_up: Linear, down: Linear, x: Array, weights: Array, ids: Array, ctx: StepContext
    ) -> Float32[Array, "t embed"]:
        """What this device's experts make of all tokens."""
        tokens, top_k = ids.shape
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        first, count = _own_experts(self.spec.routing.experts, ctx)
        wanted = first + jnp.arange(count + 1, dtype=jnp.int32)
        offsets = jnp.searchsorted(flat[order], wanted, method="compare_all").astype(jnp.int32)
        rows, scale = x[order // top_k], weights.reshape(-1)[order][:, None]
        if self.spec.weighs_input:
            rows = (rows * scale).astype(x.dtype)
        both = gate_up.grouped(rows, offsets, ctx)
        hidden = self.activation(both[:, 0], both[:, 1])
        y = down.grouped(hidden, offsets, ctx).astype(jnp.float32)
        y = y if self.spec.weighs_input else y * jnp.broadcast_to(scale, y.shape)
        # Gathered back: a scatter would add in no fixed order on a GPU, and slowly on a TPU.
        return jnp.sum(y[jnp.argsort(order)].reshape(tokens, top_k, -1), axis=1)


def _split(axes: tuple[str, ...], mesh: rules.AnyMesh) -> tuple[str, ...]:
    """The mesh axes that split these logical ones."""
    return tuple(name for axis in axes for name in rules.mesh_axes(axis, axes, mesh) if mesh.shape[name] > 1)


def _own_experts(experts: int, ctx: StepContext) -> tuple[Any, int]:
    """The first of this device's experts, and how many it has."""
    mesh = ctx.placement.mesh
    split = () if mesh is None else _split(("experts",), mesh)
    if not split:
        return 0, experts
    count = experts // mesh.shape[split[0]]
    return jax.lax.axis_index(split[0]) * count, count
