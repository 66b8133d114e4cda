"""Writes a model as a directory in Hugging Face format, by the tables that such directories are read with, inverted."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from flax import nnx

from jaxllm.argument_checks import some_of
from jaxllm.checkpoint.config import DTYPES, ModelSpec
from jaxllm.checkpoint.files import CONFIG, local
from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.placement import canonical_params, expansion_of, named
from jaxllm.checkpoint.weights_table import weights_table
from jaxllm.checkpoint.writing import FileShards, check_is_new, whole_directory
from jaxllm.from_vllm.dtypes import dtype_name
from jaxllm.interchange.hf_config import check_definition, checked_config, family_of
from jaxllm.models.transformer import Params
from jaxllm.models.weights import Weight


def save_hf(
    model: nnx.Module,
    path: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Writes `model`, of a class of `jaxllm.models`, to the new directory `path`: `config.json` and safetensors, as
    transformers and `LLM` read them. Returns the directory, which appears when it is complete. Tensors that are passed
    over when a model is loaded (poolers of BERT) are not among them.

    The keys of `config.json` and the tokenizer's files are those of `like`, a directory or GGUF file of the same
    architecture; without it, of what `load` has read the model from. For other models `config.json` is made of
    `model.cfg`. `dtype` is what the weights become, by name or as an object (None: as they are). Files hold at most
    `max_shard_bytes`, unless one tensor is larger, and the host holds one of them at a time.

    Raises `ValueError` for a model whose parameters no family's table names, whose configuration those keys do not
    describe, or whose layers are not those that its configuration describes, for parameters that other processes hold,
    and for a `path` that is there.
    """
    out = local(path)
    check_is_new(out)
    name = None if dtype is None else dtype_name(dtype)
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype={name!r} is unknown; choose one of {list(DTYPES)}")
    family, cfg = family_of(model)
    params = named(_canonical(nnx.state(model, nnx.Param)))
    source = like if like is not None else getattr(model, "source", None)
    folder = None if source is None else local(source)
    config = checked_config(cfg, folder)
    plan = _plan(ModelSpec(module=family, cfg=cfg, eos_token_ids=()), params)
    check_definition(model, family, cfg)
    stored = name or str(params[next(iter(plan.values()))[0][0].path].get_value().dtype)
    config |= {key: stored for key in ("dtype", "torch_dtype") if key in config} or {"dtype": stored}
    with whole_directory(out) as made:
        writer = FileShards(made, max_shard_bytes)
        writer.add_all(_tensors(plan, params, name))
        writer.finish()
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if folder is not None:
            open_checkpoint(folder).save_beside_weights(made)
    return out


def _canonical(state: Params) -> Params:
    """With the shapes that the configuration gives, also of what an engine's mesh has made of them."""
    expanded = [var for var in named(state).values() if expansion_of(var) is not None]
    return canonical_params(state, expanded[0].get_value().sharding.mesh) if expanded else state


def _plan(spec: ModelSpec, params: Mapping[str, nnx.Variable]) -> dict[str, list[tuple[Weight, WeightPart]]]:
    """The tensors that hold all of `params`, and what each stacks of them. Those of a parameter follow each other."""
    plan: dict[str, list[tuple[Weight, WeightPart]]] = {}
    filled = dict.fromkeys(params, 0)
    for name, weights in weights_table(spec).items():
        if all(weight.path in params for weight in weights):
            for weight in weights:
                part = WeightPart.at(name, weight, params[weight.path].get_value().shape, 0)
                plan.setdefault(name, []).append((weight, part))
                filled[weight.path] += math.prod(part.sizes.values())
    if left := sorted(path for path, count in filled.items() if count != params[path].get_value().size):
        raise ValueError(
            f"no tensor of a checkpoint of {spec.module.__name__} holds {some_of(left)}: save the module without what "
            "was added to it (adapters merged, quantised weights as they were)"
        )
    return dict(sorted(plan.items(), key=lambda item: item[1][0][0].path))


def _tensors(
    plan: Mapping[str, Sequence[tuple[Weight, WeightPart]]], params: Mapping[str, nnx.Variable], dtype: str | None
) -> Iterator[tuple[str, np.ndarray]]:
    held: tuple[str, np.ndarray] = "", np.empty(0)
    for name, pieces in plan.items():
        rows = []
        for weight, part in pieces:
            if weight.path != held[0]:
                held = weight.path, _on_host(weight.path, params[weight.path].get_value(), dtype)
            left, right = part.axes.split("->")
            rows.append(rearrange(held[1][part.place], f"{right} -> {left}", **part.sizes))
        yield name, np.ascontiguousarray(np.concatenate(rows) if len(rows) > 1 else rows[0])


def _on_host(path: str, value: jax.Array, dtype: str | None) -> np.ndarray:
    if not value.is_fully_addressable:
        raise ValueError(f"{path} is split over several processes; gather it before it is saved")
    value = value.copy()  # of which JAX keeps the host's copy, and which is gone soon
    return np.asarray(value if dtype is None else value.astype(DTYPES[dtype]))
