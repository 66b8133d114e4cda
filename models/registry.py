"""Architecture names of `config.json` -> the files that know them."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

_DECODERS = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Phi3": "phi3",
    "Qwen2Moe": "qwen2_moe",
    "Qwen3Moe": "qwen3_moe",
    "Olmoe": "olmoe",
    "GptOss": "gpt_oss",
    "Glm4Moe": "glm4_moe",
    "MiniMaxM2": "minimax_m2",
    "GraniteMoe": "granite_moe",
    "Ernie4_5_Moe": "ernie4_5_moe",
    "Llama4": "llama4",
}
_ENCODERS = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
    "Camembert": "roberta",
    "ModernBert": "modernbert",
}


def _names(families: dict[str, str], *endings: str) -> dict[str, str]:
    return {family + ending: file for family, file in families.items() for ending in endings}


_TEXT = {f"{family}Text" if family in ("Gemma3", "Llama4") else family: file for family, file in _DECODERS.items()}
ARCHITECTURES: dict[str, str | ModuleType] = {
    **_names(_DECODERS, "ForCausalLM"),
    "OPTForCausalLM": "opt",
    **_names(_TEXT, "Model", "ForSequenceClassification"),
    **_names(_ENCODERS, "Model", "ForMaskedLM", "ForSequenceClassification"),
}


def register(architecture: str, module: ModuleType) -> None:
    """Makes this process know an architecture of somebody else's: the name in `config.json`, and the module with its
    `Config`, `Model`, `WEIGHTS` and perhaps `OPTIONAL_WEIGHTS`. ValueError if the name is another's, TypeError for
    what the module lacks."""
    if lacking := [name for name in ("Config", "Model", "WEIGHTS") if not hasattr(module, name)]:
        raise TypeError(f"{module.__name__} has no {', '.join(lacking)}, which an architecture needs")
    if ARCHITECTURES.get(architecture, module) is not module:
        raise ValueError(f"{architecture} is known already: {ARCHITECTURES[architecture]}; take another name")
    ARCHITECTURES[architecture] = module


def find(architecture: str) -> ModuleType:
    """The architecture's module, with `Config`, `Model` and `WEIGHTS`. KeyError if there is none."""
    return _module(ARCHITECTURES[architecture])


def modules() -> Iterator[ModuleType]:
    """Of all architectures, each once."""
    return map(_module, dict.fromkeys(ARCHITECTURES.values()))


def model_for(config: object) -> type:
    """The model class that `config` configures. TypeError if no architecture has such a configuration."""
    for module in modules():
        if type(config) is module.Config:
            return module.Model
    raise TypeError(f"{type(config).__qualname__} is no configuration of {sorted(ARCHITECTURES)}")


def _module(known: str | ModuleType) -> ModuleType:
    return import_module(f"jaxllm.models.{known}") if isinstance(known, str) else known
