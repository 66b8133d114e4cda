"""An architecture's table of weights, spelled out for a model and for the form that its files have."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from jaxllm.checkpoint.config import ModelSpec
from jaxllm.models.layers import LayerSpec
from jaxllm.models.moe import Experts
from jaxllm.models.weights import Table, Weight

_MLP = "layers.{i}.mlp."  # what `EXPERTS` stands for


def weights_table(
    spec: ModelSpec, stored: Collection[str] = (), *, optional: bool = True
) -> dict[str, tuple[Weight, ...]]:
    """`WEIGHTS` and, if wanted, `OPTIONAL_WEIGHTS` and that of `EXPERTS` of which a checkpoint has most, with their
    layers and experts spelled out. `stored` are the names of its tensors."""
    module = spec.module
    weights = {**module.WEIGHTS, **(getattr(module, "OPTIONAL_WEIGHTS", {}) if optional else {})}
    table = dict(_spelled(weights, spec.cfg.layers, are_experts=False))
    if optional and (forms := expert_tables(spec)):
        table |= max(forms, key=lambda form: sum(name in stored for name in form))
    return table


def expert_tables(spec: ModelSpec) -> list[dict[str, tuple[Weight, ...]]]:
    """Each of `EXPERTS`, spelled out."""
    forms: Sequence[Table] = getattr(spec.module, "EXPERTS", ())
    return [dict(_spelled(form, spec.cfg.layers, are_experts=True)) for form in forms]


def _spelled(
    weights: Table, layers: Sequence[LayerSpec], *, are_experts: bool
) -> Iterator[tuple[str, tuple[Weight, ...]]]:
    counts = [_num_experts(layer) for layer in layers]
    for name, entry in weights.items():
        pieces = entry if isinstance(entry, tuple) else (entry,)
        is_mlp = any(piece.path.startswith(_MLP) for piece in pieces)
        for i, count in enumerate(counts if "{i}" in name else [0]):
            if is_mlp and bool(count) != are_experts:
                continue
            layer = name.replace("{i}", str(i))
            placed = tuple(replace(piece, path=piece.path.replace("{i}", str(i))) for piece in pieces)
            if "{e}" not in name:
                yield layer, placed
                continue
            for e in range(count):
                yield layer.replace("{e}", str(e)), tuple(replace(piece, expert=e) for piece in placed)


def _num_experts(layer: LayerSpec) -> int:
    return layer.feed_forward.routing.experts if isinstance(layer.feed_forward, Experts) else 0
