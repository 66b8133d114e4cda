"""MXFP4 of gpt-oss: stacked experts of e2m1 codes, in groups of 32 with powers of two as scales."""

import re
from collections.abc import Mapping

from jaxllm.checkpoint.quantized.fp4 import mxfp4_headers, mxfp4_module
from jaxllm.checkpoint.quantized.module import QuantizedModule
from jaxllm.checkpoint.quantized.options import Options
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Place, Scheme
from jaxllm.checkpoint.quantized.values import wrong
from jaxllm.checkpoint.tensors import StoredTensor

_GROUP_BYTES = 16  # of 32 codes
_EXPERT = re.compile(r"\.experts\.\d+\.(gate_up|down)_proj$")  # as `modules` names them


class Mxfp4(Scheme):
    """`<name>_blocks` `[experts, outputs, groups, 16]` and `<name>_scales` `[experts, outputs, groups]` become a module
    of each expert: `experts.<number>.<name>`."""

    name = "mxfp4"
    kinds = ("_blocks", "_scales")

    def __init__(self, options: Options):
        super().__init__(options)
        options.names("modules_to_not_convert")

    def says_quantized(self, name: str) -> bool | None:
        """The tensors tell."""
        return None

    def expects(self, name: str, place: Place) -> bool:
        return place == "layer" and _EXPERT.search(name) is not None

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        return mxfp4_headers("_blocks", "_scales", shape)

    def module(self, parts: Parts) -> QuantizedModule:
        return mxfp4_module(parts, "_blocks", "_scales")

    def modules(self, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, QuantizedModule], dict[str, StoredTensor]]:
        rest, found = dict(stored), {}
        for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
            both = {kind: rest.pop(f"{name}{kind}") for kind in self.kinds if f"{name}{kind}" in rest}
            blocks = both["_blocks"]
            if len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP_BYTES or 0 in blocks.shape:
                raise wrong(blocks, f"has shape {list(blocks.shape)}; it must be [experts, outputs, groups, 16]")
            for tensor in both.values():
                if tensor.shape[:3] != blocks.shape[:3]:
                    raise wrong(tensor, f"has shape {list(tensor.shape)}, and the blocks {list(blocks.shape)}")
            prefix, _, last = name.rpartition(".")
            for e in range(blocks.shape[0]):
                parts = {kind: _expert(tensor, e) for kind, tensor in both.items()}
                one = f"{prefix}.{e}.{last}"
                found[one] = self.module(Parts(one, parts))
        if not found:
            raise self.options.error("it says mxfp4, but no tensor is called ..._blocks", "take the model's own config")
        return found, rest


def _expert(tensor: StoredTensor, e: int) -> StoredTensor:
    """That of one expert, of two axes: outputs, and bytes of codes or scales."""
    outputs, rest = tensor.shape[1], tensor.shape[2:]
    columns = rest[0] * (rest[1] if len(rest) > 1 else 1)
    return tensor._replace(shape=(outputs, columns), offset=tensor.offset + e * tensor.row_bytes)
