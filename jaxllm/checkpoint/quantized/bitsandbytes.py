"""bitsandbytes: int8 of each output, and books of 16 values (nf4, fp4) for blocks of a flat weight, whose scales may be
quantised too."""

import json
import math
from typing import Any, NamedTuple

import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight
from jaxllm.checkpoint.quantized.options import Options, is_left_in
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Scheme
from jaxllm.checkpoint.quantized.values import check_scales, read_finite, read_scales, wrong
from jaxllm.checkpoint.tensors import StoredTensor, read_array, read_bytes
from jaxllm.models.quantized import WeightForm

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_MAX_STATE_BYTES = 2**14
_LARGEST_CODE = 127


class BitsAndBytes(Scheme):
    """No kernel multiplies with codes of a book: such a weight is read dense, in float32."""

    name = "bitsandbytes"
    kinds = (
        *_STATES,
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        "SCB",
        "weight_format",
    )

    def __init__(self, options: Options):
        super().__init__(options)
        self._excluded = options.names("llm_int8_skip_modules")
        self._is_int8 = options.flag("load_in_8bit", False)

    def says_quantized(self, name: str) -> bool | None:
        """The list may name no modules of the model, and is missing where the default was taken."""
        return is_left_in(self._excluded, name)

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        return {"weight": ("I8", shape), "SCB": ("F32", shape[:1])} if self._is_int8 else {}

    def module(self, parts: Parts) -> QuantizedModule:
        state = next((kind for kind in _STATES if kind in parts), None)
        return _int8(parts) if state is None else _book(parts, state)


def _int8(parts: Parts) -> QuantizedModule:
    weight = parts.take("weight", ("I8",), (None, None))
    largest = parts.take("SCB", ("F32",), (weight.shape[0],))
    layout = parts.take_scalar("weight_format", ("U8",)) if "weight_format" in parts else None
    form = WeightForm(codes="int8", group=None, scales="float32")

    def read(region: Region) -> StoredWeight:
        if layout is not None and read_array(layout).any():
            raise wrong(layout, "is not 0: the weight is not in rows", "save the model with a newer bitsandbytes")
        scales = read_scales(largest.cut(region.outputs), largest_code=1, can_be_negative=False)
        return StoredWeight(read_array(weight.cut(*region)), scales / np.float32(_LARGEST_CODE))

    return parts.module(form, (weight.shape[0], weight.shape[1]), read, (1, 1))


class _BookState(NamedTuple):
    """What a module's tensors say of its weight."""

    shape: tuple[int, int]
    block: int
    nested_block: int | None  # None: scales are not quantised
    nested_offset: float

    @property
    def num_scales(self) -> int:
        return -(-math.prod(self.shape) // self.block)


def _book(parts: Parts, kind: str) -> QuantizedModule:
    """The tensor `kind` holds the shape, and is read here."""
    given = parts.take(kind, ("U8",), (None,))
    if given.num_bytes > _MAX_STATE_BYTES:
        raise wrong(given, f"has {given.num_bytes} bytes; a description has at most {_MAX_STATE_BYTES}")
    state = _read_state(given)
    weight = parts.take("weight", ("U8", "BF16", "F16", "F32"), (None, 1))
    if 2 * weight.num_bytes != math.prod(state.shape) + math.prod(state.shape) % 2:
        raise wrong(weight, f"has {weight.num_bytes} bytes, but {given.name} has shape {list(state.shape)}")
    book = parts.take("weight.quant_map", ("F32",), (16,))
    absmax = parts.take("weight.absmax", ("F32",) if state.nested_block is None else ("U8",), (state.num_scales,))
    nested = []
    if state.nested_block is not None:
        nested.append(parts.take("weight.nested_absmax", ("F32",), (-(-state.num_scales // state.nested_block),)))
        nested.append(parts.take("weight.nested_quant_map", ("F32",), (256,)))

    def read(region: Region) -> StoredWeight:
        """Of whole rows."""
        first, last = (end * state.shape[1] for end in (region.outputs.start, region.outputs.stop))
        octets = weight._replace(dtype="U8", shape=(weight.num_bytes,)).cut(slice(first // 2, -(-last // 2)))
        blocks = slice(first // state.block, -(-last // state.block))
        return _read_book(state, region.shape, blocks.start, octets, book, absmax.cut(blocks), *nested)

    columns = state.shape[1]
    rows = math.lcm(state.block, columns, 2) // columns  # whose blocks and bytes are theirs alone
    return parts.module(None, state.shape, read, (rows, columns))


def _read_state(tensor: StoredTensor) -> _BookState:
    try:
        state = json.loads(read_bytes(tensor).tobytes())
        shape, nested = state["shape"], state.get("nested_blocksize")
        offset = float(state.get("nested_offset") or 0.0)
        if not (len(shape) == 2 and all(_is_size(size, 2**28) for size in shape) and math.isfinite(offset)):
            raise ValueError(f"shape {shape!r:.100}, nested_offset {offset}")
        if not _is_size(state["blocksize"], 2**16) or nested is not None and not _is_size(nested, 2**16):
            raise ValueError(f"blocksize {state['blocksize']!r:.100}, nested_blocksize {nested!r:.100}")
        return _BookState((shape[0], shape[1]), state["blocksize"], nested, offset)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise wrong(tensor, f"does not describe a weight ({error})") from error


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _read_book(
    state: _BookState,
    shape: tuple[int, int],
    first_block: int,
    weight: StoredTensor,
    book: StoredTensor,
    absmax: StoredTensor,
    nested: StoredTensor | None = None,
    nested_book: StoredTensor | None = None,
) -> StoredWeight:
    scales = read_array(absmax)
    if nested is not None and nested_book is not None:
        factors = np.repeat(read_finite(nested), state.nested_block or 1)[first_block:][: len(scales)]
        scales = read_finite(nested_book)[scales] * factors + np.float32(state.nested_offset)
    check_scales(absmax, scales, largest_code=1, can_be_negative=True)
    values = read_finite(book)
    octets, count = read_bytes(weight), math.prod(shape)
    pairs = np.stack(np.meshgrid(values, values, indexing="ij"), axis=-1).reshape(256, 2)  # the high nibble comes first
    dense = pairs[octets].reshape(-1)[:count]
    whole = count - count % state.block
    dense[:whole].reshape(-1, state.block)[...] *= scales[: whole // state.block, None]
    dense[whole:] *= scales[-1]
    if not np.isfinite(dense).all():
        raise wrong(weight, "holds values that are not finite")
    return StoredWeight(dense.reshape(shape), np.ones(shape[0], np.float32))
