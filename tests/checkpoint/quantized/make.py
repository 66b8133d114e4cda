"""Small quantised modules in each format, made by formulas and plain loops, with the weight that each stands for."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.checkpoint.quantized.module import QuantizedModule, StoredWeight
from jaxllm.checkpoint.quantized.scheme import Scheme
from jaxllm.checkpoint.tensors import StoredTensor

NAME = "model.layers.0.self_attn.q_proj"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
}
Tensors = dict[str, np.ndarray]


class Made(NamedTuple):
    """A module's tensors, by what their names have after its own, and its weight, float32 `[out, in]`."""

    tensors: Tensors
    weight: np.ndarray


class Opened(NamedTuple):
    """A checkpoint's format, what it is made of, and what was made of it."""

    scheme: Scheme
    stored: dict[str, StoredTensor]
    modules: dict[str, QuantizedModule]
    left: dict[str, StoredTensor]

    @property
    def module(self) -> QuantizedModule:
        return self.modules[NAME]


def write(path: Path, tensors: Tensors) -> None:
    """A safetensors file."""
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": _NAMES[value.dtype.name],
            "shape": value.shape,
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def find(path: Path, config: dict[str, Any], tensors: Tensors) -> tuple[Scheme | None, dict[str, StoredTensor]]:
    """The format of a checkpoint with these additions to its configuration, and its tensors."""
    (path / "config.json").write_text(json.dumps(config))
    write(path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(path)
    return scheme_of(checkpoint, checkpoint.config()), dict(checkpoint.tensors())


def open_made(path: Path, config: dict[str, Any], made: Tensors, **others: np.ndarray) -> Opened:
    """A checkpoint with the module `NAME`, made of these tensors, and others, by their whole names."""
    scheme, stored = find(path, config, {f"{NAME}.{kind}": value for kind, value in made.items()} | others)
    assert scheme is not None
    return Opened(scheme, stored, *scheme.modules(stored))


def dense(weight: StoredWeight) -> np.ndarray:
    """The float32 weight that `StoredWeight` defines."""
    values = np.array(weight.codes.tolist(), np.float32) if weight.codes.size < 2**12 else weight.codes.astype("f4")
    spread = 1 if weight.scales.ndim == 1 else values.shape[1] // weight.scales.shape[1]
    values = values * np.repeat(weight.scales.astype("f4").reshape(len(values), -1), spread, axis=1)
    if weight.offsets is not None:
        values = values + np.repeat(weight.offsets, spread, axis=1)
    if weight.outer is not None:
        values = values * weight.outer[:, None]
    if weight.order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, weight.order] = values
    return ordered


def check_form(module: QuantizedModule, weight: StoredWeight) -> None:
    """What was read has the form that was planned from headers."""
    form, (num_outputs, num_inputs) = module.form, module.shape
    if form is None:
        assert weight.codes.dtype == np.float32 and (weight.scales == 1).all() and weight.offsets is None
        return
    assert (weight.codes.dtype.name, weight.scales.dtype.name) == (form.codes, form.scales)
    assert weight.codes.shape == module.shape and weight.codes.flags.c_contiguous
    assert weight.scales.shape == ((num_outputs, num_inputs // form.group) if form.group else (num_outputs,))
    assert (weight.offsets is not None) == form.has_offsets
    assert weight.offsets is None or weight.offsets.shape == weight.scales.shape and weight.offsets.dtype == np.float32
    assert (weight.outer is not None) == form.has_outer
    assert (weight.order is not None) == form.is_reordered
    assert weight.order is None or weight.order.dtype == np.int32


def words(values: np.ndarray, bits: int, dtype: type = np.int32) -> np.ndarray:
    """Each row as one long number, the first value lowest, cut into words of 32 bits."""
    rows = []
    for row in values.tolist():
        number = sum(int(value) << i * bits for i, value in enumerate(row))
        size = -(-len(row) * bits // 32)
        rows.append([number >> 32 * i & 0xFFFFFFFF for i in range(size)])
    return np.array(rows, np.uint32).view(dtype)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float16) -> np.ndarray:
    return rng.uniform(0.01, 0.1, shape).astype(np.float32).astype(dtype)


def awq(rng, num_outputs=16, num_inputs=32, group=8, zeros=None, dtype=np.float16) -> Made:
    groups = num_inputs // group
    q = rng.integers(0, 16, (num_inputs, num_outputs))
    z = rng.integers(0, 16, (groups, num_outputs)) if zeros is None else np.full((groups, num_outputs), zeros)
    s = random_scales(rng, (groups, num_outputs), dtype)

    def pack(values):
        packed = np.zeros((len(values), num_outputs // 8), np.uint32)
        for column in range(num_outputs // 8):
            for nibble, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, column] |= values[:, 8 * column + place].astype(np.uint32) << np.uint32(4 * nibble)
        return packed.view(np.int32)

    weight = (q - np.repeat(z, group, 0)).astype(np.float32) * np.repeat(s, group, 0).astype(np.float32)
    return Made({"qweight": pack(q), "qzeros": pack(z), "scales": s}, weight.T)


def gptq(rng, bits=4, num_outputs=32, num_inputs=64, group=16, zeros=None, version=1, order=False) -> Made:
    groups = num_inputs // group
    q = rng.integers(0, 2**bits, (num_inputs, num_outputs))
    least, most = (1, 2**bits + 1) if version == 1 else (0, 2**bits)
    z = rng.integers(least, most, (groups, num_outputs)) if zeros is None else np.full((groups, num_outputs), zeros)
    s = random_scales(rng, (groups, num_outputs))
    g_idx = np.repeat(np.arange(groups, dtype=np.int32), group)
    g_idx = rng.permutation(g_idx) if order else g_idx
    weight = s[g_idx].astype(np.float32) * (q - z[g_idx]).astype(np.float32)
    tensors = {
        "qweight": np.ascontiguousarray(words(q.T, bits).T),
        "qzeros": words(z - (2 - version), bits),
        "scales": s,
        "g_idx": g_idx,
    }
    return Made(tensors, weight.T)


def mlx(rng, bits=4, num_outputs=8, num_inputs=64, group=32, dtype=np.float16) -> Made:
    q = rng.integers(0, 2**bits, (num_outputs, num_inputs))
    s = random_scales(rng, (num_outputs, num_inputs // group), dtype)
    s[0, 0] = -s[0, 0]
    b = rng.standard_normal(s.shape).astype(np.float32).astype(dtype)
    weight = q.astype(np.float32) * np.repeat(s, group, 1).astype(np.float32)
    return Made(
        {"weight": words(q, bits, np.uint32), "scales": s, "biases": b},
        weight + np.repeat(b, group, 1).astype(np.float32),
    )


def packed(rng, bits=4, num_outputs=16, num_inputs=64, group=16, symmetric=True, order=False, dtype=BF16) -> Made:
    """compressed-tensors, pack-quantized."""
    groups, half = num_inputs // group, 2 ** (bits - 1)
    q = rng.integers(-half, half, (num_outputs, num_inputs))
    z = np.zeros((num_outputs, groups), int) if symmetric else rng.integers(-half, half, (num_outputs, groups))
    s = random_scales(rng, (num_outputs, groups), dtype)
    g_idx = np.repeat(np.arange(groups, dtype=np.int32), group)
    g_idx = rng.permutation(g_idx) if order else g_idx
    tensors = {
        "weight_packed": words(q + half, bits),
        "weight_scale": s,
        "weight_shape": np.array([num_outputs, num_inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(words((z + half).T, bits).T)
    if order:
        tensors["weight_g_idx"] = g_idx
    return Made(tensors, (q - z[:, g_idx]).astype(np.float32) * s[:, g_idx].astype(np.float32))


def fp8(rng, num_outputs=32, num_inputs=64, scales=(), dtype=np.float32, block=None, kind="weight_scale") -> Made:
    """Scales of this shape, or of these blocks."""
    codes = rng.integers(0, 256, (num_outputs, num_inputs)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    weight = codes.view(E4M3)
    shape = scales if block is None else (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
    s = np.asarray(2.0 ** rng.integers(-9, 3, shape) if dtype is E8M0 else rng.uniform(0.01, 0.1, shape)).astype(dtype)
    spread = s.astype(np.float32)
    if block is not None:
        spread = np.repeat(np.repeat(spread, block[0], 0), block[1], 1)[:num_outputs, :num_inputs]
    elif spread.ndim == 1 and spread.size > 1:
        spread = spread[:, None]
    return Made({"weight": weight, kind: s}, weight.astype(np.float32) * spread)


def fp4_codes(rng, num_outputs: int, num_inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of two codes, the low nibble first, and their values."""
    codes = rng.integers(0, 16, (num_outputs, num_inputs))
    return (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8), FP4[codes]


def nvfp4(rng, num_outputs=8, num_inputs=64, divides=True) -> Made:
    """Of compressed-tensors, whose global scale divides, or ModelOpt."""
    octets, values = fp4_codes(rng, num_outputs, num_inputs)
    s = rng.uniform(1, 448, (num_outputs, num_inputs // 16)).astype(E4M3)
    overall = np.array([rng.uniform(100, 5000)], np.float32)
    weight = values * np.repeat(s.astype(np.float32), 16, 1)
    if divides:
        tensors = {"weight_packed": octets, "weight_scale": s, "weight_global_scale": overall}
        return Made(tensors | {"input_global_scale": np.ones(1, np.float32)}, weight * (np.float32(1) / overall))
    overall = (np.float32(1) / overall).reshape(())
    tensors = {"weight": octets, "weight_scale": s, "weight_scale_2": overall, "input_scale": np.ones((), np.float32)}
    return Made(tensors, weight * overall)


def mxfp4(rng, num_outputs=8, num_inputs=64) -> Made:
    octets, values = fp4_codes(rng, num_outputs, num_inputs)
    exponents = rng.integers(100, 140, (num_outputs, num_inputs // 32)).astype(np.uint8)
    weight = np.ldexp(values, np.repeat(exponents.astype(np.int32), 32, 1) - 127)
    return Made({"weight_packed": octets, "weight_scale": exponents}, weight)


def bnb4(rng, num_outputs=16, num_inputs=24, block=64, nested=False, kind="nf4", storage=np.uint8) -> Made:
    """bitsandbytes' books. Blocks run over rows' ends where they don't divide them."""
    count = num_outputs * num_inputs
    book = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    codes = rng.integers(0, 16, count)
    num_scales = -(-count // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [num_outputs, num_inputs]}
    tensors = {"weight": (codes[::2] * 16 + codes[1::2]).astype(np.uint8).view(storage)[:, None]}
    tensors["weight.quant_map"] = book
    scales = rng.uniform(0.1, 1, num_scales).astype(np.float32)
    if nested:
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        second = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        octets = rng.integers(0, 256, num_scales).astype(np.uint8)
        largest = rng.uniform(0.1, 1, -(-num_scales // 4)).astype(np.float32)
        scales = np.array([second[octet] * largest[i // 4] + np.float32(0.25) for i, octet in enumerate(octets)])
        tensors |= {"weight.absmax": octets, "weight.nested_absmax": largest, "weight.nested_quant_map": second}
    else:
        tensors["weight.absmax"] = scales
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    weight = np.array([book[code] * scales[i // block] for i, code in enumerate(codes)], np.float32)
    return Made(tensors, weight.reshape(num_outputs, num_inputs))


def bnb8(rng, num_outputs=16, num_inputs=24) -> Made:
    q = rng.integers(-127, 128, (num_outputs, num_inputs)).astype(np.int8)
    largest = rng.uniform(0.1, 1, num_outputs).astype(np.float32)
    tensors = {"weight": q, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return Made(tensors, q.astype(np.float32) * (largest / np.float32(127))[:, None])


def compressed(form: str, ignore=(), targets=("Linear",), **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group. `activations` are those of the input."""
    activations = weights.pop("activations", None)
    group = {"targets": list(targets), "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore)}
    return {"quantization_config": config | {"config_groups": {"group_0": group}}}


def method(name: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name} | settings}


def unwords(packed_rows: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Undoes `words`."""
    rows = []
    for row in packed_rows.tolist():
        number = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row))
        rows.append([number >> i * bits & 2**bits - 1 for i in range(count)])
    return np.array(rows)
