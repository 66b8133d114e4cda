"""Pickled checkpoints become directories that the loader takes; damaged and hostile ones are refused."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint.tensors import find_tensors
from jaxllm.cli.convert import main
from jaxllm.convert import process, slow_tokenizer
from jaxllm.convert.names import canonical, is_tied
from jaxllm.errors import JaxLLMError
from tests.checkpoints import HF, load, random_tensors, split_in_two, write_checkpoint, write_config
from tests.conversion import LLAMA, OPT, run, save_bin, write_json


def refused(capsys, src: Path, out: Path, *options: str) -> str:
    """The one line that the command says; nothing is left behind."""
    before = set(out.parent.iterdir())
    assert run(src, out, *options) == 2
    written = capsys.readouterr()
    assert written.out == "" and re.fullmatch(r"error: .*\n", written.err)
    assert set(out.parent.iterdir()) == before
    return written.err


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def src(tmp_path):
    (tmp_path / "src").mkdir()
    write_config(tmp_path / "src")
    return tmp_path / "src"


def test_shards_of_both_formats_become_shards_in_another_dtype(torch, src, tmp_path, capsys):
    """One of today's format, one of torch's before 1.6, with tensors that are views of others."""
    tensors = random_tensors()
    first, second = sorted(tensors)[::2], sorted(tensors)[1::2]
    big = torch.from_numpy(np.stack([tensors["lm_head.weight"]] * 2))
    head = big.transpose(1, 2)[1].transpose(0, 1)
    assert "lm_head.weight" in first
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": head}
    torch.save({name: torch.from_numpy(tensors[name]) for name in first} | extra, src / "a.bin")
    save_bin(torch, src / "b.bin", {name: tensors[name] for name in second}, _use_new_zipfile_serialization=False)
    weight_map = dict.fromkeys(first, "a.bin") | dict.fromkeys(second, "b.bin")
    write_json(src / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(src / "generation_config.json", {"eos_token_id": 1})
    write_json(src / "config.json", HF | {"torch_dtype": "float32"})

    out = tmp_path / "new" / "out"
    assert run(src, out, "--dtype", "bfloat16", "--max-shard-size", "4KB") == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((out / file).stat().st_size <= 4000 + 3000 for file in files)  # and a header
    assert index["metadata"]["total_size"] == sum(tensor.nbytes // 2 for tensor in tensors.values())
    found = find_tensors(out)
    assert found.keys() == tensors.keys() and {tensor.dtype for tensor in found.values()} == {"BF16"}
    for name, tensor in tensors.items():
        with safe_open(found[name].file, framework="pt") as stored:
            assert torch.equal(stored.get_tensor(name), torch.from_numpy(tensor).bfloat16())
    assert load(out)
    assert json.loads((out / "config.json").read_text()) == HF | {"torch_dtype": "bfloat16"}
    assert (out / "generation_config.json").read_bytes() == (src / "generation_config.json").read_bytes()
    assert oct(out.stat().st_mode) == oct(src.stat().st_mode)
    said = capsys.readouterr().out
    assert re.fullmatch(rf"wrote {out}: [\d.]+ MB of weights \(BF16\) in {len(files)} files, no tokenizer.*\n", said)


def test_a_dtype_too_narrow_for_the_values(torch, src, tmp_path, capsys):
    save_bin(torch, src / "pytorch_model.bin", random_tensors() | {"model.norm.weight": np.full(16, 1e6, np.float32)})
    said = refused(capsys, src, tmp_path / "out", "--dtype", "float16")
    assert "'model.norm.weight' holds values that are not finite in F16" in said


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(torch, src, tmp_path, capsys):
    torch.save({"model.norm.weight": torch.ones(2), "evil": Evil(tmp_path / "ran")}, src / "pytorch_model.bin")
    said = refused(capsys, src, tmp_path / "out")
    assert re.search(r"pytorch_model\.bin asks for posix\.mkdir, .*refused", said)
    assert not (tmp_path / "ran").exists()


def test_pickles_that_are_refused(torch, tmp_path):
    from jaxllm.convert.weights import read_pickle

    file = tmp_path / "pytorch_model.bin"

    def assert_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_pickle(str(file))

    for is_zip in (True, False):
        torch.save([Evil(tmp_path / "ran")], file, _use_new_zipfile_serialization=is_zip)
        assert_refused("asks for posix.mkdir")
        save_bin(torch, file, {"a": np.ones(1000, np.float32)}, _use_new_zipfile_serialization=is_zip)
        assert read_pickle(str(file))["a"].shape == (1000,)
        whole = file.read_bytes()
        for size in (0, 3, 100, len(whole) // 2, len(whole) - 5):
            file.write_bytes(whole[:size])
            assert_refused("truncated")
    assert not (tmp_path / "ran").exists()

    for content, message in [
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({"state_dict": {"a": torch.ones(2)}}, "'state_dict' is a dict; only named tensors"),
        ({3: torch.ones(2)}, "3 is a Tensor; only named tensors"),
        ({"a": torch.ones(2).to_sparse()}, "'a' is sparse, quantised or empty"),
        ({"a": torch.ones(2, device="meta")}, "'a' is sparse, quantised or empty"),
        ({"a": torch.ones(1).expand(10**15)}, "claim 4000000000000000; it is damaged or hostile"),
    ]:
        torch.save(content, file)
        assert_refused(message)


def test_a_compressed_archive_is_refused(torch, tmp_path):
    from jaxllm.convert.weights import read_pickle

    torch.save({"a": torch.zeros(1000)}, tmp_path / "plain.bin")
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain:
        with zipfile.ZipFile(tmp_path / "bomb.bin", "w", zipfile.ZIP_DEFLATED) as bomb:
            for name in plain.namelist():
                bomb.writestr(name, plain.read(name))
    with pytest.raises(ValueError, match="compressed archive"):
        read_pickle(str(tmp_path / "bomb.bin"))


def job(out: Path, *files: Path, **changes) -> dict:
    out.mkdir()
    return {
        "files": list(map(str, files)),
        "index": {},
        "dtype": "auto",
        "config": LLAMA,
        "is_tied": True,
        "out": str(out),
        "max_shard_bytes": 10**9,
    } | changes


def test_tensors_that_contradict_each_other(torch, tmp_path):
    from jaxllm.convert import weights

    embedding, head = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
    first, second = tmp_path / "1.bin", tmp_path / "2.bin"
    save_bin(torch, first, {"lm_head.weight": head, "embed_tokens.weight": embedding})
    save_bin(torch, second, {"model.embed_tokens.weight": embedding})

    def convert(name: str, *files: Path, **changes) -> None:
        weights.convert(job(tmp_path / name, *files, **changes), lambda count: None)

    with pytest.raises(ValueError, match='values differ.*"tie_word_embeddings": false'):
        convert("tied", first)
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' is in both .*1\.bin and .*2\.bin"):
        convert("twice", first, second, is_tied=False)
    with pytest.raises(ValueError, match=r"2\.bin lacks 'lm_head\.weight', which the index places there"):
        convert("lacking", second, index={"2.bin": ["lm_head.weight"]})
    convert("untied", first, is_tied=False)
    assert load_file(tmp_path / "untied" / "model.safetensors").keys() == {
        "lm_head.weight",
        "model.embed_tokens.weight",
    }
    save_bin(torch, first, {"lm_head.weight": head})
    convert("alone", first)
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() == {"lm_head.weight"}


def test_an_old_torch_is_refused(torch, tmp_path, monkeypatch):
    from jaxllm.convert import weights

    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ValueError, match=r"2\.9\.1\+cpu is older than 2\.10 and unsafe"):
        weights.convert(job(tmp_path / "out"), lambda count: None)


@pytest.mark.parametrize(
    ("name", "hf", "want"),
    [
        ("decoder.layers.3.fc1.bias", OPT, "model.decoder.layers.3.fc1.bias"),
        ("model.decoder.layers.3.fc1.bias", OPT, "model.decoder.layers.3.fc1.bias"),
        ("model.decoder.version", OPT, None),
        ("layers.0.mlp.up_proj.weight", LLAMA, "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", LLAMA, None),
        ("lm_head.weight", LLAMA, "lm_head.weight"),
        ("decoder.block.0.weight", {"architectures": ["T5ForConditionalGeneration"]}, "decoder.block.0.weight"),
        ("norm.weight", {"architectures": "damaged"}, "norm.weight"),
    ],
)
def test_names(name, hf, want):
    assert canonical(name, hf) == want


def test_a_head_is_tied_as_the_configuration_or_the_family_says():
    assert is_tied(OPT) and not is_tied(LLAMA) and not is_tied({"model_type": []})
    assert is_tied(LLAMA | {"tie_word_embeddings": True}) and not is_tied(OPT | {"tie_word_embeddings": False})


def test_safetensors_are_linked_and_a_fast_tokenizer_is_copied(tmp_path, capsys):
    (tmp_path / "src").mkdir()
    src = write_checkpoint(tmp_path / "src")
    split_in_two(src)
    default = Path(slow_tokenizer.__file__).parents[1] / "default_model"
    (src / "additional_chat_templates").mkdir()
    copied = ["chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/tool_use.jinja"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(default / name, src / name)
    for name in copied:
        (src / name).write_text("{}")
    (src / "tokenizer.model").write_bytes(b"not needed")
    out = tmp_path / "out"
    assert run(src, out) == 0
    assert "of weights, unchanged, tokenizer.json\n" in capsys.readouterr().out
    for name in ("model-0.safetensors", "model-1.safetensors"):
        assert (out / name).samefile(src / "blobs" / name) and not (out / name).is_symlink()
    for name in (*copied, "tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors.index.json"):
        assert (out / name).read_bytes() == (src / name).read_bytes()
    assert load(out)


def test_safetensors_with_old_names_are_written_anew(torch, src, tmp_path):
    tensors = random_tensors()
    old = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(old, src / "model.safetensors")
    assert run(src, tmp_path / "out") == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor)


@pytest.mark.parametrize(
    "name", ["../a.bin", "/etc/a.bin", "blobs/a.bin", "a\\b.bin", "C:a.bin", "..", "", "model.safetensors", None]
)
def test_an_index_must_name_files_beside_it(src, tmp_path, capsys, name):
    (tmp_path / "a.bin").touch()
    write_json(src / "pytorch_model.bin.index.json", {"weight_map": {"x": name}})
    assert "it must be a *.bin file beside it" in refused(capsys, src, tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has neither model.safetensors nor pytorch_model.bin, nor an index of either"),
        ({"pytorch_model.bin.index.json": '{"weight_map": {}}'}, "weight_map must map tensors to files"),
        ({"pytorch_model.bin.index.json": '{"weight_map": {"x": "a.bin"}}'}, "a.bin is missing"),
        ({"config.json": None}, "config.json is missing"),
        ({"config.json": "[]"}, "not a JSON object"),
        ({"model.safetensors": "short"}, "not a sound safetensors file"),
    ],
)
def test_directories_that_are_damaged(src, tmp_path, capsys, files, message):
    for name, content in files.items():
        (src / name).unlink(missing_ok=True)
        if content is not None:
            (src / name).write_text(content)
    assert message in refused(capsys, src, tmp_path / "out")


def test_places_that_cannot_be_used(src, tmp_path, capsys):
    assert "is the source itself" in refused(capsys, src, src / ".." / "src")
    assert "nowhere is not a directory" in refused(capsys, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "a.gguf").touch()
    assert "a.gguf is a GGUF file, which needs no conversion" in refused(capsys, tmp_path / "a.gguf", tmp_path / "out")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    assert "lora is an adapter (LoRA)" in refused(capsys, tmp_path / "lora", tmp_path / "out")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name in ("file", "dangling", "full"):
        assert "exists and is not an empty directory" in refused(capsys, src, tmp_path / name)


@pytest.mark.parametrize("size", ["0", "5 apples", "-1GB", "GB", "1e9"])
def test_sizes_that_are_none(capsys, size):
    with pytest.raises(SystemExit) as done:
        main(["src", "out", f"--max-shard-size={size}"])
    assert done.value.code == 2 and "is not a size; write one as 5GB" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_extra(src, tmp_path, capsys, monkeypatch):
    (src / "pytorch_model.bin").touch()
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    said = refused(capsys, src, tmp_path / "out")
    assert "torch is not installed" in said and "pip install 'jaxllm[convert]'" in said
    monkeypatch.undo()
    with pytest.raises(JaxLLMError, match=r"nothing\.here is not installed"):
        process.require("json", "nothing.here")


def test_the_worker_sees_neither_our_environment_nor_our_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "torch.py").write_text("raise SystemExit('wrong torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    boot = """import jaxllm.convert.fast_tokenizer, os
print(json.dumps({"result": [sys.path, list(os.environ), "jax" in sys.modules]}))"""
    monkeypatch.setattr(process, "_BOOT", process._BOOT.split("from jaxllm")[0] + boot)
    path, environment, has_jax = process.run({})
    assert not {"", str(tmp_path)} & set(path)
    assert "PATH" in environment and "HF_TOKEN" not in environment
    assert not has_jax


def test_ctrl_c_ends_the_worker_and_leaves_nothing(torch, src, tmp_path, monkeypatch, capsys):
    (src / "pytorch_model.bin").touch()
    boot = f"""
import os, signal, time
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGINT)
time.sleep(100)
"""
    monkeypatch.setattr(process, "_BOOT", boot)
    assert run(src, tmp_path / "out") == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid", "src"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert capsys.readouterr().out == ""


def test_a_worker_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(process, "_BOOT", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(JaxLLMError, match="ended by signal 9; there may be too little memory"):
        process.run({})
    monkeypatch.setattr(process, "_BOOT", "raise TypeError('bug')")
    with pytest.raises(RuntimeError, match="exit code 1:\n(.|\n)*TypeError: bug"):
        process.run({})
