"""Maps tensor names of old checkpoints to the names that transformers writes today, which the loader knows."""

import re
from collections.abc import Mapping
from typing import Any

HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_DROPPED = re.compile(r".*\.rotary_emb\.inv_freq|(model\.)?decoder\.version")  # computed values and version numbers
_UNPREFIXED = ("embed_tokens.", "layers.", "norm.", "decoder.")  # saved from the model without its head
_TIED_UNLESS_SAID = {"gemma", "gemma2", "gemma3_text", "gpt2", "opt"}  # of `model_type`


def canonical(name: str, hf: Mapping[str, Any]) -> str | None:
    """Today's name of tensor `name` in a checkpoint with `config.json` `hf`; None if it is not needed."""
    if _DROPPED.fullmatch(name):
        return None
    architectures = hf.get("architectures")
    is_causal = isinstance(architectures, list) and all(str(each).endswith("ForCausalLM") for each in architectures)
    return f"model.{name}" if is_causal and name.startswith(_UNPREFIXED) else name


def is_tied(hf: Mapping[str, Any]) -> bool:
    """Whether the model uses its input embeddings as output layer, so that a stored `HEAD` is a duplicate."""
    tied = hf.get("tie_word_embeddings")
    return str(hf.get("model_type")) in _TIED_UNLESS_SAID if tied is None else bool(tied)
