"""Sound quantised checkpoints with anything in them changed: they load, with finite parameters, or are refused by an
error that names the file."""

import copy
import json
import os
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.engine.model_source import Reading, model_source
from jaxllm.errors import ModelFormatError
from jaxllm.sharding.mesh import make_mesh
from tests import checkpoints
from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.make import compressed, method
from tests.checkpoint.quantized.test_gguf import random_rows

EXAMPLES = int(os.environ.get("JAXLLM_MUTATIONS", "12"))  # of each format
SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 8, "intermediate_size": 64}
ROWS = {"type": "float", "num_bits": 8, "dynamic": True, "symmetric": True, "strategy": "token"}
HOSTILE_JSON = (
    *(None, True, False, 0, -1, 1, 3, 5, 16, 31, 128, 2**20, 2**31, 2**70, -(2**63), 0.5, -1.5, 1e300, float("nan")),
    *("", "x", "4", "marlin", "re:(a+)+$", "re:(", "*", ".", "group", "int", "float", "lm_head", "gptq_v2", "é" * 300),
    *([], [None], ["q_proj"], [[]], [128], [0, 0], [2**40, 2**40], [1.5, 2], [32, 32], {}, {"a": {"b": []}}),
)
# What the configuration gains, and what makes a module's tensors of a generator, outputs and inputs.
FORMATS = {
    "awq": (method("awq", bits=4, group_size=16), lambda *a: make.awq(*a, group=16)),
    "gptq": (method("gptq", bits=4, group_size=16, desc_act=True, sym=False), lambda *a: make.gptq(a[0], 4, *a[1:])),
    "gptq, act-order": (
        method(
            "gptq", bits=4, group_size=16, desc_act=True, sym=True, dynamic={"-:.*x": {}, "+:.*q_proj": {"bits": 4}}
        ),
        lambda *a: make.gptq(a[0], 4, *a[1:], zeros=8, order=True),
    ),
    "gptq, 3 bits": (method("gptq", bits=3, group_size=16), lambda *a: make.gptq(a[0], 3, *a[1:])),
    "w4a16": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, ignore=["lm_head"]),
        lambda *a: make.packed(a[0], 4, *a[1:]),
    ),
    "w4a16, asymmetric, act-order": (
        compressed(
            "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False, actorder="group", type="int"
        ),
        lambda *a: make.packed(a[0], 4, *a[1:], symmetric=False, order=True),
    ),
    "w8a8": (
        compressed("int-quantized", num_bits=8, strategy="channel", activations=ROWS | {"type": "int"}),
        lambda rng, o, i: make.Made(
            {
                "weight": rng.integers(-128, 128, (o, i)).astype(np.int8),
                "weight_scale": make.random_scales(rng, (o, 1), make.BF16),
            },
            None,
        ),
    ),
    "fp8 of outputs": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel", activations=ROWS),
        lambda rng, o, i: make.fp8(rng, o, i, scales=(o, 1)),
    ),
    "fp8 of blocks": (
        method("fp8", weight_block_size=[32, 32], activation_scheme="dynamic", modules_to_not_convert=["lm_head"]),
        lambda *a: make.fp8(*a, block=(32, 32), kind="weight_scale_inv"),
    ),
    "modelopt, fp8": (
        method("modelopt", quantization={"quant_algo": "FP8", "exclude_modules": ["lm_head"]}),
        lambda *a: make.fp8(*a),
    ),
    "modelopt, nvfp4": (
        method("modelopt", quant_algo="NVFP4", group_size=16, ignore=["lm_head"]),
        lambda *a: make.nvfp4(*a, divides=False),
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        make.nvfp4,
    ),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        make.mxfp4,
    ),
    "bitsandbytes, nf4": (
        method("bitsandbytes", load_in_4bit=True, llm_int8_skip_modules=["lm_head"]),
        lambda *a: make.bnb4(*a, nested=True),
    ),
    "bitsandbytes, int8": (method("bitsandbytes", load_in_8bit=True), make.bnb8),
    "mlx": ({"quantization": {"group_size": 32, "bits": 4}}, lambda *a: make.mlx(a[0], 4, *a[1:])),
}


@cache
def sound(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """The configuration and tensors of a checkpoint in this format."""
    added, make_module = FORMATS[name]
    config, rng = checkpoints.HF | SIZES | added, np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for key, value in checkpoints.random_tensors(hf=config).items():
        if not key.endswith("_proj.weight"):
            tensors[key] = value
            continue
        made = make_module(rng, *value.shape).tensors
        tensors |= {f"{key.removesuffix('.weight')}.{kind}": part for kind, part in made.items()}
    return config, tensors


def load(path: Path, quantization: str | None = None) -> None:
    """As `LLM` does. Parameters that are not finite are an AssertionError."""
    source = model_source(path, "float32", "cpu", None, Reading(skip_tokenizer_init=True, quantization=quantization))
    mesh = make_mesh(None)
    source.expand(mesh)
    for leaf in jax.tree.leaves(source.place(nnx.split(source.model)[1], mesh)):
        assert np.isfinite(np.asarray(leaf).astype(np.float32)).all()


def check(path: Path, folder: Path, quantization: str | None = None) -> None:
    try:
        load(path, quantization)
    except ModelFormatError as error:
        assert str(folder) in str(error), f"no file is named: {error}"


@st.composite
def configs(draw, config):
    """The configuration with a value in its quantised part replaced, added or taken away."""
    config = copy.deepcopy(config)
    key = "quantization_config" if "quantization_config" in config else "quantization"
    if draw(st.integers(0, 9)) == 0:
        config[key] = draw(st.sampled_from(HOSTILE_JSON))
        return config
    at = config[key]
    while nested := [value for value in at.values() if isinstance(value, dict) and value]:
        if draw(st.booleans()):
            break
        at = draw(st.sampled_from(nested))
    name = draw(st.sampled_from([*at, "group_size", "bits", "num_bits", "strategy", "format", "ignore", "dynamic"]))
    value = draw(st.sampled_from(("gone", *HOSTILE_JSON)))
    if value == "gone":
        at.pop(name, None)
    else:
        at[name] = value
    return config


VALUES = (np.nan, np.inf, -np.inf, 0, -0.0, -1, 1, 1e-42, 1e38, 65504, 255, 127, 2**31 - 1, -(2**31))
DTYPES = tuple(np.dtype(name) for name in make._NAMES)


def as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values, as far as it has them, or the bytes where it has them all."""
    with np.errstate(all="ignore"):
        return array.astype(np.float32).astype(dtype)


def with_value(array: np.ndarray, value: float, at: int) -> np.ndarray:
    array = array.copy()
    with np.errstate(all="ignore"):
        value = np.array(value, np.float64)
        is_integer = array.dtype.kind in "iu"
        value = np.nan_to_num(value).astype(np.int64) if is_integer else value.astype(np.float32)
        array.reshape(-1)[at % max(1, array.size)] = value.astype(array.dtype)
    return array


@st.composite
def tensor_sets(draw, tensors):
    """The tensors with some replaced, renamed, added or taken away; most changes are of quantised modules."""
    tensors = dict(tensors)
    for _ in range(draw(st.integers(1, 3))):
        names = sorted(tensors)
        own = [name for name in names if "_proj." in name]
        name = draw(st.sampled_from(own if own and draw(st.integers(0, 9)) else names))
        array, how = tensors[name], draw(st.integers(0, 9))
        if how == 0:
            del tensors[name]
        elif how == 1:
            tensors[draw(st.sampled_from([*names, name + "x", "weight", ".", "lm_head.scales"]))] = tensors.pop(name)
        elif how == 2:
            shape = draw(st.sampled_from([(-1,), (1, -1), (-1, 1), array.T.shape, (1, *array.shape)]))
            tensors[name] = array.reshape(shape)
        elif how == 3:
            tensors[name] = array[tuple(slice(draw(st.sampled_from([0, 1, size - 1, size]))) for size in array.shape)]
        elif how == 4:
            tensors[name] = as_dtype(array, draw(st.sampled_from(DTYPES)))
        elif how == 5:
            dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype.itemsize == array.itemsize]))
            tensors[name] = array.view(dtype)
        elif array.size and how == 6:
            one = with_value(array, draw(st.sampled_from(VALUES)), 0).reshape(-1)[:1]
            tensors[name] = np.resize(one, array.shape)
        elif array.size:
            tensors[name] = with_value(array, draw(st.sampled_from(VALUES)), draw(st.integers(0, 10**6)))
    return tensors


FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", FORMATS)
def test_sound_ones_load(name, tmp_path):
    config, tensors = sound(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    make.write(tmp_path / "model.safetensors", tensors)
    load(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_any_setting_and_tensor(name, tmp_path, data):
    config, tensors = sound(name)
    which = data.draw(st.integers(1, 3))
    config = data.draw(configs(config)) if which & 1 else config
    tensors = data.draw(tensor_sets(tensors)) if which & 2 else tensors
    (tmp_path / "config.json").write_text(json.dumps(config))
    make.write(tmp_path / "model.safetensors", tensors)
    check(tmp_path, tmp_path)


def changed_bytes(draw, data: bytes, header: int) -> bytes:
    """Some bytes replaced, mostly in the header, or the end cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        most = header if draw(st.integers(0, 3)) else len(changed)
        at = draw(st.integers(0, max(0, most - 1)))
        new = draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"0", b"9", b"-", b"["])
        )
        changed[at : at + len(new)] = new
    if draw(st.integers(0, 9)) == 0:
        del changed[draw(st.integers(0, len(changed))) :]
    return bytes(changed)


@pytest.mark.parametrize("name", ["awq", "w4a16", "fp8 of blocks", "bitsandbytes, nf4"])
@FUZZ
@given(data=st.data())
def test_any_byte_of_a_file(name, tmp_path, data):
    config, tensors = sound(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    make.write(tmp_path / "model.safetensors", tensors)
    text = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(text[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(changed_bytes(data.draw, text, header))
    check(tmp_path, tmp_path)


@cache
def gguf_file(folder: Path) -> bytes:
    """A model of the architecture llama, whose products are of several kinds of blocks."""
    files = pytest.importorskip("tests.gguf_files")
    width, kv, vocab = 256, 32, 24
    keys = {
        "context_length": 64,
        "embedding_length": width,
        "block_count": 1,
        "feed_forward_length": width,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "attention.key_length": 8,
        "attention.value_length": 8,
    }
    shapes = {"attn_q": ("Q4_K", width), "attn_k": ("Q8_0", kv), "attn_v": ("Q6_K", kv), "attn_output": ("Q4_0", width)}
    shapes |= {"ffn_gate": ("Q5_K", width), "ffn_up": ("Q4_1", width), "ffn_down": ("Q5_0", width)}
    tensors = {
        f"blk.0.{name}.weight": (random_rows(kind, rows, width), files.kind(kind))
        for name, (kind, rows) in shapes.items()
    }
    tensors |= {f"{name}.weight": (np.ones(width, np.float32), None) for name in ("blk.0.attn_norm", "blk.0.ffn_norm")}
    tensors |= {"output_norm.weight": (np.ones(width, np.float32), None)}
    tensors |= {"token_embd.weight": (random_rows("Q8_0", vocab, width), files.kind("Q8_0"))}
    tokens = files.vocabulary_keys(model="gpt2", pre="default", tokens=[chr(97 + i) for i in range(vocab)], merges=[])
    metadata = {f"llama.{key}": value for key, value in keys.items()} | tokens
    return files.write(folder / "sound.gguf", "llama", metadata, tensors).read_bytes()


@pytest.mark.parametrize("quantization", [None, "gguf"])
@FUZZ
@given(data=st.data())
def test_any_byte_of_a_gguf_file(quantization, tmp_path, tmp_path_factory, data):
    text = gguf_file(tmp_path_factory.getbasetemp())
    (tmp_path / "model.gguf").write_bytes(changed_bytes(data.draw, text, 3000))
    check(tmp_path / "model.gguf", tmp_path, quantization)
