"""`batch_invariant`: the same bits alone, among others, in any chunks, after prefix hits and preemptions."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, FunctionShape, SamplingParams
from jaxllm.engine import batch_invariance, kv_cache
from jaxllm.engine.batch_invariance import check_batch_invariant
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.model_shape import model_shape
from jaxllm.engine.kv_cache import check_platform
from jaxllm.models import gemma2, mixtral, opt
from jaxllm.models.layers import RMSNorm
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import gpu
from jaxllm.sharding.mesh import make_mesh
from tests.hf_models import config as hf_config
from tests.tiny import Tiny, clean, prompts_of

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
        return joined([llm.rollout([prompt], DRAWN) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def few_blocks(model):
    with LLM(model, **SIZES | {"num_blocks": 28}) as llm:
        yield llm


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 33},
        pytest.param({"max_num_seqs": 64, "max_num_batched_tokens": 128, "num_blocks": 2048}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_bits(model, alone, sizes):
    with LLM(model, **SIZES | sizes) as llm:
        copies = 8 if sizes.get("max_num_seqs") == 64 else 1
        for _ in range(2):  # the second time by the prefix cache
            for found, want in zip(bits(llm.rollout(PROMPTS * copies, DRAWN)), alone, strict=True):
                np.testing.assert_array_equal(found, np.concatenate([want] * copies))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_same_bits_after_preemption(few_blocks, alone, preemption):
    few_blocks.engine.set_preemption(preemption)
    before = few_blocks.stats()
    for _ in range(2):
        for found, want in zip(bits(few_blocks.rollout(PROMPTS, DRAWN)), alone, strict=True):
            np.testing.assert_array_equal(found, want)
    after = few_blocks.stats()
    assert after.num_preemptions > before.num_preemptions
    assert (after.num_swapped > before.num_swapped) == (preemption == "swap")
    clean(few_blocks)


def test_the_callers_module_stays_as_it_is():
    model = MODELS["float32"]()
    with LLM(model, **SIZES) as llm:
        assert llm.engine.config.batch_invariant
    norms = [node for _, node in nnx.iter_graph(model) if isinstance(node, RMSNorm)]
    assert norms and not any(norm.fixed_order for norm in norms)


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_keys_and_values_in_8_bits(kind):
    """Of one engine, whose scales are measured, and of engines of other sizes with the same scales."""
    model, found = MODELS["bfloat16"](), []
    for sizes in ({"max_num_batched_tokens": 96, "max_model_len": 96}, {"max_num_batched_tokens": 8}):
        with LLM(model, **SIZES | sizes, kv_cache_dtype=kind) as llm:
            alone = joined([llm.rollout([prompt], DRAWN) for prompt in PROMPTS])
            for _ in range(2):
                for one, want in zip(bits(llm.rollout(PROMPTS, DRAWN)), alone, strict=True):
                    np.testing.assert_array_equal(one, want)
        found.append(alone)
    if kind == "fp8":  # whose scales are 1
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.fixture
def at(monkeypatch):
    """Has the checks find a platform's device."""

    def be(platform: str) -> None:
        for module in (batch_invariance, kv_cache):
            monkeypatch.setattr(module, "platform_of", lambda mesh: platform)
        monkeypatch.setattr(Placement, "platform", property(lambda self: platform))

    return be


HEADS = "4 heads of 16 and blocks of 16 tokens, which no kernel attends to in order"


@pytest.mark.parametrize(
    ("platform", "changes", "refused"),
    [
        ("gpu", {}, None),
        ("gpu", {"head_dim": 16}, HEADS),  # smaller than a tile
        ("gpu", {"block_size": 8}, "blocks of 8 tokens"),
        ("gpu", {"capability": 75}, "no kernel attends to in order"),
        ("gpu", {"mesh": "tensor=2"}, "2 devices"),
        ("gpu", {"dtype": jnp.float16}, "float16"),
        ("gpu", {"kv_cache_dtype": "int8"}, None),
        (
            "gpu",
            {"kv_cache_dtype": "fp8", "capability": 80},
            "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9",
        ),
        ("tpu", {}, None),
        ("tpu", {"block_size": 8, "dtype": jnp.bfloat16}, "blocks of 8 tokens"),
        ("tpu", {"mesh": "tensor=2"}, "2 devices"),
        ("tpu", {"kv_cache_dtype": "int8", "block_size": 32}, None),
        ("tpu", {"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' needs blocks of at least 32 tokens"),
        ("rocm", {}, "no kernel attends to in order"),
    ],
    ids=str,
)
def test_what_accelerators_refuse(at, monkeypatch, platform, changes, refused):
    at(platform)
    monkeypatch.setattr(gpu, "compute_capability", lambda: changes.get("capability", 90))
    monkeypatch.setattr(kv_cache, "compute_capability", lambda: changes.get("capability", 90))
    model = Tiny(head_dim=changes.get("head_dim", 64), dtype=changes.get("dtype", jnp.float32)).model
    mesh = make_mesh(changes.get("mesh"))
    shape = model_shape(model.cfg, *nnx.split(model), mesh)
    sizes = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 8, "block_size": 16}
    sizes |= {name: changes[name] for name in ("block_size", "kv_cache_dtype") if name in changes}
    wanted = EngineConfig(**sizes, batch_invariant=True)

    def check() -> None:
        check_batch_invariant(shape, wanted, mesh)
        check_platform(shape, wanted, mesh, model.cfg.heads)

    if refused is None:
        return check()
    with pytest.raises(ValueError, match=re.escape(refused)):
        check()


def test_devices_whose_compiler_joins_products_and_sums(tiny, at, monkeypatch):
    """There what else XLA runs with an operation would decide over its rounding."""
    at("gpu")
    mesh = make_mesh(None)
    monkeypatch.setattr(batch_invariance, "fuses_products", lambda device: False)
    batch_invariance.check_arithmetic(mesh)
    monkeypatch.setattr(batch_invariance, "fuses_products", lambda device: True)
    with pytest.raises(ValueError, match="one operation of a product and a sum"):
        batch_invariance.check_arithmetic(mesh)


def test_what_it_is_refused_for(tiny):
    with pytest.raises(ValueError, match="2 devices"):
        LLM(tiny.model, **SIZES, mesh="tensor=2")
    with pytest.raises(ValueError, match="float16"):
        LLM(tiny.model, **SIZES, dtype="float16")
    with pytest.raises(ValueError, match="quantised weights"):
        LLM(**SIZES, quantization="int8")
    with pytest.raises(ValueError, match="experts, which share their rows out"):
        LLM(of_family(mixtral, "Mixtral"), **SIZES)
    shape = FunctionShape(vocab=96, embed=8, num_layers=1, heads=1, kv_heads=1, head_dim=8, mlp=8, max_len=64)

    def forward(params, tokens, ctx, caches):
        x, caches = params["table"][tokens], caches.copy()
        out, caches[0] = caches[0].attend(*[x[..., None, :]] * 3, scale=1.0)
        return out[..., 0, :], caches

    with pytest.raises(ValueError, match="functions"):
        LLM(forward, {"table": jnp.ones((96, 8))}, shape=shape, head=lambda p, hidden: hidden @ p["table"].T, **SIZES)
