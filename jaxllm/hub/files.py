"""Which files of a repository are fetched: configuration, tokenizer and layers after pooling, then weights, and
never code."""

import fnmatch
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from jaxllm.checkpoint.explain import ADAPTER
from jaxllm.checkpoint.files import CONFIG, WEIGHTS, WEIGHTS_INDEX, read_json
from jaxllm.errors import ModelFormatError, ModelNotFoundError
from jaxllm.hub.names import HubName

MAX_FILE_BYTES = 100_000_000  # of what is no weights: nothing larger would be read
_SMALL = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model", "LICENSE*")
_TEMPLATES = "additional_chat_templates/*.jinja"
_MODULES = re.compile(r"\d+_\w+/config\.json|\d+_Dense/model\.safetensors")  # of sentence-transformers: "1_Pooling/..."


def config_files(name: HubName, sizes: Mapping[str, int | None]) -> list[str]:
    """The configurations, tokenizer, licence and layers after pooling among the files of a repository, whose `sizes`
    are in bytes.

    Raises `ModelFormatError` if they hold no checkpoint that can be read, so that nothing is fetched.
    """
    _check_has_checkpoint(name, sizes)
    return sorted(file for file, num_bytes in sizes.items() if _is_small(file) and (num_bytes or 0) <= MAX_FILE_BYTES)


def _is_small(file: str) -> bool:
    if not _is_beside(file):
        is_template = fnmatch.fnmatchcase(file, _TEMPLATES) and file.count("/") == 1
        return is_template or _MODULES.fullmatch(file) is not None
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in _SMALL)


def _is_beside(file: str) -> bool:
    """Whether it lies in the top folder; the Windows flavour knows all separators and drives."""
    return PureWindowsPath(file).name == file and file not in (".", "..")


def _check_has_checkpoint(name: HubName, files: Collection[str]) -> None:
    if CONFIG in files and (WEIGHTS in files or WEIGHTS_INDEX in files):
        return
    if ADAPTER in files:
        raise ModelFormatError(
            f"{name} is an adapter (LoRA), not a whole model, and adapters are not supported yet; merge it with peft's "
            f"merge_and_unload() into its base, which its {ADAPTER} names"
        )
    if gguf := sorted(file for file in files if file.lower().endswith(".gguf")):
        more = f" (of {len(gguf)})" if len(gguf) > 5 else ""
        raise ModelFormatError(
            f"{name} holds GGUF files; name one, as in {name}:{gguf[0]}. There are {', '.join(gguf[:5])}{more}"
        )
    if CONFIG not in files:
        raise ModelFormatError(f"{name} has no {CONFIG}, so it is no language model in Hugging Face format")
    if any(file.endswith(".bin") for file in files):
        raise ModelFormatError(
            f"{name} has pickled weights (*.bin) only, which can run code and are not fetched. Take another "
            f"repository, or fetch them yourself and convert them: hf download {name.repo} --local-dir SRC && "
            "jaxllm convert SRC OUT"
        )
    others = sorted(file for file in files if file.endswith(".safetensors"))
    raise ModelFormatError(
        f"{name} has neither {WEIGHTS} nor {WEIGHTS_INDEX}, but {', '.join(others[:3]) or 'no weights'}; an adapter, "
        "or another library's format, can't be served"
    )


def weight_files(snapshot: Path) -> list[str]:
    """The files of the weights, as the index in the directory `snapshot` says. Raises `ModelFormatError` for an index
    that names others than *.safetensors files beside it."""
    index = snapshot / WEIGHTS_INDEX
    if not index.is_file():
        return [WEIGHTS]
    names = read_json(index, max_bytes=MAX_FILE_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelFormatError(f"{index}: weight_map must map tensors to files; the repository is damaged")
    for file in names.values():
        if not (isinstance(file, str) and _is_beside(file) and file.endswith(".safetensors")):
            raise ModelFormatError(f"{index} names {file!r:.100}; it must be a *.safetensors file beside it")
    return sorted(set(names.values()))


def check_holds(name: HubName, files: Collection[str], wanted: Collection[str]) -> None:
    """Raises `ModelFormatError` if the repository lacks one of the `wanted` weight files."""
    if missing := sorted(set(wanted) - set(files)):
        raise ModelFormatError(
            f"{name} needs {', '.join(missing[:3])}, which the repository lacks; take another revision"
        )


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """The `.gguf` file that `name` asks for, and the further parts of its model. Raises `ModelNotFoundError`, or
    `ModelFormatError` for a part other than the first."""
    if name.file is not None and name.file in files and ".." not in PurePosixPath(name.file).parts:
        wanted = name.parts
        check_holds(name, files, wanted)
        return wanted
    there = sorted(file for file in files if file.lower().endswith(".gguf"))
    raise ModelNotFoundError(
        f"{name.repo} has no file {name.file}; of that kind it has {', '.join(there[:10]) or 'none'}"
    )
