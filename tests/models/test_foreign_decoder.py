"""A decoder that the package does not know: registered, loaded from a directory, served, and refused when it lies."""

import importlib
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxllm import LLM
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.models import registry
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import HF
from tests.tiny import NoText, Tiny, greedy, ids, make_llm, prompts_of, tokens

PROMPTS = prompts_of([1, 7, 20], vocab=24)


@pytest.fixture
def decoder():
    """Imported no sooner: collecting tests registers nothing."""
    return importlib.import_module("tests.models.parallel_decoder")


class Loaded(Tiny):
    def __init__(self, directory, model_cls):
        spec = read_config(directory, jnp.float32)
        self.cfg = spec.cfg
        self.model = model_cls(spec.cfg, rngs=nnx.Rngs(params=0))
        nnx.update(self.model, load_params(open_checkpoint(directory), spec, abstract_params(spec), make_mesh(None)))


@pytest.fixture
def directory(tmp_path):
    sizes = HF | {"architectures": ["ParallelForCausalLM"], "max_position_embeddings": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    d, f, h = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"] * h, sizes["num_key_value_heads"] * h
    layer = {
        "attn.q_proj": (heads, d),
        "attn.k_proj": (kv_heads, d),
        "attn.v_proj": (kv_heads, d),
        "attn.o_proj": (d, heads),
        "norm": (d,),
        "fc_in": (f, d),
        "fc_out": (d, f),
    }
    shapes = {f"h.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"wte": (24, d), "norm": (d,), "lm_head": (24, d)}
    rng = np.random.default_rng(0)
    save_file(
        {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


def test_a_registered_decoder_is_served_from_its_directory(directory, decoder):
    expected = Loaded(directory, decoder.Model)
    assert np.ptp(expected.model.layers[1].mlp.up.weight[...]) > 1  # the file's, not the initial ones
    with make_llm(directory, tokenizer=NoText(), max_num_seqs=4, max_num_batched_tokens=8) as llm:
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(8))), strict=True):
            expected.assert_greedy(prompt, output)
    with make_llm((expected.cfg, nnx.state(expected.model)), max_num_seqs=4, max_num_batched_tokens=8) as llm:
        expected.assert_greedy(PROMPTS[2], tokens(llm.generate(ids(PROMPTS[2]), greedy(8)))[0])


def test_what_is_no_architecture_is_refused(directory, decoder, monkeypatch):
    monkeypatch.setattr(registry, "ARCHITECTURES", registry.ARCHITECTURES.copy())
    half = types.ModuleType("half")
    half.Config = object
    with pytest.raises(TypeError, match="half has no Model, WEIGHTS, which an architecture needs"):
        registry.register("Half", half)
    with pytest.raises(ValueError, match="LlamaForCausalLM is known already: llama; take another name"):
        registry.register("LlamaForCausalLM", decoder)
    registry.register("ParallelForCausalLM", decoder)  # once more is nothing new
    del registry.ARCHITECTURES["ParallelForCausalLM"]
    with pytest.raises(ValueError, match="'ParallelForCausalLM'.* is not supported; supported"):
        LLM(directory, tokenizer=NoText())
