"""Paths that hold no checkpoint: what lies there is named, and what to do about it."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.tensors import find_tensors
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.errors import ModelFormatError
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.tokenizer import Tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.fixture
def model_dir(tmp_path):
    shutil.copytree(DEFAULT_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return tmp_path / "model"


def refusal(path) -> str:
    with pytest.raises(ModelFormatError) as error:
        read_config(path, jnp.float32)
    return str(error.value)


def fill(folder: Path, *names: str, **contents: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name, text in contents.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_a_file_of_a_model_names_its_directory(model_dir):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (
            refusal(model_dir / name) == f"{model_dir / name} is one file of a model; give its directory, {model_dir}"
        )
    (model_dir / "notes.txt").write_text("hello")
    assert "notes.txt is a file, but no .gguf" in refusal(model_dir / "notes.txt")


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "models/of/mine"])
def test_what_may_be_a_name_says_so(path):
    assert "is not a directory" in refusal(Path(path))
    assert "goes by its name, as a string: org/name" in refusal(Path(path))
    assert "org/name" not in refusal(Path("/nope") / path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model_index.json"], "is a pipeline of diffusers, which makes images"),
        (["_CHECKPOINT_METADATA"], r"is an Orbax checkpoint.*\(configuration, parameters\)"),
        (["params.json", "consolidated.00.pth"], "its maker's own format.*Hugging Face format"),
        (["checkpoint-10/config.json", "checkpoint-5/config.json"], "directories with one: give .*checkpoint-.* of 2"),
        (["README.md"], "config.json is missing; take the whole"),
    ],
)
def test_other_directories(tmp_path, names, message):
    with pytest.raises(ModelFormatError, match=message):
        read_config(fill(tmp_path, *names), jnp.float32)


def test_a_repository_of_the_hubs_cache_gives_its_name(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-0.6B"
    fill(folder, "snapshots/0123/x")
    assert "give its name, Qwen/Qwen3-0.6B" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "base"),
    [
        (json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"}), r"\(LoRA\) of 'org/base', not"),
        (json.dumps({"base_model_name_or_path": None}), r"\(LoRA\), not"),
        ("[1]", r"\(LoRA\), not"),
        ("{", r"\(LoRA\), not"),
    ],
)
def test_an_adapter_names_its_base(tmp_path, model_dir, content, base):
    fill(tmp_path / "lora", "adapter_model.safetensors", adapter_config=content)
    with pytest.raises(ModelFormatError, match=f"is an adapter {base}.*merge_and_unload"):
        read_config(tmp_path / "lora", jnp.float32)
    (model_dir / "model.safetensors").unlink()
    fill(model_dir, adapter_config=content)  # with a copy of its base's configuration
    with pytest.raises(ModelFormatError, match=f"is an adapter {base}"):
        find_tensors(model_dir)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "and no other weights: its download is incomplete.*hf download ORG/NAME --local-dir"),
        (["a.gguf"], "but a.gguf, which is a model by itself: give the path"),
        (["model-00001-of-00002.safetensors"], "but model-00001.*a part.*download model.safetensors.index.json"),
        (["consolidated.safetensors"], "consolidated.safetensors, whose tensors have other names"),
        (["pytorch_model.bin"], "pytorch_model.bin, which is pickled.*jaxllm.convert .* NEW_DIR"),
        (["consolidated.00.pth"], "consolidated.00.pth, pickled weights of another layout.*can't be converted"),
        (["tf_model.h5"], "tf_model.h5, weights of TensorFlow"),
        (["flax_model.msgpack"], "flax_model.msgpack, weights of Flax"),
    ],
)
def test_a_directory_without_weights(model_dir, others, message):
    (model_dir / "model.safetensors").unlink()
    fill(model_dir, *others)
    with pytest.raises(ModelFormatError, match=f"neither model.safetensors nor .*{message}"):
        find_tensors(model_dir)


def test_pointers_of_git_lfs_are_known(model_dir, tmp_path):
    readers = {
        "config.json": lambda: read_config(model_dir, jnp.float32),
        "tokenizer.json": lambda: Tokenizer.from_dir(model_dir),
        "model.safetensors": lambda: find_tensors(model_dir),
        "model.gguf": lambda: read_config(model_dir / "model.gguf", jnp.float32),
    }
    for name, read in readers.items():
        (model_dir / name).write_bytes(POINTER)
        with pytest.raises(ModelFormatError, match=rf"{name} is a pointer of git-lfs.*run git lfs pull in {model_dir}"):
            read()


def test_a_tilde_is_the_home_directory(model_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert open_checkpoint("~/model").config()["vocab_size"] > 0
    assert open_checkpoint(Path("~/model")).path == model_dir
    assert wrap("~/model").encode("def")
