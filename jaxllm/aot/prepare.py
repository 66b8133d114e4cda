"""From a model's configuration and a target to what the engine would compile for it, without weights or devices."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from jaxllm.aot.chips import Target, devices
from jaxllm.checkpoint.config import read_spec, resolve_dtype
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.forms import give_forms
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import check_mesh, named
from jaxllm.engine.batch_invariance import check_batch_invariant
from jaxllm.engine.config import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import ModelShape, model_shape, with_config
from jaxllm.engine.device.packing import StepLayout, pick_bucket
from jaxllm.engine.kv_cache import check_kv_dtype, check_platform
from jaxllm.engine.sizing import size_engine
from jaxllm.errors import MeshError, OutOfMemoryError
from jaxllm.models import transformer
from jaxllm.sharding.mesh import parse_axes

MODELS = Path(__file__).parent / "models"


def find_model(name: str) -> Path:
    """The directory of a bundled model's `config.json`, of a directory, or of a `config.json`. Raises `ValueError`."""
    path = Path(name)
    if (MODELS / name / "config.json").is_file():
        return MODELS / name
    if path.is_dir():
        return path
    if path.name == "config.json" and path.is_file():
        return path.parent
    raise ValueError(
        f"model {name!r} is neither a config.json, nor a directory with one, nor one of the bundled "
        f"{sorted(p.name for p in MODELS.iterdir())}"
    )


def make_mesh(target: Target, axes: str) -> Mesh:
    """The target's devices as a mesh of "tensor=8" or the like, in the engine's order. Raises `MeshError`."""
    sizes = parse_axes(axes)
    if math.prod(sizes.values()) != target.count:
        raise MeshError(
            f"mesh {axes!r} has {math.prod(sizes.values())} devices, but target {target} has {target.count}; "
            f"make them the same, for example 'tensor={target.count}'"
        )
    grid = np.array(devices(target)).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@dataclass(frozen=True)
class Prepared:
    """A model placed on a target, with the sizes that the engine would choose there."""

    target: Target
    cfg: transformer.Config
    shape: ModelShape
    config: EngineConfig
    mesh: Mesh
    active_params: int  # elements of the products that a token goes through, but those of the head

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device, in the mesh's order."""
        return tuple(device.process_index for device in self.mesh.devices.flat)

    @cached_property
    def lowering(self) -> Lowering:
        return Lowering(self.shape, self.config, self.mesh)

    @cached_property
    def layouts(self) -> dict[int, StepLayout]:
        """The layout of every step, by its tokens."""
        return {tokens: self.lowering.step_layout(tokens) for tokens in self.lowering.token_buckets}

    def jobs(self) -> dict[Hashable, Any]:
        """Name -> lowering of every executable that the engine would compile."""
        return self.lowering.jobs()

    def decode_bucket(self, batch: int) -> int:
        """Tokens of the step that decodes `batch` sequences. ValueError if there is none."""
        if not 1 <= batch <= self.config.max_num_seqs:
            raise ValueError(f"a batch of {batch} is not in [1, {self.config.max_num_seqs}], max_num_seqs")
        return pick_bucket(tuple(self.layouts), batch)

    def decode_names(self, batch: int) -> tuple[tuple[str, int], ...]:
        """The executables of a step that decodes `batch` sequences and draws plainly: the forward pass, then the
        sampler, which alone reads the whole head. ValueError if there is none."""
        tokens = self.decode_bucket(batch)
        return ("step", tokens), ("sample", pick_bucket(self.lowering.sample_buckets, batch))

    def lower(self, job: Any) -> jax.stages.Lowered:
        """Lowers `job` for the target's devices."""
        with jax.set_mesh(self.mesh):  # kernels read their target from it
            return job()

    def tensors(self) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
        """Path and shape of every parameter."""
        tree = jax.tree.unflatten(self.shape.treedef, self.shape.leaves)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield jax.tree_util.keystr(path), leaf


def prepare(
    model: str,
    target: Target,
    mesh: str | None = None,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    block_size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    kv_cache_dtype: str = "auto",
    batch_invariant: bool = False,
) -> Prepared:
    """The bundled model, directory or config.json `model` on `target`, its weights in the forms that its files say, or
    its configuration, or that `quantization` asks for; `max_model_len` None is what the pool holds, `num_blocks` None
    what fits. Raises `ValueError`, `MeshError`, `ModelFormatError` or `OutOfMemoryError`."""
    checkpoint = open_checkpoint(find_model(model))
    spec = read_spec(checkpoint, resolve_dtype(dtype, target.chip.platform))
    grid = make_mesh(target, mesh or f"tensor={target.count}")
    cfg, abstract = spec.cfg, transformer.abstract(spec.module.Model, spec.cfg)
    active_params = _active_params(abstract)
    give_forms(checkpoint, spec, abstract, quantization)
    expand_model(abstract, grid)
    graph, state = nnx.split(abstract)
    check_mesh(state, grid)
    shape = model_shape(cfg, graph, state, grid)
    wanted = EngineConfig(
        max_model_len=cfg.max_len if max_model_len is None else max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        block_size=block_size,
        num_blocks=2**30,
        kv_cache_dtype=(kind := check_kv_dtype(kv_cache_dtype, shape.dtype)),
        measures_kv_scales=kind == "int8",  # as without a checkpoint's
        batch_invariant=batch_invariant,
    )
    with jax.set_mesh(grid):
        if batch_invariant:
            check_batch_invariant(shape, wanted, grid)
        check_platform(shape, wanted, grid, cfg.heads)
    chip, explicit_len = target.chip, max_model_len is not None
    device = memory.DeviceMemory(chip.memory_bytes, chip.usable_bytes, 0)
    try:
        config = size_engine(shape, wanted, grid, num_blocks, device, explicit_len=explicit_len)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{target}: {error}") from None
    shape = with_config(shape, abstract, config)
    return Prepared(target, abstract.cfg, shape, config, grid, active_params)


def _active_params(model: Any) -> int:
    """Of a model of dense weights; of experts those that a token is routed to."""
    total = 0
    for name, var in named(nnx.state(model, nnx.Param)).items():
        if not name.startswith("layers.") or not name.endswith(".weight") or var.get_value().ndim < 2:
            continue
        size = var.get_value().size
        if "experts" in var.axes:
            experts = model.cfg.layers[int(name.split(".")[1])].feed_forward
            size = size * experts.routing.top_k // var.get_value().shape[var.axes.index("experts")]
        total += size
    return total
