"""Writes a trained Llama as a directory in Hugging Face format: configuration, tokenizer, chat template, weights."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from safetensors.flax import save
from tokenizers import Tokenizer

from jaxllm.models import llama

MAX_BYTES = 12_000_000  # of the whole directory
MAX_LEN = 1024  # tokens
BOS, EOS = "<|bos|>", "<|eos|>"
# As `chat_text` in training_data.py writes one exchange; a system message goes in front of the first request.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + '\\n' %}"
    "{% elif message.role == 'user' %}{{ '<|user|>' + ns.system + message.content }}{% set ns.system = '' %}"
    "{% elif message.role == 'assistant' %}{{ '<|assistant|>' + message.content + eos_token }}"
    "{% else %}{{ raise_exception('the roles are system, user and assistant, not ' + message.role) }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def hf_config(options: Namespace, tokenizer: Tokenizer) -> dict:
    """A `config.json` for transformers 5 (`rope_parameters`, `dtype`) and 4 (`rope_theta`, `torch_dtype`)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": options.embed,
        "intermediate_size": options.mlp,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def hf_tensors(model: llama.Model) -> dict[str, jax.Array]:
    """bfloat16 tensors under their Hugging Face names: what `llama.WEIGHTS` says of loading, backwards."""
    params = {".".join(map(str, path)): var[...] for path, var in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors = {}
    for name, weight in llama.WEIGHTS.items():
        if weight.path.format(i=0) not in params:  # a tied head, or a classifier's
            continue
        theirs, ours = weight.axes.split(" -> ")
        for i in range(model.cfg.num_layers if "{i}" in name else 1):
            value = params[weight.path.format(i=i)]
            if weight.part is not None:
                axis, begin, end = weight.part
                value = value[(slice(None),) * axis + (slice(begin, end),)]
            tensors[name.format(i=i)] = rearrange(value.astype(jnp.bfloat16), f"{ours} -> {theirs}")
    return tensors


# With these most of what it writes parses, of 30 seeds of "def read_lines(path" 26; with temperature 0.8 alone 16.
DRAWING = {"min_p": 0.4, "repetition_penalty": 1.25, "temperature": 0.5}


def export(out: Path, model: llama.Model, config: dict, tokenizer: Tokenizer) -> None:
    """Writes the directory that transformers would write. ValueError if it is larger than `MAX_BYTES`."""
    out.mkdir(parents=True, exist_ok=True)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")} | DRAWING
    text = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    for kind, value in {"config": config, "generation_config": generation, "tokenizer_config": text}.items():
        (out / f"{kind}.json").write_text(json.dumps(value, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "model.safetensors").write_bytes(save(hf_tensors(model), metadata={"format": "pt"}))
    num_bytes = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{out} holds {num_bytes} bytes, more than {MAX_BYTES}; take smaller sizes")
    print(f"wrote {out} ({num_bytes / 1e6:.2f} MB)", file=sys.stderr, flush=True)
