"""SmolLM2-135M-Instruct, quantised by llama.cpp: what is read of its file."""

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import HuggingFaceDirectory, open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import check_same, load
from tests.gguf_files import gguf
from tests.real.hard_text import TEXTS
from tests.real.smollm2 import PROMPTS, SMOLLM2


@pytest.fixture
def file(real):
    return real(SMOLLM2)


def metadata(file) -> dict:
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


def test_configuration(file):
    spec = read_config(file, jnp.float32)
    cfg = spec.cfg
    assert spec.module.__name__ == "jaxllm.models.llama" and spec.eos_token_ids == (2,)
    assert (cfg.vocab, cfg.embed, cfg.num_layers, cfg.heads, cfg.kv_heads) == (49152, 576, 30, 9, 3)
    assert (cfg.head_dim, cfg.mlp, cfg.max_len, cfg.eps, cfg.tie_embeddings) == (64, 1536, 8192, 1e-5, True)


def test_ids_are_those_of_llama_cpp(file):
    """Digits are cut one by one first, and the rest as by GPT-2; what transformers makes of the file does not."""
    keys = metadata(file)
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    source = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    source.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    source.decoder = decoders.ByteLevel()
    special = [AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    source.add_special_tokens(special)
    ours = open_checkpoint(file).tokenizer()
    for text in [*TEXTS, *PROMPTS, "<|im_start|>user\nHi<|im_end|>\n"]:
        want = source.encode(text).ids
        assert ours.encode(text) == want, text
        assert ours.decode(want, False) == source.decode(want, skip_special_tokens=False)
    letters = {token: i for i, token in enumerate(tokens)}
    assert ours.encode("\r\n\r\n1st")[0] == letters["čĊčĊ"]


def test_the_template_is_rendered(file):
    ours = open_checkpoint(file).tokenizer()
    text = ours.chat.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ours.eos_token_id == 2


@pytest.mark.slow
def test_parameters_are_those_that_transformers_reads(file, smollm2, tmp_path):
    state = {name: tensor.numpy() for name, tensor in smollm2.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    spec = read_config(file, jnp.float32)
    mesh = make_mesh(None)
    check_same(load(file), load_params(HuggingFaceDirectory(tmp_path), spec, abstract_params(spec), mesh))
    halves = load_params(open_checkpoint(file), (low := read_config(file, jnp.bfloat16)), abstract_params(low), mesh)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(halves))
