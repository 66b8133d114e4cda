"""What `dtype="auto"` is for a checkpoint on one CPU whose kernels are fastest in bfloat16."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.checkpoint.gguf.blocks import BLOCKS
from jaxllm.checkpoint.quantized.gguf import is_kept
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.pallas_kernels import native

log = logging.getLogger(__name__)

_HALVES = {"F16": "float16", "BF16": "bfloat16"}  # in files, and in a configuration


def dtype_for_cpu(checkpoint: Checkpoint, hf: Mapping[str, Any], *, has_files: bool = True) -> str:
    """The name of the dtype: "bfloat16" where the processor multiplies pairs of them and most of the floats are stored
    in 16 bits, by the files, or by the configuration `hf` of random weights; else "float32"."""
    if checkpoint.path == DEFAULT_MODEL:  # its texts are the same on every machine
        return "float32"
    kind = _stored_kind(checkpoint) if has_files else str(hf.get("dtype") or hf.get("torch_dtype"))
    if kind not in _HALVES.values() or not native.multiplies_pairs():
        return "float32"
    log.info(
        "%s is stored in %s and served in bfloat16, which this processor multiplies in pairs; dtype='float32' "
        "(--dtype float32) is slower and rounds less",
        checkpoint.path,
        kind,
    )
    return "bfloat16"


def held_on_cpu(checkpoint: Checkpoint, *, keeps_blocks: bool) -> str | None:
    """The name of the dtype of 16 bits in which one CPU that computes in float32 can hold the dense weights, as all of
    them are stored in it; else None. Blocks are none of them if they are served as they are, as `keeps_blocks` says of
    those that can be."""
    tensors = [tensor for tensor in checkpoint.tensors().values() if len(tensor.shape) >= 2 and tensor.dtype in BLOCKS]
    kinds = {tensor.dtype for tensor in tensors if not (keeps_blocks and is_kept(tensor))}
    held = _HALVES.get(kinds.pop()) if len(kinds) == 1 and checkpoint.path != DEFAULT_MODEL else None
    if held is not None:
        log.info(
            "%s is held in %s, as it is stored, and computed in float32; dtype='float32' (--dtype float32) holds it in "
            "that, too, as parameters that are updated may want",
            checkpoint.path,
            held,
        )
    return held


def _stored_kind(checkpoint: Checkpoint) -> str | None:
    """What most bytes are of those that hold numbers, or blocks of them. (Codes of quantised modules are no floats;
    their scales, and what is dense beside them, say what the model was computed in.)"""
    num_bytes: Counter[str] = Counter()
    for tensor in checkpoint.tensors().values():
        if tensor.dtype in BLOCKS:
            num_bytes[tensor.dtype] += tensor.num_bytes
    return _HALVES.get(max(num_bytes, key=num_bytes.__getitem__, default=""))
