"""A tiny model that chats, in random bytes: a tokenizer of bytes and special tokens, and random weights."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.checkpoints import write_checkpoint

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[INST]", "[/INST]"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def backend() -> tokenizers.Tokenizer:
    """One token a byte, some special ones, and a rule that adds a beginning of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


def save_tokenizer(folder: Path, template=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def write_model(folder: Path, template: str | None = TEMPLATE, **changes) -> Path:
    """`changes` are those of the config."""
    save_tokenizer(folder, template)
    sizes = {"vocab_size": 256 + len(SPECIAL), "max_position_embeddings": 512, "eos_token_id": 257}
    return write_checkpoint(folder, **(sizes | changes))
