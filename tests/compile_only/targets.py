"""The chips that these tests compile for: JAXLLM_TARGETS, names separated by spaces; those without a compiler skip."""

import json
import os
import tempfile
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.aot import chips
from jaxllm.aot.prepare import Prepared, find_model, prepare
from jaxllm.aot.report import Executable, compile_one

DEFAULT = "v6e a100 h200"
WHOLE = bool(os.environ.get("JAXLLM_WHOLE"))  # models with all their layers, and every case
MIXTURE_CONFIG = {  # of experts as Qwen3-30B-A3B has them, in few layers
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def with_seldom(often: Iterable[Any], seldom: Iterable[Any]) -> list[Any]:
    """Cases of a test: with JAXLLM_WHOLE=1 those too that take long and compile little that the others don't."""
    return [*often, *seldom] if WHOLE else [*often]


def chip_names(platform: str | None = None) -> list[Any]:
    """The chips to compile for, of one platform or all, as parameters of a test."""
    names = os.environ.get("JAXLLM_TARGETS", DEFAULT).split()
    if unknown := sorted(set(names) - chips.CHIPS.keys()):
        raise ValueError(f"JAXLLM_TARGETS names {unknown}; known are {sorted(chips.CHIPS)}")
    wanted = [name for name in names if platform in (None, chips.CHIPS[name].platform)]
    return [pytest.param(name, marks=_skip(chips.CHIPS[name].platform)) for name in wanted]


def _skip(platform: str) -> Sequence[Any]:
    reason = chips.missing(platform)
    return [pytest.mark.skip(reason=f"no compiler for {platform}: {reason}")] if reason else []


def mesh_of(chip: str, count: int = 1) -> Mesh:
    """`count` devices of a chip on the axis "tensor"."""
    devices = chips.devices(chips.parse_target(f"{chip}-{count}"))
    return Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))


def prepare_few_layers(model: str, num_layers: int, target: chips.Target, **options: Any) -> Prepared:
    """The bundled model with its first layers alone; `options` are those of `prepare`."""
    config = json.loads((find_model(model) / "config.json").read_text())
    return prepare_config(config | {"num_hidden_layers": num_layers}, target, **options)


def prepare_config(config: dict[str, Any], target: chips.Target, **options: Any) -> Prepared:
    """The model of a `config.json`."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return prepare(directory, target, **options)


def compile_structure(plan: Prepared, name: Hashable) -> Executable:
    """One of the engine's executables, of which a TPU's compiler schedules and fuses next to nothing, in half the time:
    kernels, aliases and collectives are there as for users. With JAXLLM_WHOLE=1 all is as for users."""
    before = jax.config.jax_optimization_level
    is_quick = plan.target.chip.platform == "tpu" and not WHOLE
    jax.config.update("jax_optimization_level", "O0" if is_quick else before)
    try:
        return compile_one(plan, name, plan.jobs()[name])
    finally:
        jax.config.update("jax_optimization_level", before)


def compile_on(mesh: Mesh, fn: Any, *arguments: Any, **options: Any) -> jax.stages.Compiled:
    """`fn` compiled for shapes or (shape, dtype) pairs that lie on every device; `options` are `jax.jit`'s."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = x if isinstance(x, tuple) else (x.shape, x.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    with jax.set_mesh(mesh):
        return jax.jit(fn, **options).lower(*map(place, arguments)).compile()
