"""Architecture names of `config.json` -> the files that know them."""

from importlib import import_module
from types import ModuleType

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
}
REFUSED = {
    "Gemma3ForConditionalGeneration": "only text models are; take a Gemma3ForCausalLM checkpoint, such as "
    "gemma-3-1b, or save the text part of this one as such"
}


def find(architecture: str) -> ModuleType:
    """The architecture's module, with `Config`, `Model` and `WEIGHTS`. KeyError if there is none."""
    return import_module(f"jaxllm.models.{ARCHITECTURES[architecture]}")


def model_for(config: object) -> type:
    """The model class that `config` configures. TypeError if no architecture has such a configuration."""
    for name in ARCHITECTURES.values():
        module = import_module(f"jaxllm.models.{name}")
        if type(config) is module.Config:
            return module.Model
    raise TypeError(f"{type(config).__qualname__} is no configuration of {sorted(ARCHITECTURES.values())}")
