"""Slow tokenizers become fast ones that say the same, and whole directories with them still do in the engine."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import LLM
from jaxllm.convert import slow_tokenizer
from jaxllm.convert.fast_tokenizer import convert
from jaxllm.errors import ModelFormatError
from jaxllm.text.tokenizer import Tokenizer
from tests.checkpoints import load
from tests.conversion import CORPUS, OPT, OPT_TOKENIZER, TEXTS, run, train_sentencepiece, write_gpt2, write_json
from tests.tiny import greedy


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


def tokenizer_job(out: Path, *files: Path, kind: str = "sentencepiece", **changes) -> dict:
    return {
        "kind": kind,
        "files": list(map(str, files)),
        "out": str(out),
        "names": {},
        "added": [],
        "additional_special_tokens": [],
        "add_bos_token": True,
        "add_eos_token": False,
        "is_legacy": True,
    } | changes


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram", "unigram_bytes"])
def test_sentencepiece_models_stay_what_they_were(sentencepiece_models, tmp_path, name):
    import sentencepiece

    file = sentencepiece_models[name]
    result = convert(tokenizer_job(tmp_path / "tokenizer.json", file))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert len(result["probes"]) > 15
    slow_tokenizer.compare(file, tokenizer, result["probes"])
    source = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert result["names"]["bos_token"] == "<s>" and result["names"]["eos_token"] == "</s>"
    for text in [*TEXTS, *CORPUS[:3], "<table> \n\n\n   x<table>", "▁a", "x  \n"]:
        if "<s>" in text:  # the source alone has no special tokens in a text
            parts = [source.encode(part) for part in ("a", "b ", " c")]
            want = [*parts[0], source.eos_id(), *parts[1], source.bos_id(), *parts[2]]
        else:
            want = source.encode(text)
            if source.unk_id() not in want:
                assert tokenizer.decode(want) == source.decode(want)
        assert tokenizer.encode(text) == [source.bos_id(), *want], text


def test_what_a_fast_tokenizer_cannot_do_is_found_out(sentencepiece_models, tmp_path):
    file = sentencepiece_models["prefix and symbols"]
    result = convert(tokenizer_job(tmp_path / "tokenizer.json", file))
    with pytest.raises(ModelFormatError, match="has rules that a fast tokenizer cannot follow.*tokenizer="):
        slow_tokenizer.compare(file, Tokenizer.from_dir(tmp_path), result["probes"])
    tokenizer, (text, ids, _) = Tokenizer.from_dir(tmp_path), result["probes"][0]
    with pytest.raises(ModelFormatError, match="becomes 'Hello world' instead of 'other'"):
        slow_tokenizer.compare(file, tokenizer, [(text, ids, "other")])


def test_added_tokens_keep_their_ids(sentencepiece_models, tmp_path):
    file = sentencepiece_models["llama"]
    token = {"content": "<|user|>", "id": 400, "special": True, "lstrip": False, "rstrip": True}
    added = [token | {"content": "[PAD]", "id": 401}, token]
    out = tmp_path / "tokenizer.json"
    changes = dict(added=added, names={"pad_token": "[PAD]", "mask_token": "[MASK]"}, add_eos_token=True)
    result = convert(tokenizer_job(out, file, **changes))
    slow_tokenizer.compare(file, Tokenizer.from_dir(tmp_path), result["probes"])
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("<|user|>  [PAD][MASK]") == [1, 400, 401, 402, 2]
    assert tokenizer.decode([400, 401, 402]) == ""
    with pytest.raises(ValueError, match=r"'<\|user\|>' has id 999, but follows the vocabulary as 400"):
        convert(tokenizer_job(out, file, added=[token | {"id": 999}]))


def test_only_the_first_part_begins_with_a_space_unless_legacy(sentencepiece_models, tmp_path):
    """Equal to transformers, whose option it is."""
    transformers = pytest.importorskip("transformers")
    file = sentencepiece_models["llama"]
    result = convert(tokenizer_job(tmp_path / "tokenizer.json", file, is_legacy=False))
    tokenizer = Tokenizer.from_dir(tmp_path)
    slow_tokenizer.compare(file, tokenizer, result["probes"])
    (tmp_path / "slow").mkdir()
    shutil.copyfile(file, tmp_path / "slow" / "tokenizer.model")
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path / "slow", legacy=False, add_bos_token=True)
    for text in [*TEXTS, *CORPUS[:3], "<s>a b</s> c"]:
        assert tokenizer.encode(text) == theirs.encode(text), text


def test_bytes_without_a_token_are_the_unknown_one(tmp_path):
    pytest.importorskip("regex")
    write_gpt2(tmp_path, None, without="é")
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    files[1].write_text(files[1].read_text().removeprefix("#version: 0.2\n"))  # so "# #" comes first
    with pytest.raises(ValueError, match=r"neither 'é', a byte's own token, nor '<\|endoftext\|>'"):
        convert(tokenizer_job(tmp_path / "tokenizer.json", *files, kind="byte_level"))
    with pytest.raises(ValueError, match="add_bos_token is true, but bos_token is None; name one"):
        convert(tokenizer_job(tmp_path / "tokenizer.json", *files, kind="byte_level", names={"unk_token": "<unk>"}))
    names = {"unk_token": "<unk>", "bos_token": "<s>"}
    result = convert(tokenizer_job(tmp_path / "tokenizer.json", *files, kind="byte_level", names=names))
    tokenizer = Tokenizer.from_dir(tmp_path)
    slow_tokenizer.compare(files[0], tokenizer, result["probes"])
    assert tokenizer.encode("##") == [0, json.loads(files[0].read_text())["##"]]
    assert tokenizer.encode("\u9000")[:2] == [0, 3]  # "é" stands for the byte E9, which begins this letter


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "", "vocab.json is not valid JSON"),
        ("[]", "", "must map texts to ids"),
        ('{"a": 1.5}', "", "must map texts to ids"),
        ('{"a": 0, "b": 2}', "", "must give 2 texts the ids from 0 on"),
        (None, "a b c", "must hold two parts in each line"),
        (None, "q q", "merges.txt does not fit"),
    ],
)
def test_damaged_vocabularies(tmp_path, vocab, merges, message):
    pytest.importorskip("regex")
    write_gpt2(tmp_path, None)
    if vocab is not None:
        (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ValueError, match=message):
        convert(tokenizer_job(tmp_path / "t", tmp_path / "vocab.json", tmp_path / "merges.txt", kind="byte_level"))


def test_a_damaged_sentencepiece_model(tmp_path):
    pytest.importorskip("sentencepiece")
    for content in (b"", b"\x00" * 50, b"not a model"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ValueError, match="is not a sound SentencePiece model"):
            convert(tokenizer_job(tmp_path / "tokenizer.json", tmp_path / "tokenizer.model"))


@pytest.mark.parametrize(
    ("config", "added", "message"),
    [
        ({"tokenizer_class": "MyTokenizer"}, {}, "tokenizer_class='MyTokenizer' is not a combination.*GPT2Tokenizer"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {}, "vocab.json and merges.txt with tokenizer_class='Llama"),
        ({"add_prefix_space": True}, {}, "add_prefix_space=True is not supported"),
        ({"bos_token": 3}, {}, "bos_token has 3, which is not a token's text"),
        ({"additional_special_tokens": "x"}, {}, "additional_special_tokens='x' must be a list"),
        ({"added_tokens_decoder": [1]}, {}, "added_tokens_decoder must map ids to tokens"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, {}, "the id 'x' of 'y' is not a number"),
        ({}, {"y": 2**40}, "the id 1099511627776 of 'y' is not a number below"),
    ],
)
def test_tokenizer_configurations_that_are_refused(tmp_path, config, added, message):
    pytest.importorskip("regex")
    write_gpt2(tmp_path, {"tokenizer_class": "GPT2Tokenizer"} | config)
    write_json(tmp_path / "added_tokens.json", added)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelFormatError, match=message):
        slow_tokenizer.write_tokenizer(tmp_path, tmp_path / "out", {})


def opt_tensors() -> dict:
    names = [
        "embed_positions.weight",
        "layers.0.fc1.weight",
        "layers.0.self_attn_layer_norm.bias",
        "final_layer_norm.weight",
        "project_in.weight",
    ]
    values = np.random.default_rng(0).standard_normal((len(names) + 1, 6, 4), np.float32).astype(np.float16)
    return dict(zip(["embed_tokens.weight", *names], values, strict=True))


def test_old_opt_names_with_a_tied_head_and_a_slow_tokenizer(torch, tmp_path):
    tensors, src = opt_tensors(), tmp_path / "src"
    src.mkdir()
    stored = {f"decoder.{name}": torch.from_numpy(tensor) for name, tensor in tensors.items()}
    stored["lm_head.weight"] = stored["decoder.embed_tokens.weight"]
    torch.save(stored | {"decoder.version": torch.ones(1)}, src / "pytorch_model.bin")
    write_json(src / "config.json", OPT)
    write_gpt2(src, OPT_TOKENIZER)

    out = tmp_path / "out"
    out.mkdir()  # empty, which is fine
    assert run(src, out) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    written = load_file(out / "model.safetensors")
    assert written.keys() == {f"model.decoder.{name}" for name in tensors}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[f"model.decoder.{name}"], tensor)
        assert written[f"model.decoder.{name}"].dtype == np.float16
    tokenizer = Tokenizer.from_dir(out)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("")[0] == 2 and tokenizer.encode("a</s>")[::2] == [2, 2]
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(src)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_a_converted_llama_says_what_the_original_says(torch, sentencepiece_models, tmp_path):
    """Without any tokenizer_config.json, as the oldest have it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    src, out = tmp_path / "src", tmp_path / "out"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(src)
    torch.save(theirs.state_dict(), src / "pytorch_model.bin")
    shutil.copyfile(sentencepiece_models["llama"], src / "tokenizer.model")
    assert run(src, out) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(written[name], tensor.numpy())

    options = dict(max_num_seqs=1, max_num_batched_tokens=8, block_size=16, num_blocks=4)
    with LLM(str(out), dtype="float32", **options) as llm:
        (ours,) = llm.generate("the quick brown", greedy(16))
    assert ours.prompt_token_ids[0] == 1
    with torch.no_grad():
        prompt = torch.tensor([list(ours.prompt_token_ids)])
        want = theirs.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert list(ours.outputs[0].token_ids) == want.tolist()
    assert load(out, jnp.float32)
