"""Where a model and a reference part: the output of each layer beside the reference's, in float32."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxllm.models.context import StepContext
from jaxllm.models.state_cache import dense_caches


@dataclass(frozen=True)
class Difference:
    """Of one output: `embed` is the first layer's input, `layers.3` the output of the fourth, and `logits` are last."""

    name: str
    largest: float  # of the elements' differences
    scale: float  # the reference's largest element
    tolerance: float

    @property
    def is_large(self) -> bool:
        return not self.largest <= self.tolerance * self.scale  # where either is no number it is

    def __str__(self) -> str:
        ratio = self.largest / self.scale if self.scale else float("inf")
        mark = "  <- differs" if self.is_large else ""
        return f"{self.name:<12} differs by {self.largest:.2e} of {self.scale:.2e} ({ratio:.1e}){mark}"


@dataclass(frozen=True)
class LayerComparison:
    """All outputs that both have, in the order in which they are computed. Prints as a table."""

    outputs: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first that differs beyond the tolerance; None: the models agree."""
        return next((each for each in self.outputs if each.is_large), None)

    def __str__(self) -> str:
        verdict = "the models agree" if self.first is None else f"the first to differ is {self.first.name}"
        return "\n".join([*map(str, self.outputs), verdict])


def check(model: Any, reference: Any, tokens: Any, *, tolerance: float = 1e-4) -> LayerComparison:
    """Runs `model` and a reference on the ids `tokens` of one text, and compares what each layer makes of them.

    `model` is an NNX module with `layers`, or an `LLM`, whose own module it is then. `reference` is a model of
    transformers; a module with as many `layers`; a list of functions, one a layer, each of which is given what the
    layer of `model` was, `[len, embed]`; or a dict of arrays by the names of `Difference`. An output differs if an
    element does by more than `tolerance` times the reference's largest. Raises `TypeError` for what is none of these,
    and `ValueError` where the layers are not as many, or shapes differ.
    """
    module = model if isinstance(model, nnx.Module) else getattr(model, "module", None)
    if not isinstance(module, nnx.Module) or not hasattr(module, "layers"):
        raise TypeError(f"model is {type(model).__qualname__}; check needs an NNX module with layers, or an LLM of one")
    ids = np.asarray(tokens, np.int32)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"tokens have the shape {ids.shape}; give the ids of one text")
    inputs, ours = _outputs(module, ids)
    theirs = _reference(reference, ids, inputs)
    if lacking := [name for name in theirs if name not in ours]:
        raise ValueError(f"the reference has {', '.join(lacking[:5])}, which the model lacks; it has {', '.join(ours)}")
    return LayerComparison(
        tuple(_difference(name, ours[name], theirs[name], tolerance) for name in ours if name in theirs)
    )


def _difference(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> Difference:
    if ours.shape != theirs.shape:
        raise ValueError(f"{name} has the shape {ours.shape}, and the reference's {theirs.shape}")
    return Difference(name, float(np.abs(ours - theirs).max()), float(np.abs(theirs).max()), tolerance)


def _reference(reference: Any, ids: np.ndarray, inputs: list[np.ndarray]) -> dict[str, np.ndarray]:
    if isinstance(reference, nnx.Module):
        return _outputs(reference, ids)[1]
    if isinstance(reference, Mapping):
        return {name: _float32(array) for name, array in reference.items()}
    if isinstance(reference, list | tuple):
        if len(reference) != len(inputs):
            raise ValueError(f"{len(reference)} functions are given for {len(inputs)} layers")
        outputs = [_float32(layer(jnp.asarray(x))) for layer, x in zip(reference, inputs, strict=True)]
        return {f"layers.{i}": y for i, y in enumerate(outputs)}
    if hasattr(reference, "named_modules"):
        return _outputs_of_torch(reference, ids, len(inputs))
    raise TypeError(
        f"reference is {type(reference).__qualname__}; give a model of transformers, a module, a list of functions or "
        "a dict of arrays"
    )


def _outputs(module: nnx.Module, ids: np.ndarray) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """What each layer was given, and all outputs by name, without the batch's axis."""
    graph, state = nnx.split(module)
    vocab = module.cfg.vocab if hasattr(module, "logits") else None

    @jax.jit
    def run(state: Any, tokens: Array) -> tuple[list[tuple[Array, Array]], Array | None]:
        recorded: Any = nnx.merge(graph, state)
        calls: list[tuple[Array, Array]] = []
        for layer in {id(layer): layer for layer in recorded.layers}.values():
            layer.__class__ = _recording(type(layer), calls)
        ctx = StepContext.of(tokens)
        hidden, _ = recorded(tokens, ctx, dense_caches(recorded))
        logits = None if vocab is None else recorded.logits(hidden, ctx)[0, :, :vocab].astype(jnp.float32)
        return calls, logits

    calls, logits = jax.tree.map(np.asarray, run(state, jnp.asarray(ids)[None]))
    found = {} if not calls else {"embed": calls[0][0]} | {f"layers.{i}": output for i, (_, output) in enumerate(calls)}
    if logits is not None:
        found["logits"] = logits
    return [given for given, _ in calls], found


def _recording(layer: type, calls: list[tuple[Array, Array]]) -> type:
    """The class of a layer that notes what it is given, and what it returns beside its cache."""

    def call(self: Any, x: Array, *arguments: Any, **options: Any) -> Any:
        result = layer.__call__(self, x, *arguments, **options)
        output = result[0] if isinstance(result, tuple) else result
        calls.append((x[0].astype(jnp.float32), output[0].astype(jnp.float32)))
        return result

    return type(layer.__name__, (layer,), {"__call__": call})


def _outputs_of_torch(model: Any, ids: np.ndarray, num_layers: int) -> dict[str, np.ndarray]:
    """Of the list of `num_layers` modules that a model of transformers has."""
    torch = sys.modules["torch"]  # loaded by whoever made the model; nothing here imports what reads pickles
    lists = [each for _, each in model.named_modules() if isinstance(each, torch.nn.ModuleList)]
    layers = next((each for each in lists if len(each) == num_layers), None)
    if layers is None:
        raise ValueError(f"the reference has no list of {num_layers} layers, only {[len(each) for each in lists]}")
    found: dict[str, np.ndarray] = {}
    hooks = [layers[0].register_forward_pre_hook(_hook(found, "embed"), with_kwargs=True)]
    hooks += [layer.register_forward_hook(_hook(found, f"layers.{i}")) for i, layer in enumerate(layers)]
    try:
        with torch.no_grad():
            result = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if hasattr(result, "logits"):
        found["logits"] = _of_torch(result.logits)
    return found


def _hook(found: dict[str, np.ndarray], name: str) -> Callable[..., None]:
    def note(_: Any, arguments: Any, last: Any) -> None:
        if name == "embed":
            last = arguments[0] if arguments else last["hidden_states"]
        found[name] = _of_torch(last[0] if isinstance(last, tuple) else last)

    return note


def _of_torch(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()[0]


def _float32(array: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(array).astype(jnp.float32))
