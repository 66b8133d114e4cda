"""How other code bases call and lay out the parameters of a decoder like Llama's: tables for `convert`.

Each follows the public source of its code base: MaxText (github.com/AI-Hypercomputer/maxtext, the parameter mapping of
its checkpoint conversion), EasyDeL (github.com/erfanzar/EasyDeL, its llama module and layers), EasyLM
(github.com/young-geng/EasyLM, its llama model), Linen (the Flax Llama of github.com/huggingface/transformers before
version 5) and Tunix (github.com/google/tunix, the parameters of llama3, qwen2 and qwen3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxllm.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class ForeignWeight(Weight):
    """A `Weight` whose tensor is another code base's. In `axes`, the layers that a tensor stacks are "l", and the first
    axis on the right.

    `interleaved`: whether rope turns neighbours of a head "h" there, not one of the first half with one of the second.
    `head_dim_power`: the parameter is the tensor times that power of `head_dim`. `may_be_padded`: whether the tensor
    may have more tokens "v" than the vocabulary, which are left out.
    """

    interleaved: bool = False
    head_dim_power: float = 0.0
    may_be_padded: bool = False


# Dotted name, "{i}" standing for the layer where each has tensors of its own -> the place of the tensor.
ForeignTable = Mapping[str, ForeignWeight]

_QKV = {"q": (2, None, -2), "k": (2, -2, -1), "v": (2, -1, None)}
_LAYER = "layers.{i}."


def _ends(embed: str, norm: str, head: str, *, may_be_padded: bool = False) -> dict[str, ForeignWeight]:
    """What is before and after the layers; heads are `[embed, vocab]`."""
    return {
        embed: ForeignWeight(path="embed.weight", axes="v d -> v d", may_be_padded=may_be_padded),
        norm: ForeignWeight(path="norm.scale", axes="d -> d"),
        head: ForeignWeight(path="lm_head.weight", axes="d v -> d v", may_be_padded=may_be_padded),
    }


def _norms(names: Mapping[str, str]) -> dict[str, ForeignWeight]:
    """By the norms of a layer in our names."""
    return {name: ForeignWeight(path=f"{_LAYER}{ours}.scale", axes="d -> d") for ours, name in names.items()}


def _attention(
    names: Mapping[str, str], *, flat: bool, interleaved: bool = False, query_power: float = 0.0
) -> dict[str, ForeignWeight]:
    """By the projections q, k, v and o: `flat` ones are `[embed, heads * head_dim]`, others have an axis of each."""
    table = {}
    for part, place in _QKV.items():
        table[names[part]] = ForeignWeight(
            path=f"{_LAYER}attn.qkv.weight",
            axes="d (k g h) -> d k g h" if flat else "d (k g) (h) -> d k g h",
            part=place,
            interleaved=interleaved and part != "v",
            head_dim_power=query_power if part == "q" else 0.0,
        )
    out = "(k g h) d -> k g h d" if flat else "(k g) h d -> k g h d"
    return table | {names["o"]: ForeignWeight(path=f"{_LAYER}attn.o.weight", axes=out)}


def _biases(names: Mapping[str, str]) -> dict[str, ForeignWeight]:
    return {
        name: ForeignWeight(path=f"{_LAYER}attn.qkv.bias", axes="(k g h) -> k g h", part=(1, *_QKV[part][1:]))
        for part, name in names.items()
    }


def _mlp(gate: str, up: str, down: str) -> dict[str, ForeignWeight]:
    both = f"{_LAYER}mlp.gate_up.weight"
    return {
        gate: ForeignWeight(path=both, axes="d (u f) -> d u f", part=(1, 0, 1)),
        up: ForeignWeight(path=both, axes="d (u f) -> d u f", part=(1, 1, 2)),
        down: ForeignWeight(path=f"{_LAYER}mlp.down.weight", axes="f d -> f d"),
    }


def _hf_like(base: str, head: str, norm: str) -> ForeignTable:
    """Names of transformers beneath `base`, matrices `[inputs, outputs]`, whose norms call their scale `norm`."""
    layer, parts = f"{base}layers.{{i}}.", ("q", "k", "v", "o")
    return {
        **_ends(f"{base}embed_tokens.embedding", f"{base}norm.{norm}", head),
        **_norms(
            {"attn_norm": f"{layer}input_layernorm.{norm}", "mlp_norm": f"{layer}post_attention_layernorm.{norm}"}
        ),
        **_norms({f"attn.{part}_norm": f"{layer}self_attn.{part}_norm.{norm}" for part in "qk"}),
        **_attention({part: f"{layer}self_attn.{part}_proj.kernel" for part in parts}, flat=True),
        **_biases({part: f"{layer}self_attn.{part}_proj.bias" for part in "qkv"}),
        **_mlp(*(f"{layer}mlp.{part}_proj.kernel" for part in ("gate", "up", "down"))),
    }


def _maxtext(*, divides_queries: bool, interleaved: bool) -> ForeignTable:
    """Of unscanned layers. The queries of Llama and Mistral are divided by the square root of `head_dim` there, instead
    of scores; rope of the kind llama3.1 turns neighbours."""
    layer = "decoder.layers_{i}."
    attn = f"{layer}self_attention."
    heads = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return {
        **_ends(
            *("token_embedder.embedding", "decoder.decoder_norm.scale", "decoder.logits_dense.kernel"),
            may_be_padded=True,
        ),
        **_norms(
            {
                "attn_norm": f"{layer}pre_self_attention_layer_norm.scale",
                "mlp_norm": f"{layer}post_self_attention_layer_norm.scale",
                "attn.q_norm": f"{attn}query_norm.scale",
                "attn.k_norm": f"{attn}key_norm.scale",
            }
        ),
        **_attention(
            {part: f"{attn}{name}.kernel" for part, name in heads.items()},
            flat=False,
            interleaved=interleaved,
            query_power=0.5 if divides_queries else 0.0,
        ),
        **_mlp(*(f"{layer}mlp.{name}.kernel" for name in ("wi_0", "wi_1", "wo"))),
    }


def _scanned(table: ForeignTable) -> ForeignTable:
    """With layers stacked on the second axis, as MaxText does unless `param_scan_axis` says otherwise."""
    found = {}
    for name, weight in table.items():
        if "{i}" in name:
            left, right = weight.axes.split(" -> ")
            end = left.index(")") + 1 if left.startswith("(") else len(left.split()[0])
            axes = f"{left[:end]} l{left[end:]} -> l {right}"
            weight = replace(weight, axes=axes)
        found[name.replace("_{i}", "")] = weight
    return found


_UNSCANNED: Mapping[str, ForeignTable] = {
    "maxtext-llama": _maxtext(divides_queries=True, interleaved=False),
    "maxtext-llama3.1": _maxtext(divides_queries=True, interleaved=True),
    "maxtext-qwen3": _maxtext(divides_queries=False, interleaved=False),
}
_EASYLM: ForeignTable = {
    **_ends("transformer.wte.embedding", "transformer.ln_f.kernel", "lm_head.kernel"),
    **_norms({"attn_norm": "transformer.h.{i}.attention_norm.kernel", "mlp_norm": "transformer.h.{i}.ffn_norm.kernel"}),
    **_attention(
        {part: f"transformer.h.{{i}}.attention.w{part}.kernel" for part in ("q", "k", "v", "o")},
        flat=True,
        interleaved=True,
    ),
    **_mlp(*(f"transformer.h.{{i}}.feed_forward.w{number}.kernel" for number in (1, 3, 2))),
}
_TUNIX: ForeignTable = {
    **_ends("embedder.input_embedding", "final_norm.w", "lm_head.w"),
    **_norms(
        {
            "attn_norm": f"{_LAYER}input_layernorm.w",
            "mlp_norm": f"{_LAYER}post_attention_layernorm.w",
            "attn.q_norm": f"{_LAYER}attn.q_norm.w",
            "attn.k_norm": f"{_LAYER}attn.k_norm.w",
        }
    ),
    **_attention({part: f"{_LAYER}attn.{part}_proj.w" for part in ("q", "k", "v", "o")}, flat=False),
    **_biases({part: f"{_LAYER}attn.{part}_bias" for part in "qkv"}),
    **_mlp(*(f"{_LAYER}mlp.{part}_proj.kernel" for part in ("gate", "up", "down"))),
}
TABLES: Mapping[str, ForeignTable] = {
    **{name: _scanned(table) for name, table in _UNSCANNED.items()},
    **{f"{name}-unscanned": table for name, table in _UNSCANNED.items()},
    "easydel": _hf_like("model.", "lm_head.kernel", "kernel"),
    "linen-llama": _hf_like("model.", "lm_head.kernel", "weight"),
    "easylm": _EASYLM,
    "tunix": _TUNIX,
}
