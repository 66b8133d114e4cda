"""Reads the tensors of quantised modules, and refuses values that no weight has."""

import numpy as np

from jaxllm.checkpoint.tensors import CODES, FLOATS, StoredTensor, read_array
from jaxllm.errors import ModelFormatError

_LARGEST = float(np.finfo(np.float32).max)
SCALE_NAMES = {name: dtype.name for name, dtype in FLOATS.items()} | {
    name: CODES[name].name for name in ("F8_E4M3", "F8_E8M0")
}


def wrong(tensor: StoredTensor, what: str, remedy: str = "download the file again") -> ModelFormatError:
    return ModelFormatError(f"{tensor.file}: {tensor.name} {what}; {remedy}")


def read_scales(tensor: StoredTensor, *, largest_code: int, can_be_negative: bool) -> np.ndarray:
    """The scales in their own dtype. ModelFormatError for those that no weight has: not finite, negative where they
    stand for a size, so large that weights would not be finite, and, of a whole tensor, zero one and all."""
    scales = read_array(tensor)
    check_scales(tensor, scales, largest_code=largest_code, can_be_negative=can_be_negative)
    if not tensor.is_part and not np.any(scales.astype(np.float32)):
        raise wrong(tensor, "holds scales that are all zero")
    return scales


def check_scales(tensor: StoredTensor, scales: np.ndarray, *, largest_code: int, can_be_negative: bool) -> None:
    """As `read_scales`, of scales that may all be zero."""
    values = scales.astype(np.float32)
    if not np.isfinite(values).all():
        raise wrong(tensor, "holds scales that are not finite")
    if not can_be_negative and (values < 0).any():
        raise wrong(tensor, "holds negative scales")
    most = float(np.abs(values).max(initial=0))
    if most * largest_code > _LARGEST:
        raise wrong(tensor, f"holds scales up to {most:.3g}; its weights would not be finite")


def read_finite(tensor: StoredTensor) -> np.ndarray:
    """float32."""
    values = read_array(tensor).astype(np.float32)
    if not np.isfinite(values).all():
        raise wrong(tensor, "holds values that are not finite")
    return values


def read_scale(tensor: StoredTensor) -> float:
    """The one scale that a tensor holds: that of activations, of cached keys or values, or of a whole weight."""
    scale = float(read_array(tensor).astype(np.float32).reshape(()))
    if not 0 < scale < np.inf:
        raise wrong(tensor, f"is {scale:.3g}; a scale must be positive and finite")
    return scale


def read_e4m3(tensor: StoredTensor) -> np.ndarray:
    """Codes of 8 bits. ModelFormatError for NaN."""
    codes = read_array(tensor)
    if (codes.view(np.uint8) & np.uint8(127) == np.uint8(127)).any():
        raise wrong(tensor, "holds NaN")
    return codes


def read_order(tensor: StoredTensor, group: int, num_groups: int) -> np.ndarray:
    """int32 `[in]`: the inputs, those of the first group first, of the tensor that has the group of each."""
    groups = read_array(tensor).astype(np.int64)
    if groups.size and not (0 <= groups.min() and groups.max() < num_groups):
        raise wrong(tensor, f"holds groups from {groups.min()} to {groups.max()}; there are {num_groups}")
    sizes = np.bincount(groups, minlength=num_groups)
    if (sizes != group).any():
        raise wrong(tensor, f"puts {sizes.min()} to {sizes.max()} inputs into groups of {group}")
    return np.argsort(groups, kind="stable").astype(np.int32)


def check_ordinary(tensor: StoredTensor, group: int) -> None:
    """ModelFormatError unless neighbours are in one group, as a configuration without act-order says."""
    groups = read_array(tensor)
    if (groups != np.arange(len(groups)) // group).any():
        raise wrong(
            tensor,
            "puts inputs into groups in another order than theirs, but the configuration has no act-order",
            "take config and weights of one model",
        )
