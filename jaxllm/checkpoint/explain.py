"""What lies at a path that holds no checkpoint which can be read, and what to do about it."""

import json
import shlex
from pathlib import Path

from jaxllm.checkpoint.files import CONFIG, WEIGHTS, WEIGHTS_INDEX
from jaxllm.checkpoint.orbax_files import is_orbax
from jaxllm.errors import ModelFormatError

ADAPTER = "adapter_config.json"
_FORMATS = "give a local directory in Hugging Face format (config.json, tokenizer.json, *.safetensors), or a .gguf file"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_FOREIGN = {".h5": "TensorFlow", ".msgpack": "Flax's Linen", ".onnx": "ONNX", ".npz": "NumPy", ".engine": "TensorRT"}


def not_a_checkpoint(path: Path) -> ModelFormatError:
    """For a path without `config.json`."""
    if path.is_dir():
        return ModelFormatError(_directory(path) or _missing_config(path))
    if path.exists():
        return ModelFormatError(_file(path))
    text = f"{path} is not a directory; {_FORMATS}"
    if not path.is_absolute() and 2 <= len(path.parts) <= 6 and path.parts[0] not in ("..", "~"):
        text += ". A model of the Hugging Face hub goes by its name, as a string: org/name"
    return ModelFormatError(text)


def no_weights(model_dir: Path) -> ModelFormatError:
    """For a directory without the files that safetensors are looked for in."""
    if found := _adapter(model_dir):
        return ModelFormatError(found)
    files = sorted(file.name for file in model_dir.iterdir())
    return ModelFormatError(f"{model_dir} has neither {WEIGHTS} nor {WEIGHTS_INDEX}, {_others(model_dir, files)}")


def _others(model_dir: Path, files: list[str]) -> str:
    def ending(*suffixes: str) -> list[str]:
        return [name for name in files if name.endswith(suffixes)]

    if found := ending(".gguf"):
        return f"but {found[0]}, which is a model by itself: give the path of that file"
    if found := [name for name in files if name.startswith("model-") and name.endswith(".safetensors")]:
        return f"but {found[0]}, a part of the weights: download {WEIGHTS_INDEX} and all the parts that it lists"
    if found := ending(".safetensors"):
        return f"but {', '.join(found[:3])}, whose tensors have other names: download the files model*.safetensors"
    if found := [name for name in files if name.startswith("pytorch_model") and name.endswith(".bin")]:
        convert = f"python -m jaxllm.convert {shlex.quote(str(model_dir))} NEW_DIR"
        return f"but {', '.join(found[:3])}, which is pickled and could run code: convert it with {convert}"
    if found := ending(*_PICKLED):
        return (
            f"but {', '.join(found[:3])}, pickled weights of another layout, which can't be converted: take the "
            "model's repository in Hugging Face format"
        )
    if found := ending(*_FOREIGN):
        kind = _FOREIGN[Path(found[0]).suffix]
        return f"but {', '.join(found[:3])}, weights of {kind}: take the model's safetensors"
    return (
        "and no other weights: its download is incomplete. Give the model's name org/name, which fetches it, or run "
        f"hf download ORG/NAME --local-dir {shlex.quote(str(model_dir))}"
    )


def _directory(path: Path) -> str | None:
    """What a directory without `config.json` is, if something in it tells."""
    if found := _adapter(path):
        return found
    if (path / "model_index.json").is_file():
        return f"{path} is a pipeline of diffusers, which makes images; take a text model"
    if is_orbax(path) or (path / "manifest.ocdbt").exists():
        return (
            f"{path} is an Orbax checkpoint: arrays without a configuration. Give that too, LLM(path, config=...) or "
            "jaxllm.models.load(path, config=...); or restore it, and give LLM a pair (configuration, parameters) or a "
            "Flax module"
        )
    if (path / "params.json").is_file():
        return (
            f"{path} is in its maker's own format (params.json); take the model's repository in Hugging Face format, "
            f"with {CONFIG}"
        )
    if path.name.startswith("models--") and (path / "snapshots").is_dir():
        name = path.name.removeprefix("models--").replace("--", "/")
        return f"{path} is a repository in the hub's cache; give its name, {name}, or a directory in its snapshots/"
    inner = sorted(file.parent.name for file in path.glob(f"*/{CONFIG}"))
    if inner:
        more = f" (or another of {len(inner)})" if len(inner) > 1 else ""
        return f"{path} has no {CONFIG}, but directories with one: give {path / inner[-1]}{more}"
    return None


def _missing_config(path: Path) -> str:
    where = " of the current directory" if path == Path() else ""
    return f"{path / CONFIG}{where} is missing; take the whole model directory, in Hugging Face format"


def _file(path: Path) -> str:
    if path.suffix in (".safetensors", ".json", ".jinja", ".model", *_PICKLED):
        return f"{path} is one file of a model; give its directory, {path.parent}"
    return f"{path} is a file, but no .gguf; {_FORMATS}"


def _adapter(path: Path) -> str | None:
    if not (path / ADAPTER).is_file():
        return None
    try:
        base = json.loads((path / ADAPTER).read_bytes()[:1_000_000]).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError, OSError):
        base = None
    of = f" of {base!r:.200}" if isinstance(base, str) and base else ""
    return (
        f"{path} is an adapter (LoRA){of}, not a whole model, and adapters are not supported yet; merge it into its "
        "base with peft's merge_and_unload() and save_pretrained(), and give the directory that this makes"
    )
