"""How an architecture file says where a checkpoint's tensors go.

Its `WEIGHTS` is a table of the tensors that every checkpoint of the family has. Of those whose parameters the model
lacks, heads may be absent: a tied `lm_head`, and those of other tasks. `OPTIONAL_WEIGHTS`, if there is one, are tensors
that come with parameters that only some configurations have, and `IGNORED` is a regular expression of the names of
others, which are passed over; "{num_layers}" in it stands for the number of layers, which is that of the first beyond.

Of layers with a mixture of experts, `EXPERTS` stands for what the others say of `layers.{i}.mlp`: tables of the forms
in which files hold them, of which a checkpoint has one.

A model that is saved without a head has names without the prefix of the model in it: `PREFIX`, "model." if the file has
none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Weight:
    """One checkpoint tensor's place in our parameters.

    `path` is the parameter ("layers.{i}.attn.qkv.weight"), `axes` the einops pattern from the tensor's axes to those of
    the parameter ("(k g h) d -> d k g h"), and `part` the (dimension, start, stop) that the tensor fills where several
    share a parameter (None: all of it). Of the parameter's first axis, `expert` is the one that the tensor is of.
    """

    path: str
    axes: str
    part: tuple[int, int | None, int | None] | None = None
    expert: int | None = None


# Checkpoint name, "{i}" standing for the layer and "{e}" for one of its experts -> its Weight, or those of the pieces
# that it stacks on its first axis.
Table = Mapping[str, Weight | tuple[Weight, ...]]

_QKV = {"q": (None, -2), "k": (-2, -1), "v": (-1, None)}  # of a KV head's `group + 2`
LAYER = "model.layers.{i}."


def qkv_piece(name: str) -> Weight:
    """Where the queries' ("q"), keys' or values' projection goes."""
    return Weight("layers.{i}.attn.qkv.weight", "(k g h) d -> d k g h", (2, *_QKV[name]))


def qkv_bias_piece(name: str) -> Weight:
    """Where their bias goes."""
    return Weight("layers.{i}.attn.qkv.bias", "(k g h) -> k g h", (1, *_QKV[name]))


def attention(prefix: str, out: str = "o_proj") -> Table:
    """Projections of the attention `prefix`, whose last one is called `out`."""
    return {f"{prefix}{name}_proj.weight": qkv_piece(name) for name in _QKV} | attention_out(f"{prefix}{out}")


def attention_out(tensor: str) -> Table:
    return {f"{tensor}.weight": Weight("layers.{i}.attn.o.weight", "d (k g h) -> k g h d")}


def qkv_biases(prefix: str) -> Table:
    return {f"{prefix}{name}_proj.bias": qkv_bias_piece(name) for name in _QKV}


def attention_biases(prefix: str, out: str = "o_proj") -> Table:
    return qkv_biases(prefix) | {f"{prefix}{out}.bias": Weight("layers.{i}.attn.o.bias", "d -> d")}


def norm(tensor: str, path: str) -> Table:
    return {f"{tensor}.weight": Weight(f"{path}.scale", "d -> d")}


def affine_norm(tensor: str, path: str) -> Table:
    return norm(tensor, path) | {f"{tensor}.bias": Weight(f"{path}.bias", "d -> d")}


LLAMA_SHARED: Table = {  # by layouts that fuse projections and those that don't
    "model.embed_tokens.weight": Weight("embed.weight", "v d -> v d"),
    **norm(LAYER + "input_layernorm", "layers.{i}.attn_norm"),
    **attention_out(LAYER + "self_attn.o_proj"),
    **norm(LAYER + "post_attention_layernorm", "layers.{i}.mlp_norm"),
    LAYER + "mlp.down_proj.weight": Weight("layers.{i}.mlp.down.weight", "d f -> f d"),
    **norm("model.norm", "norm"),
    "lm_head.weight": Weight("lm_head.weight", "v d -> d v"),
    "score.weight": Weight("score.weight", "c d -> d c"),
}
LLAMA_LAYOUT: Table = {
    **LLAMA_SHARED,
    **attention(LAYER + "self_attn."),
    LAYER + "mlp.gate_proj.weight": Weight("layers.{i}.mlp.gate_up.weight", "(u f) d -> d u f", (1, 0, 1)),
    LAYER + "mlp.up_proj.weight": Weight("layers.{i}.mlp.gate_up.weight", "(u f) d -> d u f", (1, 1, 2)),
}
QK_NORMS: Table = {
    **norm(LAYER + "self_attn.q_norm", "layers.{i}.attn.q_norm"),
    **norm(LAYER + "self_attn.k_norm", "layers.{i}.attn.k_norm"),
}
ATTENTION_BIASES: Table = attention_biases(LAYER + "self_attn.")
MLP_BIASES: Table = {
    LAYER + "mlp.gate_proj.bias": Weight("layers.{i}.mlp.gate_up.bias", "(u f) -> u f", (0, 0, 1)),
    LAYER + "mlp.up_proj.bias": Weight("layers.{i}.mlp.gate_up.bias", "(u f) -> u f", (0, 1, 2)),
    LAYER + "mlp.down_proj.bias": Weight("layers.{i}.mlp.down.bias", "d -> d"),
}


WHOLE_QK_NORMS: Table = {  # over all heads together
    LAYER + "self_attn.q_norm.weight": Weight("layers.{i}.attn.q_norm.scale", "(k g h) -> k g h"),
    LAYER + "self_attn.k_norm.weight": Weight("layers.{i}.attn.k_norm.scale", "(k h) -> k h"),
}


def router(tensor: str) -> Table:
    return {f"{tensor}.weight": Weight("layers.{i}.mlp.router.gate.weight", "e d -> d e")}


def experts(prefix: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Table:
    """Weights of a layer's experts, with a tensor each: `prefix` names one, "{e}" standing for its number."""
    gate_up = Weight("layers.{i}.mlp.gate_up.weight", "(e u f) d -> e d u f")
    return {
        f"{prefix}.{gate}.weight": replace(gate_up, part=(2, 0, 1)),
        f"{prefix}.{up}.weight": replace(gate_up, part=(2, 1, 2)),
        f"{prefix}.{down}.weight": Weight("layers.{i}.mlp.down.weight", "(e d) f -> e f d"),
    }


def stacked_experts(gate_up: str, down: str, *, outputs_first: bool = True, interleaved: bool = False) -> Table:
    """Of all experts of a layer in one tensor each. Of what gate and up share, gate is the first half or, with
    `interleaved`, each first of two."""
    both = "(f u)" if interleaved else "(u f)"
    return {
        gate_up: Weight(
            "layers.{i}.mlp.gate_up.weight", f"e {both} d -> e d u f" if outputs_first else f"e d {both} -> e d u f"
        ),
        down: Weight("layers.{i}.mlp.down.weight", "e d f -> e f d" if outputs_first else "e f d -> e f d"),
    }


def mlp(prefix: str, path: str) -> Table:
    """A gated MLP's."""
    gate_up = Weight(f"{path}.gate_up.weight", "(u f) d -> d u f")
    return {
        f"{prefix}gate_proj.weight": replace(gate_up, part=(1, 0, 1)),
        f"{prefix}up_proj.weight": replace(gate_up, part=(1, 1, 2)),
        f"{prefix}down_proj.weight": Weight(f"{path}.down.weight", "d f -> f d"),
    }


def expert_forms(prefix: str, common: Table) -> tuple[Table, ...]:
    """`EXPERTS` of most families: with `common`, the tensors of experts under `prefix`, each alone or stacked."""
    alone = experts(prefix + "{e}")
    return common | alone, common | stacked_experts(prefix + "gate_up_proj", prefix + "down_proj")
