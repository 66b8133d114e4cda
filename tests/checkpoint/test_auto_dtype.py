"""What `dtype="auto"` is on a CPU: by what the files hold and what the processor multiplies fastest."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.auto_dtype import dtype_for_cpu, held_on_cpu
from jaxllm.checkpoint.formats import HuggingFaceDirectory, open_checkpoint
from jaxllm.checkpoint.placement import named
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.pallas_kernels import native
from tests import hf_models
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


def test_float16_that_is_asked_for(tmp_path):
    """No kernel of a CPU's multiplies rows of it."""
    with LLM(stored(tmp_path, np.float16), **SIZES, dtype="float16") as llm:
        assert {leaf.dtype for leaf in jax.tree.leaves(llm.params)} == {jnp.dtype(jnp.float16)}
        (out,) = llm.generate(ids([1, 2, 3]), greedy(4))
        assert len(out.outputs[0].token_ids) == 4


NO_PAIRS = pytest.mark.parametrize("processor", [False], indirect=True, ids=["no pairs"])
needs_library = pytest.mark.skipif(
    not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build"
)


def answer(path, **options):
    """What an engine says, and the dtypes of its parameters by name."""
    with LLM(path, **SIZES, **options) as llm:
        held = {name: leaf.get_value().dtype.name for name, leaf in named(llm.params).items()}
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=4, ignore_eos=True)
        (out,) = llm.generate(ids([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), params)
        pools = jax.tree.leaves(llm.engine.runner.executor.state.kv_pools)
        assert {pool.dtype.name for pool in pools} == {"float32"}
        return out.outputs[0], held


def same(ours, theirs):
    """To the bit: a number of 16 bits is a float32 number."""
    one, other = ([{t: each.logprob for t, each in row.items()} for row in out.logprobs] for out in (ours, theirs))
    assert one == other and list(ours.token_ids) == list(theirs.token_ids) and len(one) == 12


@needs_library
@NO_PAIRS
@pytest.mark.parametrize(
    ("family", "more", "stored_in"),
    [
        *(("Llama", {"tie_word_embeddings": True}, dtype) for dtype in (HALF, np.float16)),
        *((family, {}, HALF) for family in ("Qwen2", "Gemma2", "OPT")),
        *(("Mixtral", {}, dtype) for dtype in (HALF, np.float16)),
    ],
)
def test_without_pairs_weights_are_held_as_they_are_stored(family, more, stored_in, tmp_path, caplog):
    """And computed in float32, with the results of weights in float32."""
    caplog.set_level(logging.INFO)
    hf_models.checkpoint(tmp_path, family, **more)
    file = tmp_path / "model.safetensors"
    save_file({name: value.astype(stored_in) for name, value in load_file(file).items()}, file)
    ours, held = answer(tmp_path)
    wanted = np.dtype(stored_in).name
    assert any(f"held in {wanted}, as it is stored" in message for message in caplog.messages)
    assert {wanted} <= {*held.values()} and held["embed.weight"] == wanted
    assert all(dtype == wanted for name, dtype in held.items() if name.endswith(".weight") and "norm" not in name)
    theirs, whole = answer(tmp_path, dtype="float32")
    assert {*whole.values()} == {"float32"}
    same(ours, theirs)


@pytest.mark.parametrize(
    ("kinds", "served", "as_read"),
    [
        (("F16", "Q4_K"), "float16", None),
        (("F16",), "float16", "float16"),
        (("BF16", "Q8_0"), "bfloat16", None),
        (("F16", "BF16"), None, None),
        (("F16", "Q2_K"), None, None),
        (("Q4_0",), None, None),
    ],
)
def test_what_is_read_from_blocks_is_not_held_in_16_bits(kinds, served, as_read):
    """Unless they are `served` as they are: their numbers would be rounded."""
    tensors = {kind: StoredTensor(Path(), kind, kind, (256, 256), 0) for kind in kinds}
    tensors["norm"] = StoredTensor(Path(), "norm", "F32", (256,), 0)
    file = HuggingFaceDirectory(Path("model"))
    file.tensors = lambda: tensors
    assert [held_on_cpu(file, keeps_blocks=keeps) for keeps in (True, False)] == [served, as_read]


@needs_library
@NO_PAIRS
def test_a_quantised_models_head_is_held_so_too(tmp_path):
    path = stored(tmp_path, HALF)
    _, held = answer(path, quantization="int8")
    assert held["embed.weight"] == "bfloat16" and held["layers.0.attn.qkv.panels"] == "uint8"


@needs_library
@NO_PAIRS
@pytest.mark.parametrize("where", ["tensors of float32, too", "batch_invariant", "random"])
def test_where_weights_are_held_in_float32(where, tmp_path):
    path, options = stored(tmp_path, HALF), {}
    if where == "batch_invariant":
        options = {"batch_invariant": True}
    elif where == "random":
        options = {"load_format": "dummy"}
    else:
        tensors = random_tensors(HALF)
        name = next(name for name, value in tensors.items() if value.ndim == 2)
        save_file(tensors | {name: tensors[name].astype(np.float32)}, path / "model.safetensors")
    assert {*answer(path, **options)[1].values()} == {"float32"}


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
