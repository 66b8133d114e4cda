"""How hidden states become embeddings or scores: what a model directory says in the files of sentence-transformers, and
in `config.json`. They may be hostile: data only, bounded, and what is not known is refused by its name."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxllm.argument_checks import check_int
from jaxllm.checkpoint.config import ModelSpec
from jaxllm.checkpoint.files import read_json, read_json_list
from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, find_tensors
from jaxllm.errors import ModelFormatError
from jaxllm.models.transformer import Config

MODULES, PROMPTS, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # `pooling_mode` -> ours
_OLD_POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
_MOST_MODULES, _MOST_FEATURES, _MOST_PROMPTS = 16, 2**18, 1000
Vectors = Float32[np.ndarray, "rows _"]


def _sigmoid(x: Vectors) -> Vectors:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _softmax(x: Vectors) -> Vectors:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


ACTIVATIONS = {  # by the names of torch's classes, in lower case
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (0.5 + 0.5 * np.vectorize(math.erf, otypes=[np.float32])(x / math.sqrt(2))),
    "softmax": _softmax,
}


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """A layer over pooled vectors."""

    weight: Float32[np.ndarray, "features out"]
    bias: Float32[np.ndarray, " out"] | None
    activation: str = field(metadata={"help": f"one of {sorted(ACTIVATIONS)}"})

    def __call__(self, x: Vectors) -> Float32[np.ndarray, "rows out"]:
        y = x @ self.weight
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolingConfig:
    """`activation` is what scores of labels become unless a request wants them raw. No prompt is added to a text by
    itself; `lowercase` texts are, before they become tokens."""

    pooling: str = field(metadata={"help": "'last', 'mean' or 'cls': which token, or the mean of all"})
    normalize: bool = field(metadata={"help": "whether embeddings have length 1"})
    dense: tuple[DenseLayer, ...] = field(default=(), metadata={"help": "applied to the pooled vector"})
    max_length: int = field(metadata={"help": "tokens of a text"})
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what stands before a text
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    is_matryoshka: bool = field(default=False, metadata={"help": "whether the first features alone embed as well"})
    matryoshka_dimensions: tuple[int, ...] = field(default=(), metadata={"help": "so many of them; none: any"})
    activation: str = "identity"

    def dim(self, embed: int) -> int:
        """Features of an embedding, of hidden states of `embed`."""
        return self.dense[-1].weight.shape[1] if self.dense else embed

    def finish(
        self, pooled: Vectors, *, dimensions: int | None = None, normalize: bool | None = None
    ) -> Float32[np.ndarray, "rows out"]:
        """Embeddings of pooled hidden states: through the dense layers, cut to `dimensions`, then normalised."""
        x = pooled
        for layer in self.dense:
            x = layer(x)
        x = x[:, :dimensions]
        if self.normalize if normalize is None else normalize:
            x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        return x

    def activate(self, scores: Vectors) -> Vectors:
        """Probabilities, or what else the model's scores stand for."""
        return ACTIVATIONS[self.activation](scores)


def read_pooling(checkpoint: Checkpoint, spec: ModelSpec, overrides: Mapping[str, Any] | None = None) -> PoolingConfig:
    """What the model's files say of pooling. Without those of sentence-transformers a model pools as its `Config` says,
    and embeddings are normalised. `overrides` are those of its `config.json`.

    Raises `ModelFormatError` for modules and values that are not supported.
    """
    hf, cfg, folder = checkpoint.config() | dict(overrides or {}), spec.cfg, checkpoint.path
    texts, prompts = (_optional(folder / name) for name in (TEXTS, PROMPTS))  # a GGUF file has none in it
    modules = _modules(folder / MODULES) if (folder / MODULES).is_file() else []
    try:
        found = _of_modules(folder, modules, cfg) if modules else {}
        return PoolingConfig(
            **({"pooling": cfg.pooling, "normalize": True} | found),
            **_texts(texts, cfg),
            **_prompts(prompts),
            **_matryoshka(hf),
            activation=_activation(hf, prompts, cfg),
        )
    except ValueError as error:
        raise ModelFormatError(f"{checkpoint.path}: {error}") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Kind and directory of each module."""
    found = []
    entries = read_json_list(path)
    if len(entries) > _MOST_MODULES:
        raise ModelFormatError(f"{path} has {len(entries)} modules; at most {_MOST_MODULES} are supported")
    for entry in entries:
        kind, where = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(where, str):
            raise ModelFormatError(f"{path}: {entry!r:.200} has no type and path; download it again")
        if PurePosixPath(where).name != where or where == "..":  # "" is the model's own directory
            raise ModelFormatError(f"{path} names the directory {where!r:.100}; it must be one beside it")
        found.append((kind, path.parent / where))
    return found


def _of_modules(folder: Path, modules: list[tuple[str, Path]], cfg: Config) -> dict[str, Any]:
    """A transformer, its pooling, perhaps dense layers, perhaps a normalisation: in this order."""
    kinds = [kind.rpartition(".")[2] for kind, _ in modules]
    for (kind, _), name in zip(modules, kinds, strict=True):
        if name not in _KINDS or not kind.startswith("sentence_transformers."):
            raise ValueError(
                f"{MODULES} has a module {kind!r:.100}, which is not supported; supported are, of those in "
                f"sentence_transformers, {', '.join(_KINDS)}"
            )
    if cfg.task == "classify":
        if kinds != ["Transformer"]:
            raise ValueError(f"{MODULES} has the modules {', '.join(kinds)}; a classifier's is a Transformer alone")
        return {}
    normalizes = kinds[-1] == "Normalize"
    middle = kinds[2:-1] if normalizes else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in middle):
        raise ValueError(
            f"{MODULES} has the modules {', '.join(kinds)}; supported are Transformer and Pooling, then any number of "
            "Dense, then perhaps Normalize"
        )
    if modules[0][1] != folder:
        raise ValueError(f"{MODULES} has the transformer in {modules[0][1].name}; move its files beside {MODULES}")
    dense, width = [], cfg.embed
    for _, path in modules[2 : 2 + len(middle)]:
        dense.append(_dense(path, width))
        width = dense[-1].weight.shape[1]
    return {"pooling": _pooling(modules[1][1]), "normalize": normalizes, "dense": tuple(dense)}


def _pooling(path: Path) -> str:
    config = read_json(path / "config.json")
    given = config.get("pooling_mode")
    if given is None:  # before sentence-transformers 5: a flag for each
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        known = _OLD_POOLINGS
    else:
        modes = list(given) if isinstance(given, list) else [given]
        known = _POOLINGS
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in known:
        raise ValueError(f"{path.name} pools by {modes!r:.200}; supported is one of {sorted(known)}")
    if known[modes[0]] == "mean" and config.get("include_prompt", True) is not True:
        raise ValueError(f"{path.name} leaves the prompt out of the mean (include_prompt), which is not supported")
    return known[modes[0]]


def _dense(path: Path, width: int) -> DenseLayer:
    config = read_json(path / "config.json")
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    for key, size in zip(("in_features", "out_features"), sizes, strict=True):
        check_int(f"{path.name}: {key}", size, 1, _MOST_FEATURES)
    if sizes[0] != width:
        raise ValueError(f"{path.name} takes vectors of {sizes[0]} features, but gets some of {width}")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key, "sentence_embedding") != "sentence_embedding":
            raise ValueError(f"{path.name}: {key}={config[key]!r:.100} is not supported, only 'sentence_embedding'")
    tensors = find_tensors(path)
    wanted: dict[str, tuple[Any, ...]] = {"linear.weight": (sizes[1], sizes[0])}
    if config.get("bias", True):
        wanted["linear.bias"] = (sizes[1],)
    if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
        shapes = {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}
        raise ValueError(f"{path.name} holds the tensors {shapes!s:.300}, not those of its config.json")
    arrays = {name: _read(tensor) for name, tensor in tensors.items()}
    activation = _torch_name(config.get("activation_function", "torch.nn.modules.activation.Tanh"), path.name)
    return DenseLayer(np.ascontiguousarray(arrays["linear.weight"].T), arrays.get("linear.bias"), activation)


def _read(tensor: StoredTensor) -> np.ndarray:
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{tensor.file}: {tensor.name} has dtype {tensor.dtype}; supported are {list(FLOATS)}")
    try:
        values = np.fromfile(tensor.file, FLOATS[tensor.dtype], math.prod(tensor.shape), offset=tensor.offset)
    except OSError as error:
        raise tensor.unreadable(str(error)) from error
    if values.size < math.prod(tensor.shape):
        raise tensor.shorter()
    values = values.reshape(tensor.shape).astype(np.float32)
    if not np.isfinite(values).all():
        raise tensor.not_finite(values.dtype)
    return values


def _torch_name(given: Any, where: str) -> str:
    """Of a class of torch's, as `ACTIVATIONS` has it."""
    name = given.rpartition(".")[2].lower() if isinstance(given, str) and given.startswith("torch.nn.") else None
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{where} has the activation {given!r:.100}, which is not supported; supported: {sorted(ACTIVATIONS)}"
        )
    return name


def _texts(given: dict[str, Any], cfg: Config) -> dict[str, Any]:
    max_length = given.get("max_seq_length")
    if max_length is not None:
        check_int(f"{TEXTS}: max_seq_length", max_length, 1, 2**30)
    lowercase = given.get("do_lower_case", False)
    if not isinstance(lowercase, bool):
        raise ValueError(f"{TEXTS}: do_lower_case={lowercase!r:.100} must be true or false")
    return {"max_length": min(max_length or cfg.max_len, cfg.max_len), "lowercase": lowercase}


def _prompts(given: dict[str, Any]) -> dict[str, Any]:
    prompts = given.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{PROMPTS}: prompts={json.dumps(prompts)[:200]} must give each name a text")
    if len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"{PROMPTS} has {len(prompts)} prompts; at most {_MOST_PROMPTS} are supported")
    name = given.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise ValueError(f"{PROMPTS}: default_prompt_name={name!r:.100} is not in its prompts {sorted(prompts)!s:.300}")
    similarity = given.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ValueError(f"{PROMPTS}: similarity_fn_name={similarity!r:.100} is not one of {list(SIMILARITIES)}")
    return {"prompts": prompts, "default_prompt_name": name, "similarity": similarity}


def _matryoshka(hf: dict[str, Any]) -> dict[str, Any]:
    dimensions = hf.get("matryoshka_dimensions") or []
    if not isinstance(dimensions, list):
        raise ValueError(f"matryoshka_dimensions={dimensions!r:.100} must be a list of numbers")
    for one in dimensions:
        check_int("matryoshka_dimensions", one, 1, _MOST_FEATURES)
    return {
        "is_matryoshka": bool(dimensions) or hf.get("is_matryoshka") is True,
        "matryoshka_dimensions": tuple(sorted(dimensions)),
    }


def _activation(hf: dict[str, Any], prompts: dict[str, Any], cfg: Config) -> str:
    """Of scores: what the files name, or as sentence-transformers does without; classes that exclude each other get
    probabilities."""
    if cfg.task != "classify":
        return "identity"
    older = hf.get("sentence_transformers")
    given = (
        prompts.get("activation_fn"),
        older.get("activation_fn") if isinstance(older, dict) else None,
        hf.get("sbert_ce_default_activation_function"),
    )
    for name in given:
        if name is not None:
            return _torch_name(name, "the classifier")
    return default_activation(cfg)


def default_activation(cfg: Any) -> str:
    """Of a classifier's scores, by its labels and what they mean."""
    if cfg.problem_type == "regression":
        return "identity"
    return "sigmoid" if cfg.problem_type == "multi_label_classification" or len(cfg.labels) == 1 else "softmax"
