"""From what a user gives as a model to its configuration, its module and the source of its parameters."""

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.argument_checks import a_type
from jaxllm.checkpoint.auto_dtype import dtype_for_cpu, held_on_cpu
from jaxllm.checkpoint.config import DTYPES, ModelSpec, read_spec, resolve_dtype
from jaxllm.checkpoint.formats import Checkpoint, open_checkpoint
from jaxllm.checkpoint.forms import give_forms, hold_in
from jaxllm.checkpoint.gguf.checkpoint import GgufCheckpoint
from jaxllm.checkpoint.in_panels import load_in_panels
from jaxllm.checkpoint.loader import load_params, load_quantized, stored_kv_scales
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.orbax_model import OrbaxModel
from jaxllm.checkpoint.placement import named, place_params
from jaxllm.checkpoint.pooling_config import PoolingConfig, read_pooling
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.checkpoint.quantized.gguf import is_kept
from jaxllm.checkpoint.quantized.kv_scales import Scales
from jaxllm.checkpoint.quantized.make import quantize_model
from jaxllm.checkpoint.quantized.scheme import Scheme
from jaxllm.checkpoint.torch_model import TorchModel, is_torch_model
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine.dummy import random_params
from jaxllm.engine.model_interface import kv_dtype
from jaxllm.engine.own_module import open_module, say_replicated
from jaxllm.errors import MeshError
from jaxllm.models import panel_linear, registry, transformer
from jaxllm.models.definition import Definition
from jaxllm.models.quantized import put_in_panels, round_rows
from jaxllm.models.transformer import Params
from jaxllm.models.wrapped import name_of
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.quantized_matmul import panels
from jaxllm.sharding.mesh import platform_of
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.tokenizer import FILE as TOKENIZER_FILE
from jaxllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

EMBEDDED = "embedded"  # the name of the model in the package


class ModelSource(NamedTuple):
    """A model to serve, before anything of it is on the mesh."""

    cfg: Any
    model: nnx.Module  # of ShapeDtypeStructs; the engine's own object
    params: Any  # the caller's pytree, or a function (abstract params, mesh) -> Params that loads them
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint | None = None  # that it is read from
    pooling: PoolingConfig | None = None  # as the checkpoint's files say
    kv_scales: Callable[[str], Scales | None] = lambda kind: None  # what they bring for a cache of this kind
    without_axes: tuple[str, ...] = ()  # names of parameters that no mesh splits, as nothing says how
    misnamed: tuple[str, ...] = ()  # and of those that none splits, as it seems by mistake
    definition: Definition | None = None  # of the module, before its weights get other forms; None: it is a function

    @property
    def name(self) -> str:
        """Where it can be found again: its directory or file, or `EMBEDDED`; "" for an object of the caller's."""
        if self.checkpoint is None:
            return ""
        path = self.checkpoint.path
        if path == DEFAULT_MODEL:
            return EMBEDDED
        # A cache's files may be links to others, whose names don't say what they are.
        return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)

    def expand(self, mesh: Mesh) -> None:
        """Gives `model` the shapes that `mesh` can split. Raises `MeshError` if it can't, or the model's own code is
        made for those that it has."""
        say_replicated(self.without_axes, self.misnamed, mesh)
        if not expand_model(self.model, mesh):
            return
        name, cfg = name_of(self.model), self.cfg
        try:
            kv_dtype(*nnx.split(self.model), cfg, name, mesh)
        except ValueError as error:
            raise MeshError(
                f"{name} can't be served on a mesh of {dict(mesh.shape)}, where its {cfg.kv_heads} KV heads are "
                f"repeated or its vocabulary of {cfg.vocab} is padded: {error}. Give its parameters their logical "
                "axes, or take as many devices as divide both"
            ) from error

    def in_panels(self, mesh: Mesh) -> "ModelSource":
        """With products in the order that a lone CPU reads them in, once they are loaded; itself where the caller
        brings their arrays."""
        if platform_of(mesh) != "cpu" or mesh.size > 1 or not callable(self.params) or not native.is_built():
            return self
        panel_linear.put_in_panels(self.model, self.cfg.dtype)
        graph, abstract = nnx.split(self.model)
        if not put_in_panels(self.model):
            return self
        log.info(
            "products with weights of integers round their rows to int8, %d numbers by a scale at most; "
            "dtype='float32' (--dtype float32) is slower and does not",
            panels.PART,
        )

        def load(_: Params, mesh: Mesh) -> Params:
            if isinstance(self.params, partial) and self.params.func is load_params:
                return load_in_panels(self.params, graph, abstract, mesh)
            model = nnx.merge(graph, self.params(abstract, mesh))
            put_in_panels(model)
            return nnx.split(model)[1]

        return self._replace(params=load)

    def place(self, abstract: Params, mesh: Mesh) -> Params:
        """The parameters on `mesh`, in the state that `abstract` describes."""
        return self.params(abstract, mesh) if callable(self.params) else place_params(self.params, abstract, mesh)


class Reading(NamedTuple):
    """How a checkpoint is read; see `LLM`."""

    load_format: str = "auto"
    hf_overrides: Any = None  # a dict
    skip_tokenizer_init: bool = False
    task: str | None = None
    quantization: str | None = None
    config: Any = None
    # Whether a CPU where no dtype is asked for may round rows to int8, and keep blocks of a GGUF file for that.
    rounds_rows: bool = False
    suits_processor: bool = False  # whether dtype "auto" may be what this CPU is fastest in


AS_IT_IS = Reading()


def model_source(model: Any, dtype: str, platform: str, tokenizer: Any, reading: Reading = AS_IT_IS) -> ModelSource:
    """`model` is what `LLM` takes. Raises `TypeError` or `ValueError` for what can't be served."""
    if reading.skip_tokenizer_init and tokenizer is not None:
        raise ValueError("tokenizer and skip_tokenizer_init=True exclude each other; give one")
    tokenizer = None if tokenizer is None else _tokenizer(tokenizer)
    source = _source(model, dtype, platform, tokenizer, reading)
    if source.tokenizer is not None:
        _check_fit(source.tokenizer, source)
    return source


def _source(model: Any, dtype: str, platform: str, tokenizer: Tokenizer | None, reading: Reading) -> ModelSource:
    if reading.config is not None:
        return _of_orbax(OrbaxModel.of(model, reading.config, dtype, platform), tokenizer, reading)
    if model is None or isinstance(model, str | Path):
        return _of_checkpoint(
            open_checkpoint(DEFAULT_MODEL if model is None else model), dtype, platform, tokenizer, reading
        )
    if is_torch_model(model):
        return _of_checkpoint(TorchModel(model), dtype, platform, tokenizer, reading)._replace(checkpoint=None)
    if reading.load_format != "auto" or reading.hf_overrides or reading.task:
        raise ValueError(
            "load_format, hf_overrides and task are for checkpoints; the model is an object, so leave them out"
        )
    if dtype != "auto":
        raise ValueError(f"dtype={dtype!r} is for checkpoints; arrays keep theirs, so leave it 'auto'")
    eos_ids = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if isinstance(model, nnx.Module):
        own = open_module(model)
        said = {"without_axes": own.without_axes, "misnamed": own.misnamed, "definition": own.definition}
        source = ModelSource(own.cfg, own.model, own.params, eos_ids, tokenizer, **said)
    elif isinstance(model, tuple) and len(model) == 2 and dataclasses.is_dataclass(model[0]):
        cfg, abstract, params = _of_pair(*model)
        source = ModelSource(cfg, abstract, params, eos_ids, tokenizer, definition=Definition.of(abstract))
    else:
        raise TypeError(
            f"model is {a_type(model)}; give a directory in Hugging Face format, a GGUF file, a model of transformers, "
            "a Flax module with the interface of jaxllm.models, a pair (configuration, parameter pytree), or a Linen "
            "module or function with its parameters: LLM(fn, params, shape=jaxllm.FunctionShape(...))"
        )
    if reading.quantization is not None:
        quantize_model(source.model, reading.quantization)  # and the caller's weights are, as they are placed
    return source


def _of_checkpoint(
    checkpoint: Checkpoint, dtype: str, platform: str, tokenizer: Tokenizer | None, reading: Reading
) -> ModelSource:
    spec = read_spec(checkpoint, resolve_dtype(dtype, platform), reading.hf_overrides, reading.task)
    hf = checkpoint.config() | (reading.hf_overrides or {})
    scheme = scheme_of(checkpoint, hf)
    _check_load_format(checkpoint, reading.load_format, scheme)
    has_files = reading.load_format != "dummy"
    if dtype == "auto" and platform == "cpu" and reading.suits_processor:
        chosen = dtype_for_cpu(checkpoint, hf, has_files=has_files)
        spec = replace(spec, cfg=replace(spec.cfg, dtype=DTYPES[chosen]))
    abstract = transformer.abstract(spec.module.Model, spec.cfg)
    definition = Definition.of(abstract)
    rounds_rows = reading.rounds_rows and dtype == "auto" and platform == "cpu" and native.is_built()
    if rounds_rows and reading.quantization is None and _has_blocks(checkpoint):
        reading = reading._replace(quantization="gguf")
    if tokenizer is None and not reading.skip_tokenizer_init:
        tokenizer = checkpoint.tokenizer()
    load = _loader(checkpoint, spec, abstract, reading)
    if rounds_rows:
        round_rows(abstract)
    is_float32 = dtype == "auto" and platform == "cpu" and spec.cfg.dtype == jnp.float32
    if is_float32 and reading.suits_processor and has_files and native.is_built():
        held = held_on_cpu(checkpoint, keeps_blocks=reading.quantization == "gguf")
        if held is not None:
            hold_in(abstract, DTYPES[held])
    pooling = read_pooling(checkpoint, spec, reading.hf_overrides)
    source = ModelSource(
        *(spec.cfg, abstract, load, spec.eos_token_ids, tokenizer, checkpoint, pooling), definition=definition
    )
    if scheme is not None and has_files:
        source = source._replace(kv_scales=partial(stored_kv_scales, checkpoint, spec, scheme))
    return source


def _of_orbax(saved: OrbaxModel, tokenizer: Tokenizer | None, reading: Reading) -> ModelSource:
    if reading.load_format != "auto" or reading.hf_overrides or reading.task:
        raise ValueError(
            "load_format, hf_overrides and task are for checkpoints with a config.json; put it into config"
        )
    eos_ids = saved.eos_ids
    if eos_ids is None:
        eos_ids = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if tokenizer is None and not reading.skip_tokenizer_init and saved.described_by is not None:
        tokenizer = saved.described_by.tokenizer()
    model = saved.abstract()
    definition = Definition.of(model)
    if reading.quantization is not None:
        quantize_model(model, reading.quantization)
    return ModelSource(saved.cfg, model, saved.restore, eos_ids, tokenizer, definition=definition)


def _loader(
    checkpoint: Checkpoint, spec: ModelSpec, model: nnx.Module, reading: Reading
) -> Callable[[Params, Mesh], Params]:
    """What loads the abstract `model`, which gets the forms of weights that are quantised, or shall be."""
    is_random, wanted = reading.load_format == "dummy", reading.quantization
    plan = give_forms(checkpoint, spec, model, wanted, reading.hf_overrides, needs_files=not is_random)
    if is_random:
        return partial(_random_params, spec)
    if plan is not None or wanted is None:
        return partial(load_params, checkpoint, spec, quantized=plan)
    return partial(load_quantized, checkpoint, spec)


def _has_blocks(checkpoint: Checkpoint) -> bool:
    """Whether it has blocks that a CPU's kernels multiply faster than what they stand for."""
    return isinstance(checkpoint, GgufCheckpoint) and any(map(is_kept, checkpoint.tensors().values()))


def _random_params(spec: ModelSpec, abstract: Params, mesh: Mesh) -> Params:
    return place_params(random_params(spec, abstract, mesh), abstract, mesh, donate=True)


def _check_load_format(checkpoint: Checkpoint, load_format: str, scheme: Scheme | None) -> None:
    theirs = "gguf" if isinstance(checkpoint, GgufCheckpoint) else "safetensors"
    if load_format == "bitsandbytes" and scheme is not None and scheme.name == load_format:
        return  # vLLM's name for such weights in safetensors
    if load_format not in ("auto", "dummy", theirs):
        raise ValueError(
            f"load_format={load_format!r} is not supported for {checkpoint.path}: it is 'auto' or {theirs!r}, "
            "or 'dummy' for random weights; jaxllm convert makes safetensors of other files"
        )


def _tokenizer(given: Any) -> Tokenizer:
    if isinstance(given, str | os.PathLike) and Path(given).name != TOKENIZER_FILE:
        return open_checkpoint(given).tokenizer()
    return wrap(given)


def _check_fit(tokenizer: Tokenizer, source: ModelSource) -> None:
    """Raises `ValueError` for a tokenizer of another model than the checkpoint, and warns where the model is the
    caller's own. Sound models may have a padded vocabulary, and tokenizers some added tokens, for images say, that text
    models lack."""
    size, eos, vocab = tokenizer.text_vocab_size or 0, tokenizer.eos_token_id, source.cfg.vocab
    if size > vocab:
        trouble = f"the tokenizer has {size} tokens, but the model only {vocab}"
    elif eos is not None and eos >= vocab:
        trouble = f"the tokenizer ends texts by token {eos}, but the model has {vocab} only, 0 to {vocab - 1}"
    elif size and 2 * (tokenizer.vocab_size or size) < vocab:
        log.warning("the tokenizer has %d tokens and the model %d: it may be another model's", size, vocab)
        return
    else:
        return
    if source.checkpoint is not None:
        raise ValueError(f"{source.name}: {trouble}. It is another model's; give the tokenizer that came with this one")
    log.warning("%s: it may be another model's", trouble)


def _of_pair(cfg: Any, params: Any) -> tuple[Any, nnx.Module, Params]:
    """Configuration, abstract model and parameters; the dtype of the configuration becomes what the model computes
    with these parameters, whatever it said. (Which parameters are missing is found when they are placed.)"""
    model = transformer.abstract(registry.model_for(cfg), cfg)
    graph, shapes = nnx.split(model)
    given = {name: leaf.dtype for name, leaf in named(params).items() if hasattr(leaf, "dtype")}
    for name, variable in named(shapes).items():
        if name in given and jnp.issubdtype(given[name], jnp.floating):
            variable.set_value(jax.ShapeDtypeStruct(variable.get_value().shape, given[name]))
    cfg = replace(cfg, dtype=kv_dtype(graph, shapes, cfg, type(model).__qualname__))
    return cfg, transformer.abstract(type(model), cfg), params
