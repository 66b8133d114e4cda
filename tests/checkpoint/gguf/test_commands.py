"""A GGUF file wherever a model is given."""

import json

import jax.numpy as jnp
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.cli.generate import main as generate
from jaxllm.cli.replay import main as replay
from jaxllm.engine.dummy import dummy_model
from jaxllm.errors import ModelFormatError
from jaxllm.server.config import ServerConfig, model_names
from jaxllm.server.served_model import read_model
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoint.gguf.test_tokenizer import byte_level_keys, train
from tests.gguf_files import Converted
from tests.hf_models import checkpoint
from tests.tiny import greedy

pytest.importorskip("torch")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPTIONS = dict(max_num_seqs=2, max_num_batched_tokens=16, block_size=8, num_blocks=32)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A whole model: weights, tokenizer and template."""
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("gguf")
    sizes = dict(hidden_size=64, intermediate_size=96, vocab_size=704)
    written = Converted("Llama", checkpoint(folder / "hf", "Llama", **sizes))
    backend = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    (folder / "model").mkdir()
    keys = byte_level_keys(backend, "gpt-2", chat_template=TEMPLATE)
    return written.write(folder / "model/tiny.Q8_0.gguf", **keys)


@pytest.fixture(scope="module")
def llm(file):
    with LLM(file, **OPTIONS) as llm:
        yield llm


def test_a_file_is_a_model(llm):
    (out,) = llm.generate(["Hello world"], greedy(5))
    assert len(out.outputs[0].token_ids) == 5 and out.outputs[0].text
    assert llm.get_default_sampling_params() == SamplingParams()
    (answer,) = llm.chat([{"role": "user", "content": "Hi"}], greedy(5))
    assert answer.prompt_token_ids == llm.tokenizer.encode("user: Hi\n")


def test_a_directory_with_one_is_too(file, llm, capsys):
    assert open_checkpoint(file.parent).path == file
    options = ["--max-tokens", "5", "--temperature", "0", "--num-blocks", "32", "--max-num-seqs", "2"]
    assert generate(["--model", str(file.parent), *options, "Hello world"]) == 0
    (out,) = llm.generate(["Hello world"], SamplingParams(max_tokens=5, temperature=0.0))
    assert out.outputs[0].text.strip() in capsys.readouterr().out


def test_a_tokenizer_from_another_file(file, tiny):
    with LLM(tiny.model, tokenizer=file, **OPTIONS) as llm:
        assert llm.tokenizer.encode("Hello") == open_checkpoint(file).tokenizer().encode("Hello")


def test_several_models_in_a_directory_are_named(file, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").symlink_to(file)
    with pytest.raises(ModelFormatError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\); give the path of one"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).path == tmp_path  # the directory says itself what it is
    with pytest.raises(ModelFormatError, match="no-such.gguf is missing"):
        read_config(tmp_path / "no-such.gguf", jnp.float32)


def test_a_recording_finds_the_file_again(file, tmp_path, capsys):
    link = tmp_path / "cached.gguf"  # as in Hugging Face's cache, whose files have other names
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0123abcd").write_bytes(file.read_bytes())
    link.symlink_to("blobs/0123abcd")
    record = tmp_path / "record"
    with LLM(link, record=record, **OPTIONS) as llm:
        llm.generate(["Hello"], greedy(3))
    assert replay([str(record)]) == 0
    assert capsys.readouterr()


def test_the_server_reads_it_and_names_it(file):
    model = read_model(ServerConfig(served_model_names=model_names(str(file), None)), str(file))
    assert model.names == ("tiny.Q8_0", str(file))
    assert model.has_chat and model.tokenizer.eos_token_id == 1 and model.defaults == {}


def test_random_weights_of_its_sizes(file):
    cfg, params = dummy_model(file, "float32", make_mesh(None))
    assert cfg == read_config(file, jnp.float32).cfg and params["embed"]["weight"][...].shape == (704, 64)


def test_the_configuration_tells_models_apart(file):
    assert json.loads(open_checkpoint(file).config_bytes())["hidden_size"] == 64
