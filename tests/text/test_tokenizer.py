import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxllm.errors import ModelFormatError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text import tokenizer as tokenizer_module
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.tokenizer import Tokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog.", "naïve café, 東京 and 🙂", "def f(x):\n    return x + 1"]
SPECIAL = ["<unk>", "<s>", "</s>"]
BOS_FIRST = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def byte_level_bpe() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = BOS_FIRST
    return backend


def sentencepiece_bpe() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzT.,", "▁t", "th", "▁th"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h")]
    model = models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = BOS_FIRST
    return backend


BACKENDS = {"byte_level": byte_level_bpe(), "sentencepiece": sentencepiece_bpe()}
both = pytest.mark.parametrize("kind", BACKENDS)


def save(backend: tokenizers.Tokenizer, folder: Path, config: dict | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@both
def test_encode_adds_special_tokens_and_decode_inverts_it(kind, tmp_path):
    tokenizer = Tokenizer.from_dir(save(BACKENDS[kind], tmp_path, {"eos_token": {"content": "</s>"}}))
    assert tokenizer.eos_token_id == 2
    assert tokenizer.vocab_size == BACKENDS[kind].get_vocab_size()
    for text in [*CORPUS, "", " two  spaces"]:
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")


@both
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40), data=st.data())
def test_equals_transformers(kind, text, data, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    ours, theirs = _transformers_pair(transformers, kind, tmp_path_factory)
    assert ours.encode(text) == theirs(text).input_ids
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=20))
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_id == theirs.eos_token_id
    assert wrap(theirs).encode(text) == theirs(text).input_ids


@both
def test_has_the_interface_of_transformers(kind, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    ours, theirs = _transformers_pair(transformers, kind, tmp_path_factory)
    texts = ["Hello world", "", "a é 🙂"]
    for special in (True, False):
        one, each = ours(texts[0], special), ours(texts, add_special_tokens=special)
        assert dict(one) == dict(theirs(texts[0], add_special_tokens=special, return_token_type_ids=False))
        assert dict(each) == dict(theirs(texts, add_special_tokens=special, return_token_type_ids=False))
        assert one.input_ids == one["input_ids"] and one.attention_mask == [1] * len(one.input_ids)
    ids = theirs(texts).input_ids
    assert ours.batch_decode(ids) == theirs.batch_decode(ids, skip_special_tokens=True)
    assert ours.tokenize(texts[0]) == theirs.tokenize(texts[0])
    tokens = theirs.convert_ids_to_tokens(ids[0])
    assert ours.convert_ids_to_tokens(ids[0]) == tokens and ours.convert_ids_to_tokens(ids[0][1]) == tokens[1]
    assert ours.convert_tokens_to_ids(tokens) == ids[0] and ours.convert_tokens_to_ids("</s>") == 2
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.all_special_tokens, ours.all_special_ids) == (theirs.all_special_tokens, theirs.all_special_ids)
    with pytest.raises(AttributeError, match="an encoding has input_ids and attention_mask, not 'offsets'"):
        ours("a").offsets  # noqa: B018 - raises


_PAIRS = {}


def _transformers_pair(transformers, kind, tmp_path_factory):
    if kind not in _PAIRS:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        folder = save(BACKENDS[kind], tmp_path_factory.mktemp(kind), config)
        _PAIRS[kind] = Tokenizer.from_dir(folder), transformers.AutoTokenizer.from_pretrained(folder)
    return _PAIRS[kind]


def test_transformers_is_not_imported():
    code = "import sys, jaxllm.text.detokenizer; sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stored_padding_and_truncation_are_ignored(tmp_path):
    backend = byte_level_bpe()
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    loaded = Tokenizer.from_dir(save(backend, tmp_path))
    assert loaded.decode(loaded.encode(CORPUS[0])) == CORPUS[0]
    assert len(loaded.encode("a")) == 2
    assert wrap(backend).encode(CORPUS[0]) == loaded.encode(CORPUS[0])
    assert backend.padding and backend.truncation, "the caller's object must stay as it was"


def test_a_token_that_only_the_configuration_calls_special_is_skipped(tmp_path):
    backend = byte_level_bpe()
    backend.add_tokens(["<|done|>"])
    tokenizer = Tokenizer.from_dir(save(backend, tmp_path, {"eos_token": "<|done|>"}))
    assert tokenizer.eos_token_id == tokenizer.vocab_size - 1
    assert tokenizer.decode([tokenizer.eos_token_id]) == ""
    assert tokenizer.stream().push(tokenizer.eos_token_id) == ""


def test_ids_without_a_token_decode_to_nothing():
    for backend in BACKENDS.values():
        tokenizer = wrap(backend)
        assert tokenizer.decode([10**6]) == tokenizer.stream().push(10**6) == ""


def test_text_after_a_prompt_keeps_its_space():
    tokenizer = wrap(BACKENDS["sentencepiece"])
    prompt, token = tokenizer.encode("a dog"), BACKENDS["sentencepiece"].token_to_id("▁th")
    assert tokenizer.stream().push(token) == "th"
    assert tokenizer.stream(prompt_token_ids=[1]).push(token) == "th"
    assert tokenizer.stream(prompt_token_ids=prompt).push(token) == " th"


def test_half_surrogates_are_refused():
    with pytest.raises(ValueError, match="surrogate pair at character 2"):
        wrap(BACKENDS["byte_level"]).encode("ab\ud800")


def test_a_missing_directory_and_a_missing_file(tmp_path):
    with pytest.raises(ModelFormatError, match="is not a directory"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    with pytest.raises(ModelFormatError, match="tokenizer.json is missing; take the whole model directory"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelFormatError, match="the directory has tokenizer.model.*jaxllm.convert .* NEW_DIR"):
        Tokenizer.from_dir(tmp_path)


def panicking() -> str:
    spec = json.loads(byte_level_bpe().to_str())
    spec["post_processor"]["special_tokens"] = {}
    return json.dumps(spec)


@pytest.mark.parametrize("content", ["", "{}", "\xff", '{"model": {"type": "BPE"', panicking()])
def test_a_broken_file(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelFormatError, match="tokenizer.json is not a sound tokenizer"):
        Tokenizer.from_dir(tmp_path)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelFormatError, match="larger than 1000 bytes"):
        Tokenizer.from_dir(save(byte_level_bpe(), tmp_path))


@pytest.mark.parametrize("config", [[], {"eos_token": 3}, {"eos_token": {"content": []}}])
def test_a_broken_configuration(config, tmp_path):
    with pytest.raises(ModelFormatError, match="tokenizer_config.json"):
        Tokenizer.from_dir(save(byte_level_bpe(), tmp_path, config))


def test_wrap_takes_paths_and_passes_its_own_through(tmp_path):
    folder = save(byte_level_bpe(), tmp_path)
    tokenizer = wrap(folder)
    assert wrap(tokenizer) is tokenizer
    for path in (str(folder), folder / "tokenizer.json"):
        assert wrap(path).encode("fox") == tokenizer.encode("fox")


class Slow:
    """Like a slow tokenizer of transformers."""

    eos_token_id = 0

    def __len__(self):
        return 128

    def encode(self, text):
        return [*text.encode(), 0]

    def decode(self, ids, skip_special_tokens=False, **kwargs):
        return bytes(i for i in ids if i or not skip_special_tokens).decode(errors="replace")


class SentencePieceLike:
    """`vocab_size` is a method, and `decode` knows nothing of special tokens."""

    def vocab_size(self):
        return 300

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_wrap_adapts_any_object_that_encodes_and_decodes():
    slow, foreign = wrap(Slow()), wrap(SentencePieceLike())
    assert (slow.vocab_size, slow.eos_token_id) == (128, 0)
    assert (foreign.vocab_size, foreign.eos_token_id) == (300, None)
    assert slow.decode(slow.encode("hé")) == foreign.decode(foreign.encode("hé")) == "hé"
    assert slow.decode([104, 0], skip_special_tokens=False) == "h\0"
    assert "".join(map(slow.stream().push, slow.encode("hé"))) == "hé"


@pytest.mark.parametrize("thing", [None, 3, object(), ["tokenizer.json"]])
def test_wrap_refuses_what_is_no_tokenizer(thing):
    with pytest.raises(TypeError, match="is not a tokenizer; pass a model directory"):
        wrap(thing)


def test_detokenizer_takes_an_adapter():
    detokenizer = Detokenizer(wrap(Slow()), SamplingParams(stop="!"))
    assert detokenizer.push(list(b"hi!")) == "!"
    assert detokenizer.text == "hi"
