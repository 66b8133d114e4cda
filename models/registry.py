"""Architecture names of `config.json` -> the files that know them."""

from importlib import import_module
from types import ModuleType

ARCHITECTURES: dict[str, str | ModuleType] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
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
    known = ARCHITECTURES[architecture]
    return import_module(f"jaxllm.models.{known}") if isinstance(known, str) else known


def model_for(config: object) -> type:
    """The model class that `config` configures. TypeError if no architecture has such a configuration."""
    for module in map(find, ARCHITECTURES):
        if type(config) is module.Config:
            return module.Model
    raise TypeError(f"{type(config).__qualname__} is no configuration of {sorted(ARCHITECTURES)}")
