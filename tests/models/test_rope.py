"""Every kind of rotary embedding, in both forms of `config.json`, against transformers' own modules."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import gemma3, llama, phi3
from jaxllm.models.rope import Dynamic, LongRope, Rope, Yarn
from jaxllm.pallas_kernels.rotary import rotate
from tests.hf_models import LLAMA3, LONGROPE, YARN, config

HEAD_DIM, MAX_LEN = 16, 256
CASES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_implied_length": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    "yarn_untruncated": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0, "rope_theta": 300.0},
    "yarn_narrow": YARN | {"truncate": False, "beta_fast": 2.0, "beta_slow": 2.0},
    "yarn_amplitude": YARN | {"attention_factor": 0.7},
    "yarn_mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn_one_mscale": YARN | {"mscale": 0.707},
}


def theirs(family: str, hf, positions, layer_type=None):
    """transformers' sine and cosine `[positions, features // 2]`."""
    torch = pytest.importorskip("torch")
    package = family.lower()
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    rotary = getattr(module, f"{family}RotaryEmbedding")(hf)
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    cos, sin = rotary(torch.zeros(1), torch.tensor([positions]), **kwargs)
    pairs = cos.shape[-1] // 2
    return sin[0, :, :pairs].numpy(), cos[0, :, :pairs].numpy()


def assert_equal(rope: Rope, want, positions, head_dim: int, max_len: int = MAX_LEN):
    for got, expected in zip(rope.sin_cos(jnp.asarray(positions), head_dim, max_len), want, strict=True):
        np.testing.assert_allclose(got[:, 0], expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("flat", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", CASES)
def test_sine_and_cosine(case, flat):
    params = dict(CASES[case])
    given = {"rope_parameters": params}
    if flat:
        given = {"rope_theta": params.pop("rope_theta"), "rope_scaling": params}
        params["type"] = params.pop("rope_type")
    hf = config("Llama", **given)
    positions = list(range(200))
    want = theirs("Llama", hf, positions)
    written = {key: value for key, value in hf.to_dict().items() if not key.startswith("rope")} | given
    for form in (hf.to_dict(), written):
        cfg = llama.Config.from_hf(form)
        assert_equal(cfg.layers[0].rope, want, positions, HEAD_DIM)
        assert cfg.max_len == (MAX_LEN * 4 if case == "yarn_implied_length" else MAX_LEN)


def test_dynamic_is_transformers_up_to_the_original_length_and_token_by_token_beyond():
    hf = config(
        "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}, max_position_embeddings=64
    )
    cfg = llama.Config.from_hf(hf.to_dict())
    assert isinstance(cfg.layers[0].rope, Dynamic) and cfg.max_len == 3 * 64
    positions = list(range(192))
    steps = [theirs("Llama", hf, positions[:64]), *(theirs("Llama", hf, [p]) for p in positions[64:])]
    want = [np.concatenate(rows) for rows in zip(*steps, strict=True)]
    assert_equal(cfg.layers[0].rope, want, positions, HEAD_DIM, cfg.max_len)
    at_once = theirs("Llama", hf, positions)  # every token with the base of the last
    assert np.abs(at_once[0] - want[0]).max() > 0.1


@pytest.mark.parametrize("seq_len", [32, 33, 200])
@pytest.mark.parametrize("factor", [None, 2.0])
def test_longrope_chooses_by_the_longest_sequence(seq_len, factor):
    given = LONGROPE | ({} if factor is None else {"factor": factor, "attention_factor": 1.1})
    hf = config("Phi3", rope_parameters=given, original_max_position_embeddings=32)
    positions = list(range(seq_len))
    rope = phi3.Config.from_hf(hf.to_dict()).layers[0].rope
    assert_equal(rope, theirs("Phi3", hf, positions), positions, 12, max_len=seq_len)
    assert rope.inv_freq(12, 32).max() == 1.0 and rope.inv_freq(12, 33).max() == 0.5


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_names_longrope_in_several_ways(kind):
    scaling = {key: value for key, value in LONGROPE.items() if not key.startswith("rope")} | {"type": kind}
    hf = config("Phi3").to_dict() | {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 1e4}
    rope = phi3.Config.from_hf(hf).layers[0].rope
    assert isinstance(rope, LongRope) and rope.original_max_len == 4096
    assert rope.amplitude == 1.0  # 256 tokens are no extension


def test_partial_rotation():
    torch = pytest.importorskip("torch")
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    hf = config("Phi3", head_dim=16, hidden_size=64, partial_rotary_factor=0.75)
    rope = phi3.Config.from_hf(hf.to_dict()).layers[0].rope
    positions, x = list(range(40)), np.random.default_rng(0).normal(size=(40, 2, 16)).astype(np.float32)
    sin, cos = theirs("Phi3", hf, positions)
    assert sin.shape == (40, 6)
    doubled = (torch.tensor(np.concatenate([y, y], axis=-1)[None]) for y in (cos, sin))
    heads_first = torch.tensor(x.transpose(1, 0, 2)[None])
    want, _ = apply_rotary_pos_emb(heads_first, heads_first, *doubled)
    got = rotate(jnp.asarray(x), *rope.sin_cos(jnp.asarray(positions), 16, MAX_LEN))
    np.testing.assert_allclose(got, want[0].numpy().transpose(1, 0, 2), atol=1e-5)
    np.testing.assert_array_equal(got[..., 12:], x[..., 12:])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "linear", "rope_theta": 200.0, "factor": 2.0},
            }
        },
    ],
)
def test_gemma3_has_a_rope_for_each_layer_type(given):
    hf = config("Gemma3", **given)
    positions = list(range(200))
    written = {key: value for key, value in hf.to_dict().items() if not key.startswith("rope")} | given
    for form in (hf.to_dict(), written):
        cfg = gemma3.Config.from_hf(form)
        local, full = cfg.layers[0].rope, cfg.layers[2].rope
        assert_equal(full, theirs("Gemma3", hf, positions, "full_attention"), positions, HEAD_DIM)
        assert_equal(local, theirs("Gemma3", hf, positions, "sliding_attention"), positions, HEAD_DIM)
        assert [layer.rope for layer in cfg.layers] == [local, local, full, local]


def test_a_rope_made_by_hand_is_as_in_the_paper():
    assert Yarn(theta=1e4, factor=4.0, original_max_len=64).amplitude == pytest.approx(0.1 * np.log(4) + 1)
    assert Yarn(theta=1e4, factor=1.0, original_max_len=64).amplitude == 1.0
    long = LongRope(theta=1e4, short_factors=(1.0,), long_factors=(2.0,), original_max_len=16, factor=16.0)
    assert long.amplitude == pytest.approx(2**0.5)
    dynamic = Dynamic(theta=100.0, factor=2.0, original_max_len=8)
    plain = Rope(theta=100.0)
    for got, want in zip(dynamic.sin_cos(jnp.arange(8), 4, 16), plain.sin_cos(jnp.arange(8), 4, 16), strict=True):
        np.testing.assert_array_equal(got, want)
    base = 100.0 * (2 * 16 / 8 - 1) ** (4 / 2)  # at position 15
    sin, _ = dynamic.sin_cos(jnp.asarray([15]), 4, 16)
    np.testing.assert_allclose(sin[0, 0], np.sin(15 * base ** -np.asarray([0, 0.5])), rtol=1e-4)
