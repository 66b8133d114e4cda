"""Tokenizers in GGUF files give the ids of those they were made from."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from jaxllm.errors import ModelFormatError
from jaxllm.text.tokenizer import Tokenizer
from tests.conversion import CORPUS, TEXTS, train_sentencepiece
from tests.gguf_files import vocabulary_keys, write

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
SPECIAL = ["<|begin|>", "<|finish|>"]
HARD = [
    *TEXTS,
    *CORPUS[:3],
    "\r\n\r\n1st",
    "a\r\n\r\n  b\t\tc \n",
    "1234567890 12,345.678 1²½٣",
    "don't DON'T we'Ll I'VE x's",
    "HTTPServer iPhoneXR ÉCOLEélève ǅungla",
    "e\u0301 ﬁ Å \u212b 各国 한국어 \u200d \ufeff",
    "  \u00a0\u3000  x\u2028y\x85z",
    "<|begin|>a <|finish|>b<tool>c <tool>",
    "(a+b)==[c]{d}!?... ¿qué? “quoted” — dash/slash//",
    "🙂👍🏽👩‍👩‍👧 \U0001f9ff",
    " " * 17 + "x" + "\n" * 5 + "y",
    "مرحبا ٣٤ שלום नमस्ते १२३",
]


def train(pre_tokenizer, normalizer=None, ignore_merges=False) -> tokenizers.Tokenizer:
    """As a family's `tokenizer.json` has it, with a user-defined token too."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.normalizer, backend.pre_tokenizer = normalizer or normalizers.Sequence([]), pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*HARD * 3, *CORPUS[:120]], trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    return backend


def split(pattern):
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


LLAMA3 = (  # as in the models' tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
FAMILIES = {
    "gpt-2": dict(pre_tokenizer=GPT2),
    "smollm": dict(pre_tokenizer=DIGITS),
    "starcoder": dict(pre_tokenizer=DIGITS),
    "command-r": dict(pre_tokenizer=DIGITS, normalizer=normalizers.NFC()),
    "olmo": dict(pre_tokenizer=GPT2, normalizer=normalizers.NFC()),
    "qwen2": dict(pre_tokenizer=split(QWEN2), normalizer=normalizers.NFC()),
    "deepseek-r1-qwen": dict(pre_tokenizer=split(QWEN2)),
    "llama-bpe": dict(pre_tokenizer=split(LLAMA3), ignore_merges=True),
    "dbrx": dict(pre_tokenizer=split(LLAMA3)),
    "tekken": dict(pre_tokenizer=split(TEKKEN), ignore_merges=True),
}


def byte_level_keys(backend: tokenizers.Tokenizer, pre: str, **changes) -> dict:
    """What the converter writes of a `tokenizer.json`."""
    stored = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    special = {added["content"]: added["special"] for added in stored["added_tokens"]}
    kinds = [NORMAL if t not in special else CONTROL if special[t] else USER_DEFINED for t in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    keys = dict(model="gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=merges, bos_token_id=0, eos_token_id=1)
    return keys | {"add_bos_token": False} | changes


def read(folder, architecture="llama", **keys) -> Tokenizer:
    return open_checkpoint(write(folder / "model.gguf", architecture, vocabulary_keys(**keys), {})).tokenizer()


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """The tokenizers as they were, and as they are read."""
    return {
        pre: (backend := train(**options), read(tmp_path_factory.mktemp(pre), **byte_level_keys(backend, pre)))
        for pre, options in FAMILIES.items()
    }


@pytest.mark.parametrize("templates", [["default"], ["default", "tool_use"]])
def test_it_is_saved_as_transformers_reads_it(families, tmp_path, templates):
    transformers = pytest.importorskip("transformers")
    source, _ = families["qwen2"]
    chat = {"chat_template": "{{ messages[0].content }}"}
    if len(templates) > 1:
        chat |= {"chat_templates": ["tool_use"], "chat_template.tool_use": "{{ bos_token }}"}
    (tmp_path / "out").mkdir()
    keys = vocabulary_keys(**byte_level_keys(source, "qwen2"), **chat)
    open_checkpoint(write(tmp_path / "model.gguf", "qwen2", keys, {})).save_beside_weights(tmp_path / "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), Tokenizer.from_dir(tmp_path / "out")
    for text in HARD:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text) == source.encode(text).ids
    assert theirs.eos_token_id == ours.eos_token_id == 1
    assert sorted(ours.chat.templates) == templates
    assert theirs.apply_chat_template([{"role": "user", "content": "hm"}], tokenize=False) == "hm"


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_ids_are_those_of_the_source(families, pre):
    source, ours = families[pre]
    assert ours.vocab_size == source.get_vocab_size() and ours.eos_token_id == 1
    for text in HARD:
        want = source.encode(text).ids
        assert ours.encode(text) == want, text
        for skip in (True, False):
            assert ours.decode(want, skip) == source.decode(want, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_has_the_ids_of_the_source(families, text):
    for source, ours in families.values():
        assert ours.encode(text) == source.encode(text).ids


WORDS = {  # by llama.cpp's rules
    "smollm": ("ab12\r\n\r\n1st", ["ab", "1", "2", "\r\n\r\n", "1", "st"]),
    "gpt-2": ("ab12\r\n\r\n1st x", ["ab", "12", "\r\n\r", "\n", "1", "st", " x"]),
    "falcon": ("a+b 12345!!x", ["a", "+", "b", " ", "123", "45", "!!", "x"]),
    "default": ("a+b 12345!!x", ["a", "+", "b", " ", "123", "45", "!!", "x"]),
    "deepseek-llm": ("Ab 12\n\n东京 x!", ["Ab", " ", "12", "\n", "\n", "东京", " x", "!"]),
    "deepseek-v3": ("Ab'c 12345 _东京x!\n", ["Ab", "'c", " ", "123", "45", " _", "东京", "x", "!\n"]),
    "gpt-4o": ("HTTPServer's 12345/\n", ["HTTPServer's", " ", "123", "45", "/\n"]),
    "tekken": ("HTTPServer's 123/\n", ["HTTPServer", "'s", " ", "1", "2", "3", "/\n"]),
    "llama-bpe": ("HTTPServer'S 1234", ["HTTPServer", "'S", " ", "123", "4"]),
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_of_llama_cpp(pre):
    text, words = WORDS[pre]
    letters = decoders.ByteLevel()
    found = PRE_TOKENIZERS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [letters.decode([word]) for word, _ in found] == words


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path):
    backend = train(GPT2)
    keys = byte_level_keys(backend, "llama-bpe", add_bos_token=None)
    assert read(tmp_path, **keys).encode("a")[0] == 0  # Llama 3's do unless told otherwise
    keys = byte_level_keys(backend, "gpt-2", add_bos_token=True, add_eos_token=True)
    ours = read(tmp_path, **keys)
    ids = ours.encode("a")
    assert ids[0] == 0 and ids[-1] == 1 and ours.encode("a", add_special_tokens=False) == ids[1:-1]
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|finish|>", special_tokens=[("<|begin|>", 0), ("<|finish|>", 1)]
    )
    assert ids == backend.encode("a").ids


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


def sentencepiece_keys(file, *, has_prefix: bool) -> dict:
    """What the converter writes of a `tokenizer.model`: user-defined pieces with real spaces."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    pieces = [(p.piece.replace("▁", " ") if p.type == USER_DEFINED else p.piece, p.score, p.type) for p in proto.pieces]
    tokens, scores, kinds = map(list, zip(*pieces, strict=True))
    ids = {f"{name}_token_id": tokens.index(piece) for name, piece in (("bos", "<s>"), ("eos", "</s>"))}
    ids |= {"unknown_token_id": tokens.index("<unk>")}
    return dict(model="llama", tokens=tokens, scores=scores, token_type=kinds, add_space_prefix=has_prefix, **ids)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_sentencepiece_ids_are_those_of_the_library(sentencepiece_models, tmp_path, name):
    import sentencepiece

    file = sentencepiece_models[name]
    source = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ours = read(tmp_path, **sentencepiece_keys(file, has_prefix=name == "llama"))
    for text in [*HARD, "<table> \n\n\n   x<table>", "▁a", "x  \n", "".join(" " * n + "x" for n in range(1, 20))]:
        if "<s>" in text:
            parts = [source.encode(part) for part in ("a", "b ", " c")]
            want = [*parts[0], source.eos_id(), *parts[1], source.bos_id(), *parts[2]]
        else:
            want = source.encode(text)
            assert ours.decode(want) == source.decode(want)
        assert ours.encode(text) == [source.bos_id(), *want], text


def test_long_pieces_are_no_work(sentencepiece_models, tmp_path):
    keys = sentencepiece_keys(sentencepiece_models["llama"], has_prefix=True)
    for key, value in (("tokens", "a" * 100_000), ("scores", 0.0), ("token_type", NORMAL)):
        keys[key].append(value)
    with pytest.raises(ModelFormatError, match="one of 100000 characters; at most 1024"):
        read(tmp_path, **keys)


def test_phi_3_takes_the_space_after_its_tokens(sentencepiece_models, tmp_path):
    keys = sentencepiece_keys(sentencepiece_models["llama"], has_prefix=True)
    for kind, token in ((CONTROL, "<|user|>"), (CONTROL, "<|endoftext|>")):
        keys["tokens"].append(token)
        keys["token_type"].append(kind)
        keys["scores"].append(0.0)
    user, text = len(keys["tokens"]) - 2, len(keys["tokens"]) - 1
    phi3, llama = (read(tmp_path, architecture, **keys) for architecture in ("phi3", "llama"))
    assert phi3.encode("<|user|> \n a", False) == [user, *phi3.encode("a", False)]
    assert llama.encode("<|user|> \n a", False) == [user, *llama.encode(" \n a", False)]
    assert phi3.encode("<|endoftext|> a", False) == [text, *phi3.encode(" a", False)]


def test_templates_and_names_for_them(tmp_path):
    keys = byte_level_keys(train(GPT2), "gpt-2") | {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "tools: {{ tools | length }}",
    }
    ours = read(tmp_path, **keys)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.chat.render(messages) == "<|begin|>Hi"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert ours.chat.render(messages, tools=tools) == "tools: 1"
    assert ours.apply_chat_template(messages)[0] == 0


def changed(key, value):
    def change(keys):
        keys[key] = value(keys[key]) if callable(value) else value

    return change


DAMAGED = {
    "no_pre": (changed("pre", None), "lacks the key tokenizer.ggml.pre"),
    "unknown_pre": (changed("pre", "my-own"), "tokenizer.ggml.pre='my-own' is not supported; supported: command-r"),
    "unknown_model": (changed("model", "bert"), "tokenizer.ggml.model='bert' is not supported; supported: gpt2"),
    "no_tokens": (changed("tokens", None), "lacks the key tokenizer.ggml.tokens"),
    "tokens_of_numbers": (changed("tokens", [1, 2]), "tokenizer.ggml.tokens=.* must be an array of strings"),
    "a_token_twice": (changed("tokens", lambda tokens: ["a", *tokens[:-1]]), "a token twice"),
    "types_too_few": (changed("token_type", lambda kinds: kinds[:-1]), "token_type=.* a number for each"),
    "types_of_text": (changed("token_type", ["a"]), "token_type=.* must be an array of numbers"),
    "merge_of_one": (changed("merges", ["ab"]), "two parts each"),
    "merge_of_unknown": (changed("merges", ["🙂 x"]), "no sound tokenizer"),
    "bos_out_of_range": (changed("bos_token_id", 10**6), "bos_token_id=1000000 must be the id of one of the"),
    "eos_of_text": (changed("eos_token_id", "</s>"), "eos_token_id='</s>' must be an integer"),
    "bos_not_named": (lambda keys: keys.update(bos_token_id=None, add_bos_token=True), "bos_token_id=None is needed"),
    "flag_of_text": (changed("add_bos_token", "yes"), "add_bos_token='yes' must be a boolean"),
    "template_of_number": (lambda keys: keys.update(chat_template=3), "chat_template=3 must be a string"),
    "long_template": (lambda keys: keys.update(chat_template="x" * 1_000_001), "more than 1000000 characters"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_vocabularies_are_refused(families, tmp_path, case):
    change, message = DAMAGED[case]
    keys = byte_level_keys(families["gpt-2"][0], "gpt-2")
    change(keys)
    with pytest.raises(ModelFormatError, match=f"model.gguf.*{message}"):
        read(tmp_path, **keys)


STOPS = {
    "eos": ({}, [1]),
    "eot_and_eom": ({"eot_token_id": 5, "eom_token_id": 6}, [1, 5, 6]),
    "none": ({"eos_token_id": None}, []),
    "unset": ({"eos_token_id": 2**32 - 1}, []),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_ends_a_generation(families, tmp_path, case):
    from jaxllm.checkpoint.gguf.reader import read_gguf
    from jaxllm.checkpoint.gguf.vocabulary import stop_ids

    changes, want = STOPS[case]
    keys = byte_level_keys(families["gpt-2"][0], "gpt-2", **changes)
    keys["tokens"][3] = "<|eot_id|>"  # a normal token of that name is none
    file = write(tmp_path / "model.gguf", "llama", vocabulary_keys(**keys), {})
    assert stop_ids(read_gguf(file)[0]) == want
    keys["token_type"][3] = CONTROL
    file = write(tmp_path / "model.gguf", "llama", vocabulary_keys(**keys), {})
    assert stop_ids(read_gguf(file)[0]) == (want if "eot_token_id" in changes else [*want, 3])
