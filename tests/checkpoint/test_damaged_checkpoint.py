"""Checkpoints that are damaged, incomplete or hostile are refused, with the file, the cause and a remedy."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint.tensors import find_tensors
from jaxllm.errors import ModelFormatError
from tests.checkpoints import Q_PROJ, load, rewrite, split_in_two, write_checkpoint, write_index


@pytest.fixture
def model_dir(tmp_path):
    return write_checkpoint(tmp_path)


CASES = {
    "missing": ({Q_PROJ: None}, f"missing {Q_PROJ}, unexpected none; take config and weights of one model"),
    "unexpected": ({"model.extra": np.ones(2, np.float32)}, "missing none, unexpected model.extra"),
    "fewer rows": ({Q_PROJ: np.ones((31, 16), np.float32)}, r"q_proj.weight has shape \[31, 16\].*\[32, 16\]"),
    "transposed": ({Q_PROJ: np.ones((16, 32), np.float32)}, r"has shape \[16, 32\]"),
    "empty": ({"model.norm.weight": np.ones(0, np.float32)}, r"model.norm.weight has shape \[0\]"),
    "integers": ({Q_PROJ: np.ones((32, 16), np.int8)}, "q_proj.weight has dtype I8.*BF16.*unquantised"),
    "nan": ({Q_PROJ: np.full((32, 16), np.nan, np.float32)}, "q_proj.weight holds values that are not"),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_do_not_fit(model_dir, case):
    changes, message = CASES[case]
    rewrite(model_dir, changes)
    with pytest.raises(ModelFormatError, match=message) as error:
        load(model_dir)
    assert str(model_dir) in str(error.value)


def test_value_beyond_the_wanted_dtype(model_dir):
    rewrite(model_dir, {"model.norm.weight": np.full(16, 1e5, np.float32)})
    load(model_dir, jnp.bfloat16)
    with pytest.raises(ModelFormatError, match="model.norm.weight.*not finite in float16.*wider range"):
        load(model_dir, jnp.float16)


def header(**entry):
    text = json.dumps({"model.norm.weight": entry}).encode()
    return struct.pack("<Q", len(text)) + text


HEADERS = {
    "empty": b"",
    "short": b"\x01\x02",
    "garbage": bytes(range(256)) * 4,
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "shape overflows": header(dtype="F32", shape=[2**62, 2**62], data_offsets=[0, 8]) + bytes(8),
    "negative shape": header(dtype="F32", shape=[-16], data_offsets=[0, 64]) + bytes(64),
    "offsets outside": header(dtype="F32", shape=[16], data_offsets=[0, 64]),
    "offsets backwards": header(dtype="F32", shape=[16], data_offsets=[64, 0]) + bytes(64),
    "unknown dtype": header(dtype="PICKLE", shape=[16], data_offsets=[0, 64]) + bytes(64),
    "entry of another type": struct.pack("<Q", 23) + b'{"a":["F32",[1],[0,4]]}' + bytes(4),
    "nested": struct.pack("<Q", 10**5) + b"[" * 10**5,
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_safetensors(model_dir, case):
    (model_dir / "model.safetensors").write_bytes(HEADERS[case])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is not a sound safetensors file"):
        load(model_dir)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(0, 2500), st.integers(0, 255), min_size=1, max_size=4))
def test_any_bytes_in_a_header_are_refused_or_harmless(model_dir, changes):
    data = bytearray((model_dir / "model.safetensors").read_bytes())
    for position, byte in changes.items():
        data[position] = byte
    changed = model_dir / "changed"
    changed.mkdir(exist_ok=True)
    (changed / "model.safetensors").write_bytes(data)
    try:
        find_tensors(changed)
    except ModelFormatError as error:
        assert "model.safetensors" in str(error)


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_truncated_safetensors(model_dir, kept):
    data = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is not a sound.*truncated"):
        load(model_dir)


@pytest.mark.parametrize(
    "name",
    [
        "../model-0.safetensors",
        "/etc/model.safetensors",
        "blobs/model-0.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "C:x.safetensors",
        "pytorch_model.bin",
        None,
        3,
    ],
)
def test_index_must_name_files_beside_it(model_dir, name):
    weight_map = split_in_two(model_dir)
    write_index(model_dir, weight_map | {Q_PROJ: name})
    with pytest.raises(ModelFormatError, match="index.json names .* must be a .*safetensors file beside it"):
        load(model_dir)


def test_missing_shard_is_named(model_dir):
    split_in_two(model_dir)
    (model_dir / "model-1.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model-1\.safetensors is missing.*index\.json names it"):
        load(model_dir)


@pytest.mark.parametrize("weight_map", [None, {}, ["model-0.safetensors"], "model-0.safetensors"])
def test_index_without_a_map(model_dir, weight_map):
    split_in_two(model_dir)
    write_index(model_dir, weight_map)
    with pytest.raises(ModelFormatError, match="index.json: weight_map must map tensors to files"):
        load(model_dir)


def test_tensor_in_two_shards(model_dir):
    split_in_two(model_dir)
    shard = model_dir / "blobs" / "model-1.safetensors"
    both = load_file(model_dir / "model-0.safetensors") | load_file(shard)
    save_file(both, shard)
    with pytest.raises(ModelFormatError, match=r"in both .*model-0\.safetensors and .*model-1\.safetensors"):
        load(model_dir)


def test_weights_in_another_format(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin, which is pickled.*jaxllm\.convert .* NEW_DIR"):
        load(model_dir)
    (model_dir / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFormatError, match=r"neither model\.safetensors nor .*and no other weights"):
        load(model_dir)
