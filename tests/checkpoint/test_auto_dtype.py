"""What `dtype="auto"` is on a CPU: by what the files hold and what the processor multiplies fastest."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm import LLM
from jaxllm.checkpoint.auto_dtype import dtype_for_cpu
from jaxllm.checkpoint.formats import HuggingFaceDirectory, open_checkpoint
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.pallas_kernels import native
from tests.checkpoints import random_tensors, write_config
from tests.tiny import greedy, ids

HALF = ml_dtypes.bfloat16
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_blocks=32, skip_tokenizer_init=True)


@pytest.fixture(autouse=True, params=[True], ids=["pairs"])
def processor(request, monkeypatch):
    monkeypatch.setattr(native, "multiplies_pairs", lambda: request.param)


def stored(path, dtype):
    write_config(path)
    save_file(random_tensors(dtype), path / "model.safetensors")
    return path


def chosen(path, **options):
    checkpoint = open_checkpoint(path)
    return dtype_for_cpu(checkpoint, checkpoint.config(), **options)


@pytest.mark.parametrize(("dtype", "wanted"), [(HALF, "bfloat16"), (np.float16, "bfloat16"), (np.float32, "float32")])
def test_by_what_the_files_hold(tmp_path, caplog, dtype, wanted):
    caplog.set_level(logging.INFO)
    assert chosen(stored(tmp_path, dtype)) == wanted
    said = [message for message in caplog.messages if "dtype='float32'" in message]
    assert len(said) == (wanted == "bfloat16")


@pytest.mark.parametrize("processor", [False], indirect=True, ids=["no pairs"])
def test_a_processor_without_pairs_has_float32(tmp_path):
    assert chosen(stored(tmp_path, HALF)) == "float32"


def test_most_bytes_decide(tmp_path):
    """Norms that are kept in float32 beside a model's matrices say nothing."""
    tensors = random_tensors(HALF)
    norms = {name: value.astype(np.float32) for name, value in tensors.items() if "norm" in name}
    write_config(tmp_path)
    save_file(tensors | norms, tmp_path / "model.safetensors")
    assert chosen(tmp_path) == "bfloat16"


@pytest.mark.parametrize(("blocks", "wanted"), [("Q4_K", "float32"), ("F16", "bfloat16")])
def test_blocks_of_a_gguf_file_are_no_halves(blocks, wanted):
    tensors = {name: StoredTensor(Path(), name, kind, (256, 256), 0) for name, kind in (("a", blocks), ("b", blocks))}
    tensors["norm"] = StoredTensor(Path(), "norm", "F16", (256,), 0)
    file = HuggingFaceDirectory(Path("model"))
    file.tensors = lambda: tensors
    assert dtype_for_cpu(file, {}) == wanted


def test_the_model_in_the_package_has_float32():
    assert chosen(DEFAULT_MODEL) == "float32"


@pytest.mark.parametrize(("changes", "wanted"), [({"dtype": "bfloat16"}, "bfloat16"), ({}, "float32")])
def test_random_weights_are_as_the_configuration_says(tmp_path, changes, wanted):
    write_config(tmp_path, **changes)
    assert chosen(tmp_path, has_files=False) == wanted


def test_an_engine_is_in_it(tmp_path):
    path = stored(tmp_path, HALF)
    for options, dtype in (({}, jnp.bfloat16), ({"dtype": "float32"}, jnp.float32)):
        with LLM(path, **SIZES, **options) as llm:
            assert {leaf.dtype for leaf in jax.tree.leaves(llm.params)} == {jnp.dtype(dtype)}
            (out,) = llm.generate(ids([1, 2, 3]), greedy(4))
            assert len(out.outputs[0].token_ids) == 4
            pools = jax.tree.leaves(llm.engine.runner.executor.state.kv_pools)
            assert {pool.dtype for pool in pools} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    "options",
    [{"mesh": "tensor=2"}, {"batch_invariant": True}, {"record": "log"}],
    ids=lambda options: next(iter(options)),
)
def test_where_bits_or_devices_are_shared_it_is_float32(tmp_path, options):
    path = stored(tmp_path, HALF)
    options = {name: tmp_path / value if name == "record" else value for name, value in options.items()}
    with LLM(path, **SIZES, **options) as llm:
        assert {leaf.dtype for leaf in jax.tree.leaves(llm.params)} == {jnp.dtype(jnp.float32)}
