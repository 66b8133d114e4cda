"""Sources for the tests of the converter: what old checkpoints and slow tokenizers look like."""

import argparse
import inspect
import json
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from jaxllm.cli.convert import main

OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't 1234567890 times as quick as the other one.",
    "naïve café, 東京 and 🙂 say hello, hello, hello world",
    "def f(x):\n    return x + 1  # <table>\n\n\nclass A:\n        pass",
    *inspect.getsource(argparse).splitlines(),
]
TEXTS = ["Hello world", " two  spaces ", "def f(x):\n    return 1", "naïve 東京 🙂 ﬁ", "", "a</s>b <s> c", "qq\u00a0\t"]


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def run(src: Path, out: Path, *options: str) -> int:
    return main([str(src), str(out), *options])


def save_bin(torch, file: Path, tensors: dict, **options) -> None:
    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, file, **options)


OPT_TOKENIZER = {
    "tokenizer_class": "GPT2Tokenizer",
    "bos_token": "</s>",
    "unk_token": "</s>",
    "pad_token": "<pad>",
    "add_bos_token": True,
    "add_prefix_space": False,
    "errors": "replace",
}


def write_gpt2(folder: Path, config: dict | None, specials=("<s>", "<pad>", "</s>", "<unk>"), without="") -> None:
    """As OPT has it: ids in another order than the merges, one of which begins with "#"."""
    merges = ["# #", "h e", "l l", "he ll", "hell o", "Ġ t", "Ġ w", "Ġt h", "Ġth e", "Ġ Ġ", "## #", "' t"]
    letters = sorted(set(ByteLevel.alphabet()) - set(without))
    tokens = [*specials, *(merge.replace(" ", "") for merge in reversed(merges)), *letters]
    write_json(folder / "vocab.json", {token: i for i, token in enumerate(tokens)})
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    if config is not None:
        write_json(folder / "tokenizer_config.json", config)
        write_json(folder / "special_tokens_map.json", {"eos_token": {"content": "</s>"}})


BPE = dict(
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    split_digits=True,
)
MODELS = {
    "llama": BPE,
    "gemma": BPE
    | dict(
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        eos_piece="</s>",
        bos_piece="<s>",
        user_defined_symbols=["<mask>", "\n", "\n\n", "▁▁", "▁▁▁▁", "<table>"],
    ),
    "unigram": dict(model_type="unigram"),  # NFKC, spaces removed, unknown characters
    "unigram_bytes": dict(model_type="unigram", byte_fallback=True),
    "prefix and symbols": BPE | dict(user_defined_symbols=["<table>"]),
}


def train_sentencepiece(folder: Path) -> dict[str, Path]:
    """The files, by name in `MODELS`."""
    sentencepiece = pytest.importorskip("sentencepiece")
    files = {}
    for name, options in MODELS.items():
        files[name] = folder / f"{name}.model"
        with files[name].open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(CORPUS),
                model_writer=file,
                num_threads=1,
                minloglevel=2,
                vocab_size=400 if "byte_fallback" in options else 120,
                **options,
            )
    return files
