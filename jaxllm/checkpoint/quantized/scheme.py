"""What the readers of all quantised formats share: finding a checkpoint's modules, and holding them against its
configuration."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight
from jaxllm.checkpoint.quantized.options import Options
from jaxllm.checkpoint.quantized.values import wrong
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, read_array
from jaxllm.errors import ModelFormatError
from jaxllm.models.quantized import WeightForm

_IN_LAYER = re.compile(r"(^|\.)\d+\.")
_KV_SCALE = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d{1,5})\.(?:self_attn|attn|attention)\.(?:attn\.)?"
    r"(?:(?P<one>[kv])_scale|(?P<of>[kv])_proj\.(?:(?P=of)_scale|output_scale)|(?P<both>kv_scale))"
)
Place = Literal["layer", "head", "table"]  # of a product: in a layer or not; or it is an embedding
Headers = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each kind of tensor
_ONE_MODEL = "take config and weights of one model"


class Parts:
    """The tensors of one module, by what their names have after the module's."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor]):
        self.name, self._tensors = name, tensors
        self._taken: set[str] = set()

    def __contains__(self, kind: str) -> bool:
        return kind in self._tensors

    def take(self, kind: str, dtypes: Collection[str], shape: tuple[int | None, ...] | None = None) -> StoredTensor:
        """The tensor, of one of these dtypes and, if it is given, of this shape; None stands for any size."""
        tensor = self._tensors.get(kind)
        if tensor is None:
            raise self.error(f"has {', '.join(sorted(self._tensors))}, but no {kind}", "download its files again")
        if tensor.dtype not in dtypes:
            raise wrong(tensor, f"has dtype {tensor.dtype}; it must be {' or '.join(dtypes)}", _ONE_MODEL)
        if 0 in tensor.shape or shape is not None and not _fits(tensor.shape, shape):
            want = "" if shape is None else f"; it must be {[size or 'any' for size in shape]}"
            raise wrong(tensor, f"has shape {list(tensor.shape)}{want}", _ONE_MODEL)
        self._taken.add(kind)
        return tensor

    def take_scalar(self, kind: str, dtypes: Collection[str]) -> StoredTensor:
        """A tensor of one value."""
        tensor = self.take(kind, dtypes)
        if tensor.shape not in ((), (1,), (1, 1)):
            raise wrong(tensor, f"has shape {list(tensor.shape)}; it must hold one value", _ONE_MODEL)
        return tensor

    def group(self, num_inputs: int, group_size: int | None) -> int:
        """Inputs in a group; all if none are told apart. ModelFormatError for groups that are not whole."""
        group = num_inputs if group_size in (None, -1) else group_size
        if num_inputs % group:
            raise self.error(f"has {num_inputs} inputs, which groups of {group} do not divide", _ONE_MODEL)
        return group

    def module(
        self,
        form: WeightForm | None,
        shape: tuple[int, int],
        reader: Callable[[Region], StoredWeight],
        unit: tuple[int, int],
    ) -> QuantizedModule:
        """See `QuantizedModule`. ModelFormatError for tensors that were not taken."""
        if unexpected := sorted(self._tensors.keys() - self._taken):
            raise wrong(self._tensors[unexpected[0]], "is not in this format, by its configuration", _ONE_MODEL)
        return QuantizedModule(self.name, shape, form, tuple(self._tensors.values()), reader, unit)

    def error(self, what: str, remedy: str) -> ModelFormatError:
        file = next(iter(self._tensors.values())).file
        return ModelFormatError(f"{file}: {self.name} {what}; {remedy}")


def _fits(shape: tuple[int, ...], want: tuple[int | None, ...]) -> bool:
    return len(shape) == len(want) and all(w in (None, size) for size, w in zip(shape, want, strict=True))


def spare_biases(modules: Collection[str], left: Mapping[str, StoredTensor]) -> set[str]:
    """The names of quantised modules' biases that are all zero. Older writers of GPTQ gave them to each module, so that
    a model whose layers have none may pass over these."""
    biases = {f"{name}.bias" for name in modules} & left.keys()
    return {name for name in biases if left[name].dtype in FLOATS and not read_array(left[name]).any()}


def group_of_form(group: int, num_inputs: int, *, has_offsets: bool) -> int | None:
    """What a form has as its group: None where each output has one scale and nothing else."""
    return None if group == num_inputs and not has_offsets else group


class Scheme(ABC):
    """A quantised format, with the settings of one checkpoint."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # what tensors of quantised modules are called beside "weight"
    covers_heads: ClassVar[bool] = True  # whether products that are in no layer may be quantised

    def __init__(self, options: Options):
        self.options = options

    @abstractmethod
    def module(self, parts: Parts) -> QuantizedModule:
        """The quantised module that these are all the tensors of. `ModelFormatError` if they can't be."""

    @abstractmethod
    def says_quantized(self, name: str) -> bool | None:
        """Whether the module is quantised by the configuration; None if that does not tell."""

    def expects(self, name: str, place: Place) -> bool:
        """Whether files of this configuration hold this product quantised, where nothing but it tells: those in layers
        that it doesn't exclude, but routers, and of others those that it means."""
        says = self.says_quantized(name)
        if place == "layer":
            return says is True or says is None and not name.endswith(("gate", "router"))
        return place == "head" and says is True and self.covers_heads

    def expected(self, name: str, shape: tuple[int, int], dtype: str) -> QuantizedModule | None:
        """A module of `shape` (outputs, inputs) as files of this configuration hold it, which can't be read; None for
        one that is read dense. `dtype` is that of the model's floats, in files: "BF16"."""
        file = Path(self.options.where)
        headers = self.headers(name, shape, dtype)
        tensors = {kind: StoredTensor(file, f"{name}.{kind}", *header, offset=0) for kind, header in headers.items()}
        return self.module(Parts(name, tensors)) if tensors else None

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        """Of the tensors that `expected` is made of; empty for a module that is read dense. ModelFormatError where the
        configuration does not tell."""
        raise self.options.error(
            f"it does not say how {name} is quantised", "give the directory that holds the model's files"
        )

    def modules(self, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, QuantizedModule], dict[str, StoredTensor]]:
        """The quantised modules by name, and all other tensors but the scales of cached keys and values.

        Tensors tell which modules are quantised; one that contradicts the configuration is a `ModelFormatError`. Only
        headers are read, and descriptions of a module where a format has them.
        """
        left = {name: tensor for name, tensor in stored.items() if not _KV_SCALE.fullmatch(name)}
        owners: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in left.items():
            if (split := self._split(name)) is not None:
                owners.setdefault(split[0], {})[split[1]] = tensor
        found = {}
        for owner, tensors in owners.items():
            if self._is_quantized(owner, tensors):
                found[owner] = self.module(Parts(owner, tensors))
                for kind in tensors:
                    del left[f"{owner}.{kind}"]
        if not found and len(left) == len(stored):
            raise self.options.error(f"it says {self.name}, but no weight is quantised", _ONE_MODEL)
        return found, left

    def kv_scales(self, stored: Mapping[str, StoredTensor]) -> dict[int, tuple[StoredTensor, StoredTensor]]:
        """The scales of cached keys and values by layer, one value each: see `values.read_scale`."""
        found: dict[int, dict[str, StoredTensor]] = {}
        for name, tensor in stored.items():
            if (match := _KV_SCALE.fullmatch(name)) is None:
                continue
            if tensor.dtype not in FLOATS or tensor.shape not in ((), (1,)):
                what = f"has dtype {tensor.dtype} and shape {list(tensor.shape)}; scales of the KV cache"
                raise wrong(tensor, f"{what} are read where a layer has one float", _ONE_MODEL)
            layer = found.setdefault(int(match["layer"]), {})
            for which in ("k", "v") if match["both"] else (match["one"] or match["of"],):
                if which in layer:
                    raise wrong(tensor, f"is the same scale as {layer[which].name}", _ONE_MODEL)
                layer[which] = tensor
        for layer in found.values():
            if len(layer) == 1:
                ((which, tensor),) = layer.items()
                raise wrong(tensor, f"is the scale of {which} alone; keys and values must both have one")
        return {i: (layer["k"], layer["v"]) for i, layer in found.items()}

    @property
    def kv_kind(self) -> str | None:
        """What its scales of cached keys and values are for: "fp8", "int8", or None for what is neither."""
        algorithm, given = self.options.values.get("kv_cache_quant_algo"), self.options.section("kv_cache_scheme")
        if given is not None:
            is_float, bits = given.values.get("type", "float") == "float", given.values.get("num_bits", 8)
            return None if bits != 8 else "fp8" if is_float else "int8"
        kind = algorithm.lower() if isinstance(algorithm, str) else "fp8"
        return kind if kind in ("fp8", "int8") else None

    def _split(self, name: str) -> tuple[str, str] | None:
        for kind in (*self.kinds, "weight"):
            if name.endswith(f".{kind}"):
                return name.removesuffix(f".{kind}"), kind
        return None

    def _is_quantized(self, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
        weight, says = tensors.get("weight"), self.says_quantized(name)
        example = next(iter(tensors.values()))
        if len(tensors) == 1 and weight is not None and weight.dtype in FLOATS:
            if says and len(weight.shape) == 2 and _IN_LAYER.search(name):
                raise wrong(weight, f"is {weight.dtype}, but quantised by {self.options.where}", _ONE_MODEL)
            return False
        if says is False:
            raise wrong(example, f"is of a quantised module, but {self.options.where} excludes {name}", _ONE_MODEL)
        return True
