"""`batch_invariant` with the kernels of a GPU and of a TPU, interpreted: the same bits alone, among others, in any
chunks, after prefix hits and preemptions, and from a trainer's forward pass.

What XLA does beside them is the CPU's here; what it is on accelerators, `compile_only` looks at.
"""

import functools
import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import gemma2, token_logprobs
from jaxllm.pallas_kernels.dispatch import Placement
from tests.hf_models import config as hf_config
from tests.test_batch_invariant import bits
from tests.tiny import Tiny, prompts_of

KERNELS = {
    "gpu": ("matmul.gpu.einsum", "row_sums.gpu.row_sums", "paged_attention.gpu_in_order.ragged_paged_attention")
    + ("sampling.gpu.draw", "sampling.gpu.best"),
    "tpu": ("matmul.tpu.einsum", "row_sums.tpu.row_sums", "paged_attention.tpu.ragged_paged_attention"),
}
PROMPTS = prompts_of((15, 14, 31, 79), seed=61)  # which soon need another block each
DRAWN = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, logprobs=0, seed=5)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 23, "max_model_len": 96}
SIZES |= {"block_size": 16, "num_blocks": 7, "preemption": "swap", "batch_invariant": True}


@pytest.fixture
def on(monkeypatch):
    """Makes the kernels of a platform serve, and counts which were traced."""

    def be(platform: str) -> set[str]:
        used = set()
        for path in KERNELS[platform]:
            module, name = f"jaxllm.pallas_kernels.{path}".rsplit(".", 1)
            kernel = getattr(importlib.import_module(module), name)

            @functools.wraps(kernel)
            def interpreted(*args, kernel=kernel, path=path, **kwargs):
                used.add(path)
                return kernel(*args, interpret=True, **kwargs)

            monkeypatch.setattr(f"{module}.{name}", interpreted)
        monkeypatch.setattr(Placement, "platform", property(lambda self: self.mesh and platform))
        return used

    return be


def windowed():
    config = hf_config("Gemma2", num_hidden_layers=2, sliding_window=12, head_dim=128)
    cfg = gemma2.Config.from_hf(config.to_dict())
    return gemma2.Model(cfg, rngs=nnx.Rngs(params=3))


MODELS = {
    "float32": lambda: Tiny(seed=2, embed=80, head_dim=128).model,
    "bfloat16": lambda: Tiny(seed=2, head_dim=128, dtype=jnp.bfloat16).model,
    "windows and soft caps": windowed,
}
CASES = [("gpu", name) for name in MODELS] + [("tpu", "bfloat16"), ("tpu", "windows and soft caps")]


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "name"), CASES)
def test_the_same_bits(on, platform, name):
    used, model = on(platform), MODELS[name]()
    with LLM(model, **SIZES | {"max_num_batched_tokens": 96}, enable_prefix_caching=False) as llm:  # prompts are whole
        alone = [bits(llm.rollout([prompt], DRAWN)) for prompt in PROMPTS]
    want = [np.concatenate(arrays) for arrays in zip(*alone, strict=True)]
    with LLM(model, **SIZES) as llm:
        for _ in range(2):  # the second time by the prefix cache
            for found, expected in zip(bits(llm.rollout(PROMPTS, DRAWN)), want, strict=True):
                np.testing.assert_array_equal(found, expected)
        assert llm.stats().num_preemptions > 0
        arithmetic = llm.arithmetic
    assert used == set(KERNELS[platform])
    # Compiled, as the engine's steps are: a CPU rounds a product before it is added only where XLA runs it by itself.
    # With the TPU's kernels in bfloat16 one log-probability of sixteen is off by one unit in its last place.
    most_ulp = int((platform, name) == ("tpu", "bfloat16"))
    scores = nnx.jit(functools.partial(token_logprobs, arithmetic=arithmetic))
    for prompt, (tokens, logprobs) in zip(PROMPTS, alone, strict=True):
        text = np.concatenate([prompt, tokens.reshape(-1)])[None]
        scored = np.asarray(scores(model, text))[0, -tokens.size :]
        np.testing.assert_array_max_ulp(scored, logprobs.reshape(-1).view(np.float32), maxulp=most_ulp)
