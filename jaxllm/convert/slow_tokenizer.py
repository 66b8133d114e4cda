"""Copies a directory's fast tokenizer, or has the worker convert a slow one and compares it with its source."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.checkpoint.files import read_json
from jaxllm.convert.process import require, run
from jaxllm.errors import ModelFormatError
from jaxllm.text.chat_template import OLD_TEMPLATE_FILE, TEMPLATE_DIR, TEMPLATE_FILE
from jaxllm.text.tokenizer import CONFIG, FILE, MAX_FILE_BYTES, Tokenizer

_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_ID = 2**24
# They name other files or classes, or repeat what tokenizer.json contains.
_LEFT_OUT = (
    "auto_map",
    "tokenizer_file",
    "special_tokens_map_file",
    "name_or_path",
    "sp_model_kwargs",
    "legacy",
    "added_tokens_decoder",
    "extra_special_tokens",
)


class _SourceFormat(NamedTuple):
    kind: str
    files: tuple[str, ...]
    packages: tuple[str, ...]


_FORMATS = (
    _SourceFormat("sentencepiece", ("tokenizer.model",), ("sentencepiece", "google.protobuf")),
    _SourceFormat("byte_level", ("vocab.json", "merges.txt"), ("regex",)),
)
# The format of a class, and whether its texts begin with BOS unless the configuration says otherwise.
_CLASSES = {
    "LlamaTokenizer": ("sentencepiece", True),
    "CodeLlamaTokenizer": ("sentencepiece", True),
    "GemmaTokenizer": ("sentencepiece", True),
    "GPT2Tokenizer": ("byte_level", False),
}
_CLASS_OF_MODEL = {
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "mixtral": "LlamaTokenizer",
    "phi3": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
}


def write_tokenizer(src: Path, out: Path, hf: Mapping[str, Any]) -> str:
    """Writes the tokenizer of the model directory `src`, whose `config.json` is `hf`, to `out`; describes it.

    Raises `ModelFormatError` for a tokenizer that is damaged, unknown, or has no equivalent fast one.
    """
    is_fast = (src / FILE).is_file()
    found = [source_format for source_format in _FORMATS if all((src / name).is_file() for name in source_format.files)]
    for name in (_MAP, TEMPLATE_FILE, OLD_TEMPLATE_FILE, *((FILE, CONFIG, _ADDED) if is_fast else ())):
        if (src / name).is_file():
            shutil.copyfile(src / name, out / name)
    for template in sorted((src / TEMPLATE_DIR).glob("*.jinja")):
        (out / TEMPLATE_DIR).mkdir(exist_ok=True)
        shutil.copyfile(template, out / TEMPLATE_DIR / template.name)
    if is_fast:
        Tokenizer.from_dir(out)  # raises if it is damaged
        return FILE
    if not found:
        return "no tokenizer, as none was found"
    _convert(src, out, hf, found[0])
    return f"{FILE} from {' and '.join(found[0].files)}"


def _convert(src: Path, out: Path, hf: Mapping[str, Any], source_format: _SourceFormat) -> None:
    require(*source_format.packages)
    config, special = (read_json(src / name) if (src / name).is_file() else {} for name in (CONFIG, _MAP))
    begins = _begins_with_bos(src / CONFIG, config, hf, source_format)
    ends = config.get("add_eos_token") is True
    if config.get("add_prefix_space") not in ((None, True) if source_format.kind == "sentencepiece" else (None, False)):
        raise ModelFormatError(f"{src / CONFIG}: add_prefix_space={config['add_prefix_space']!r:.20} is not supported")
    files = [src / name for name in source_format.files]
    for file in files:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelFormatError(f"{file} is larger than {MAX_FILE_BYTES} bytes; download it again")
    job = {
        "task": "tokenizer",
        "kind": source_format.kind,
        "files": [str(file.absolute()) for file in files],
        "out": str((out / FILE).absolute()),
        "names": _special_names(src, config, special),
        "additional_special_tokens": _additional(src, config) or _additional(src, special),
        "added": _added(src, config),
        "add_bos_token": begins,
        "add_eos_token": ends,
        "is_legacy": config.get("legacy") is not False,
    }
    result = run(job)
    config = {key: value for key, value in config.items() if key not in _LEFT_OUT} | result["names"]
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins, "add_eos_token": ends}
    (out / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    compare(files[0], Tokenizer.from_dir(out), result["probes"])


def _begins_with_bos(
    path: Path, config: Mapping[str, Any], hf: Mapping[str, Any], source_format: _SourceFormat
) -> bool:
    given = config.get("tokenizer_class") or hf.get("tokenizer_class") or _CLASS_OF_MODEL.get(str(hf.get("model_type")))
    kind, default = _CLASSES.get(str(given).removesuffix("Fast"), (None, False))
    if kind != source_format.kind:
        fitting = [name for name, (known, _) in _CLASSES.items() if known == source_format.kind]
        raise ModelFormatError(
            f"{path}: {' and '.join(source_format.files)} with tokenizer_class={given!r:.100} is not a combination "
            f"that is converted; if it behaves like one of {fitting}, put that there"
        )
    stated = config.get("add_bos_token")
    return bool(default or hf.get("model_type") == "opt") if stated is None else stated is True


def _special_names(src: Path, config: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, str]:
    names = {key: _content(src, key, config.get(key) or special.get(key) or "") for key in _NAMES}
    return {key: name for key, name in names.items() if name}


def _additional(src: Path, config: Mapping[str, Any]) -> list[str]:
    key = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
    tokens = config.get(key) or []
    if isinstance(tokens, dict):  # names for the model's own use
        tokens = list(tokens.values())
    if not isinstance(tokens, list):
        raise ModelFormatError(f"{src}: {key}={tokens!r:.100} must be a list of tokens; download it again")
    return [name for name in (_content(src, key, token) for token in tokens) if name]


def _added(src: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that the JSON files give an id: {"id", "content", "special", "lstrip", "rstrip"}."""
    path = src / _ADDED
    plain = read_json(path) if path.is_file() else {}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelFormatError(f"{src / CONFIG}: added_tokens_decoder must map ids to tokens; download it again")
    tokens = {content: _added_token(path, token, content) for content, token in plain.items() if content}
    for token, described in decoder.items():
        content = _content(src / CONFIG, "added_tokens_decoder", described)
        if content:
            tokens[content] = _added_token(src / CONFIG, token, content, described)
    return list(tokens.values())


def _added_token(path: Path, token: Any, content: str, described: Any = None) -> dict[str, Any]:
    flags = described if isinstance(described, dict) else {}
    if not str(token).isdecimal() or int(token) >= _MAX_ID:
        raise ModelFormatError(f"{path}: the id {token!r:.30} of {content!r:.100} is not a number below {_MAX_ID}")
    return {"id": int(token), "content": content} | {
        key: flags.get(key) is True for key in ("special", "lstrip", "rstrip")
    }


def _content(path: Path, key: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ModelFormatError(f"{path}: {key} has {token!r:.100}, which is not a token's text; download it again")
    return content


def compare(source: Path, tokenizer: Tokenizer, probes: Sequence[Sequence[Any]]) -> None:
    """Raises `ModelFormatError` unless `tokenizer` agrees with each probe, (text, ids, decoded)."""
    for text, ids, decoded in probes:
        got = tokenizer.encode(text)
        if got != ids:
            raise _differs(source, f"{text!r:.100} becomes {got[:12]} instead of {ids[:12]}")
        if decoded is not None and tokenizer.decode(ids) != decoded:
            raise _differs(source, f"{ids[:12]} becomes {tokenizer.decode(ids)!r:.100} instead of {decoded!r:.100}")


def _differs(source: Path, how: str) -> ModelFormatError:
    return ModelFormatError(
        f"{source} has rules that a fast tokenizer cannot follow ({how}); use the source with LLM(..., tokenizer=...), "
        f"or a {FILE} from the model's publisher"
    )
