"""The scales of cached keys and values that a quantised checkpoint brings."""

from collections.abc import Mapping

from jaxllm.checkpoint.quantized.scheme import Scheme
from jaxllm.checkpoint.quantized.values import read_scale
from jaxllm.checkpoint.tensors import StoredTensor

Scales = list[tuple[float, float]]  # of each layer's keys and values


def read_kv_scales(scheme: Scheme, stored: Mapping[str, StoredTensor], num_layers: int, kind: str) -> Scales | None:
    """Those for a cache of `kind`, "fp8" or "int8"; None if the checkpoint has none, or has them for another.
    ModelFormatError if a layer lacks its own."""
    found = scheme.kv_scales(stored)
    if not found or scheme.kv_kind != kind:
        return None
    if found.keys() != set(range(num_layers)):
        missing = [i for i in range(num_layers) if i not in found]
        what = f"layers {missing[:10]} have none" if missing else f"there is no layer {max(found)}"
        raise scheme.options.error(
            f"the files have scales of cached keys and values, but {what}", "download them again"
        )
    return [(read_scale(found[i][0]), read_scale(found[i][1])) for i in range(num_layers)]
