"""`batch_invariant`: the same bits alone, among others, in any chunks, after prefix hits and preemptions."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, FunctionShape, SamplingParams
from jaxllm.engine import batch_invariance
from jaxllm.models import gemma2, opt
from jaxllm.models.layers import RMSNorm
from jaxllm.pallas_kernels import native
from tests.hf_models import config as hf_config
from tests.tiny import Tiny, prompts_of

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the C++ kernels are not built")

PROMPTS = prompts_of((1, 9, 17, 33, 47, 60, 5, 26), seed=61)
DRAWN = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, logprobs=0, seed=5)
SIZES = dict(max_num_seqs=8, max_num_batched_tokens=24, block_size=4, num_blocks=256, batch_invariant=True)


def of_family(module, family, **changes):
    cfg = module.Config.from_hf(hf_config(family, **changes).to_dict())
    return module.Model(cfg, rngs=nnx.Rngs(params=3))


MODELS = {
    "float32": lambda: Tiny(seed=2, embed=80).model,
    "bfloat16": lambda: Tiny(seed=2, dtype=jnp.bfloat16).model,
    "windows and soft caps": lambda: of_family(gemma2, "Gemma2", sliding_window=12),
    "layer norms": lambda: of_family(opt, "OPT"),
}


def bits(made):
    return made.tokens, made.logprobs.view(np.int32)


def joined(each):
    return [np.concatenate(arrays) for arrays in zip(*map(bits, each), strict=True)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name not in ("float32", "bfloat16") else []) for name in MODELS
    ],
)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def alone(model):
    """Each prompt by itself, without a prefix cache."""
    with LLM(model, **SIZES | {"max_num_batched_tokens": 96}, enable_prefix_caching=False) as llm:
        llm.wait_compiled()
        return joined([llm.rollout([prompt], DRAWN) for prompt in PROMPTS])


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 33},
        pytest.param({"max_num_batched_tokens": 70}, marks=pytest.mark.slow),
        {"num_blocks": 28, "preemption": "recompute"},
        {"num_blocks": 28, "preemption": "swap"},
        pytest.param({"max_num_seqs": 64, "max_num_batched_tokens": 128, "num_blocks": 2048}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_bits(model, alone, sizes):
    with LLM(model, **SIZES | sizes) as llm:
        llm.wait_compiled()
        copies = 8 if sizes.get("max_num_seqs") == 64 else 1
        for _ in range(2):  # the second time by the prefix cache
            for found, want in zip(bits(llm.rollout(PROMPTS * copies, DRAWN)), alone, strict=True):
                np.testing.assert_array_equal(found, np.concatenate([want] * copies))
        assert llm.stats().num_preemptions > 0 or "preemption" not in sizes


def test_the_callers_module_stays_as_it_is():
    model = MODELS["float32"]()
    with LLM(model, **SIZES) as llm:
        assert llm.engine.config.batch_invariant
    norms = [node for _, node in nnx.iter_graph(model) if isinstance(node, RMSNorm)]
    assert norms and not any(norm.fixed_order for norm in norms)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_it_is_refused_on_accelerators(tiny, monkeypatch, platform):
    monkeypatch.setattr(batch_invariance, "platform_of", lambda mesh: platform)
    with pytest.raises(ValueError, match=f"on a {platform.upper()} yet, whose products add up by the number of rows"):
        LLM(tiny.model, **SIZES)


def test_what_it_is_refused_for(tiny):
    with pytest.raises(ValueError, match="2 devices"):
        LLM(tiny.model, **SIZES, mesh="tensor=2")
    with pytest.raises(ValueError, match="float16"):
        LLM(tiny.model, **SIZES, dtype="float16")
    with pytest.raises(ValueError, match="quantised weights"):
        LLM(**SIZES, quantization="int8")
    shape = FunctionShape(vocab=96, embed=8, num_layers=1, heads=1, kv_heads=1, head_dim=8, mlp=8, max_len=64)

    def forward(params, tokens, ctx, caches):
        x, caches = params["table"][tokens], caches.copy()
        out, caches[0] = caches[0].attend(*[x[..., None, :]] * 3, scale=1.0)
        return out[..., 0, :], caches

    with pytest.raises(ValueError, match="functions"):
        LLM(forward, {"table": jnp.ones((96, 8))}, shape=shape, head=lambda p, hidden: hidden @ p["table"].T, **SIZES)
