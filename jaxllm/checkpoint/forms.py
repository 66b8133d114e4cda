"""Which forms the weights of a model get: those that its files say, those of its configuration where there are no
files, or one that is asked for; and in which dtype those are held that stay dense."""

import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxllm.checkpoint.config import ModelSpec
from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.formats import Checkpoint, HuggingFaceDirectory
from jaxllm.checkpoint.gguf.checkpoint import GgufCheckpoint
from jaxllm.checkpoint.loader import plan_blocks, plan_quantized
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.checkpoint.quantized.make import quantize_model
from jaxllm.checkpoint.quantized.plan import QuantizedPlan, dense_owner
from jaxllm.checkpoint.quantized.scheme import Place, Scheme
from jaxllm.checkpoint.tensors import has_tensors
from jaxllm.checkpoint.weights_table import expert_tables, weights_table
from jaxllm.models.linear import Embedding, Linear

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # of a configuration, and in files
_IN_LAYER = re.compile(r"(^|\.)\d+\.")


def give_forms(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    model: nnx.Module,
    wanted: str | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    needs_files: bool = False,
) -> QuantizedPlan | None:
    """Gives the abstract `model` its quantised forms, in place. The plan to load them by; None where the files hold
    dense weights, which are quantised to `wanted` if that is given.

    Forms are those that the files' headers say. Without `needs_files`, a model that lacks them gets those that its
    configuration implies. ValueError for a `wanted` that does not fit, ModelFormatError for what can't be read.
    """
    hf = checkpoint.config() | dict(overrides or {})
    scheme = scheme_of(checkpoint, hf)
    if scheme is not None:
        if wanted not in (None, scheme.name):
            raise ValueError(
                f"quantization={wanted!r:.100}, but the weights of {checkpoint.path} are quantised by {scheme.name} "
                "already; leave it out, or give the original checkpoint"
            )
        if needs_files or not isinstance(checkpoint, HuggingFaceDirectory) or has_tensors(checkpoint.path):
            return plan_quantized(checkpoint, spec, model, scheme.modules)
        return _plan_expected(spec, model, scheme, _DTYPES.get(str(hf.get("dtype") or hf.get("torch_dtype")), "BF16"))
    if wanted == "gguf" and isinstance(checkpoint, GgufCheckpoint):
        return plan_blocks(checkpoint, spec, model)
    if wanted is not None:
        quantize_model(model, wanted)
    return None


def hold_in(model: nnx.Module, dtype: Any) -> None:
    """Holds the dense weights of products and tables in `dtype`, in place, of the abstract `model`, which computes in
    more bits."""
    for _, node in list(nnx.iter_graph(model)):
        if type(node) in (Linear, Embedding):
            shape = node.weight.get_value()
            node.weight.set_value(jax.ShapeDtypeStruct(shape.shape, dtype))
            if isinstance(node, Embedding):
                node.dtype = shape.dtype


def _plan_expected(spec: ModelSpec, model: nnx.Module, scheme: Scheme, dtype: str) -> QuantizedPlan:
    """As the headers of files of this configuration would say, whose floats are of `dtype`."""
    weights = {name for form in expert_tables(spec) for name in form if name.endswith(".weight")}
    table = weights_table(spec, {name for name in weights if scheme.expects(name.removesuffix(".weight"), "layer")})
    modules = {}
    for name, pieces in table.items():
        owners = [owner for piece in pieces if (owner := dense_owner(model, piece)) is not None]
        is_table = any(isinstance(owner, Embedding) for owner in owners)
        place: Place = "table" if is_table else "layer" if _IN_LAYER.search(name) else "head"
        module = name.removesuffix(".weight")
        if len(owners) < len(pieces) or not scheme.expects(module, place):
            continue
        rows, width = 0, 0
        for piece, owner in zip(pieces, owners, strict=True):
            part = WeightPart.at(name, piece, owner.weight.get_value().shape, rows)
            rows, width = rows + part.shape[0], part.shape[1]
        if (found := scheme.expected(module, (rows, width), dtype)) is not None:
            modules[module] = found
    return QuantizedPlan.of(model, table, modules, {})
