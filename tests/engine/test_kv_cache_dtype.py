"""Keys and values in 8 bits: engines of every kind of layer beside the same layers over whole sequences, whose keys and
values numpy rounds with the same scales."""

import io
import json
import logging
from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM
from jaxllm.cli.common import add_engine_arguments, engine_kwargs
from jaxllm.cli.main import main
from jaxllm.cli.parser import CommandParser
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import kv_scales, memory
from jaxllm.engine.device.command_log import CommandLog
from jaxllm.engine.device.model_shape import model_shape
from jaxllm.engine.kv_cache import check_kv_dtype, check_platform
from jaxllm.engine.model_source import Reading, model_source
from jaxllm.engine.replay import replay
from jaxllm.engine.sizing import size_engine
from jaxllm.errors import ModelFormatError
from jaxllm.from_vllm.dtypes import kv_dtype_name
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.models.state_cache import DenseState
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.sampling_params import SamplingParams
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import HF, rewrite, write_checkpoint
from tests.engine.test_quantised import WORDS
from tests.models.toy_caches import FULL, LARGE, RECURRENT, TWICE, window
from tests.tiny import MAX_LEN, TIE, Tiny, clean, greedy, ids, make_llm, prompts_of, tokens

DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = {"int8": 127, "fp8": 448}
LENGTHS = (1, 3, 9, 30, 50)


class Numpy:
    """Attention to keys and values that numpy has rounded."""

    def __init__(self, scales, kind: str):
        self.scales, self.kind = np.asarray(scales), kind

    def attend(self, q, k, v, **options):
        k, v = (self.round(np.asarray(x), scale) for x, scale in zip((k, v), self.scales, strict=True))
        return Dense().attend(q, jnp.asarray(k), jnp.asarray(v), **options)[0], self

    def round(self, x, scale):
        x, scale = x.astype(np.float32) / scale[:, None], scale[:, None]
        most = LARGEST[self.kind]
        codes = np.clip(np.rint(x) if self.kind == "int8" else x, -most, most).astype(DTYPES[self.kind])
        return codes.astype(np.float32) * scale


class Oracle:
    """A model over whole sequences, with the scales of an engine."""

    def __init__(self, tiny: Tiny, llm: LLM, kind: str):
        self.model, self.scales, self.kind = tiny.model, llm.engine.runner.executor.kv_scales, kind

    def caches(self):
        left = iter(self.scales)
        each = [
            [DenseState() if spec.is_state else Numpy(next(left), self.kind) for spec in of_layer]
            for of_layer in self.model.cache_specs()
        ]
        return [layer if len(layer) > 1 else layer[0] for layer in each]

    def assert_greedy(self, prompt, output) -> None:
        given = jnp.zeros((1, MAX_LEN), jnp.int32).at[0, : len(prompt) + len(output)].set(jnp.array([*prompt, *output]))
        ctx = StepContext.of(given)
        hidden, _ = self.model(given, ctx, self.caches())
        logits = np.asarray(self.model.logits(hidden, ctx)[0])[len(prompt) - 1 :][: len(output)]
        lost = logits.max(axis=-1) - logits[np.arange(len(output)), list(output)]
        assert lost.max() <= 5 * TIE * np.abs(logits).max(), f"token {lost.argmax()} is not the best by {lost.max()}"


@pytest.fixture(scope="module", params=["int8", "fp8"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def llm(tiny, kind):
    with make_llm(tiny.model, kv_cache_dtype=kind) as llm:
        yield llm


def test_tokens_are_the_same_in_a_batch_alone_after_a_hit_and_preempted(tiny, llm, kind):
    """And are those of rounded keys and values; prompts come in chunks. Nothing compiles meanwhile."""
    llm.wait_compiled()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    prompts = prompts_of(LENGTHS)
    expected = tokens(llm.generate(ids(*prompts), greedy(30)))
    hits = llm.generate(ids(*prompts), greedy(30))
    assert hits[-1].num_cached_tokens >= 48 and tokens(hits) == expected
    llm.engine.scheduler.pool.forget_keys()
    assert [tokens(llm.generate(ids(prompt), greedy(30)))[0] for prompt in prompts] == expected
    many, swapped = prompts_of([20] * 8, seed=3), llm.stats().num_swapped
    calm = [tokens(llm.generate(ids(prompt), greedy(40)))[0] for prompt in many]
    for preemption in ("swap", "recompute"):
        before = llm.stats().num_preemptions
        llm.engine.set_preemption(preemption)
        assert tokens(llm.generate(ids(*many), greedy(40))) == calm
        assert llm.stats().num_preemptions > before
    assert llm.stats().num_swapped > swapped
    llm.engine.set_preemption("auto")
    llm.generate(ids(*prompts), SamplingParams(beam_width=3, max_tokens=6))
    assert compiled == []
    oracle = Oracle(tiny, llm, kind)
    for prompt, output in zip([*prompts, *many[:2]], [*expected, *calm[:2]], strict=True):
        oracle.assert_greedy(prompt, output)
    clean(llm)


def test_beams_are_those_of_a_search_alone(llm):
    prompts, beams = prompts_of([3, 17, 30]), SamplingParams(beam_width=3, max_tokens=8)
    together = llm.generate(ids(*prompts), beams)
    llm.engine.scheduler.pool.forget_keys()
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(ids(prompt), beams)
        assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in output.outputs]
    clean(llm)


LAYERS = {
    "windows": (window(6), FULL, window(6), FULL),
    "windows and recurrences": (LARGE, window(6), FULL, RECURRENT),
    "two caches a layer": (TWICE, FULL, TWICE),
}


def test_windows_soft_caps_and_recurrences():
    """States lie in pages of 8-bit numbers too, to the bit."""
    check_layers(Tiny(layers=LAYERS["windows and recurrences"], attn_soft_cap=2.0), "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("layers", LAYERS)
def test_every_kind_of_layer(layers, kind):
    check_layers(Tiny(layers=LAYERS[layers]), kind, calculate_kv_scales=True)


@pytest.mark.parametrize(("devices", "kind"), [(2, "int8"), pytest.param(4, "fp8", marks=pytest.mark.slow)])
def test_devices(tiny, devices, kind):
    """Four hold the two KV heads twice."""
    check_layers(tiny, kind, mesh=f"tensor={devices}", calculate_kv_scales=True)


def check_layers(tiny, kind, **options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "num_blocks": 48}
    with make_llm(tiny.model, kv_cache_dtype=kind, **sizes, **options) as llm:
        scales = llm.engine.runner.executor.kv_scales
        own = tiny.cfg.kv_heads
        oracle = Oracle(tiny, llm, kind)
        oracle.scales = [np.asarray(x)[:, :: x.shape[1] // own] for x in scales]  # repeated heads are side by side
        prompts = prompts_of((1, 9, 50))
        for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(20))), strict=True):
            oracle.assert_greedy(prompt, output)
        clean(llm)


def test_what_is_measured(tiny):
    """The largest of each head, and a margin; anew with other parameters."""
    with make_llm(tiny.model, kv_cache_dtype="int8") as llm:
        given = kv_scales.measured_tokens(llm.engine.config, tiny.cfg.vocab, None)
        found = [np.zeros((2, 2)), np.zeros((2, 2))]

        class Noting(Numpy):
            def round(self, x, scale):
                self.seen = [*getattr(self, "seen", ()), np.abs(x).max((0, 1, 3))]
                return x

        caches = [Noting(scale, "int8") for scale in found]
        tiny.model(jnp.asarray(given), StepContext.of(jnp.asarray(given)), caches)
        scales = llm.engine.runner.executor.kv_scales
        for scale, cache in zip(scales, caches, strict=True):
            np.testing.assert_allclose(scale, np.stack(cache.seen) * kv_scales.MARGIN / 127, rtol=1e-5)
        before = [np.asarray(scale) for scale in scales]
        graph, params = nnx.split(tiny.model)
        other = jax.tree.map(lambda x: x + 0, params)
        for layer in other["layers"].values():
            layer["attn"]["qkv"]["weight"].set_value(layer["attn"]["qkv"]["weight"].get_value() * 3)
        llm.update_params(other)
        scales = llm.engine.runner.executor.kv_scales
        assert float(scales[0][1, 0]) == pytest.approx(3 * before[0][1, 0], rel=1e-5)  # keys are normalised after
        assert float(scales[0][0, 0]) == pytest.approx(before[0][0, 0], rel=1e-5)
        llm.update_params(params)
        expected = tokens(llm.generate(ids([1, 2, 3]), greedy(8)))
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm.generate(ids([1, 2, 3]), greedy(8))) == expected
        for scale, old in zip(llm.engine.runner.executor.kv_scales, before, strict=True):
            np.testing.assert_array_equal(scale, old)


def test_what_is_not_finite_when_it_is_measured_fails_each_request():
    """Rather than be served with scales that fit nothing."""
    tiny = Tiny()
    qkv = tiny.model.layers[1].attn.qkv.weight
    qkv.set_value(qkv[...].at[0, 0, -1, 0].set(jnp.inf))  # a value's
    with make_llm(tiny.model, kv_cache_dtype="int8", max_num_seqs=2, max_num_batched_tokens=8) as llm:
        assert not np.isfinite(np.asarray(llm.engine.runner.executor.kv_scales[1][1])).all()
        (out,) = llm.generate(ids([1, 2, 3]), greedy(4))
        assert out.outputs[0].finish_reason == "error"


def test_models_in_bfloat16_are_measured():
    mesh, half = make_mesh(None), Tiny(dtype=jnp.bfloat16, attn_soft_cap=3.0)
    graph, params = nnx.split(half.model)
    shape, given = model_shape(half.cfg, graph, params, mesh), jnp.ones((2, 8), jnp.int32)
    found = kv_scales.measure(
        jax.tree.leaves(params), given, model_shape=shape, dtype=jnp.int8, placement=Placement(mesh)
    )
    assert [(scale.shape, scale.dtype) for scale in found] == [((2, 2), jnp.float32)] * 2


def test_bytes_are_those_of_the_pool(tiny, llm, kind):
    executor, config = llm.engine.runner.executor, llm.engine.config
    llm.generate(ids([1]), greedy(1))
    pools = executor.state.kv_pools
    assert {pool.dtype for pool in pools} == {jnp.dtype(DTYPES[kind])}
    ids_bytes = 4 * config.block_size
    assert executor.page_bytes == sum(pool[0].nbytes for pool in pools) + ids_bytes  # of blocks that are swapped
    mesh, plain = make_mesh(None), replace(config, kv_cache_dtype="auto", measures_kv_scales=False)
    shape = model_shape(tiny.cfg, *nnx.split(tiny.model), mesh)
    small, large = (memory.block_bytes(shape, each, mesh) - ids_bytes for each in (config, plain))
    assert 4 * small == large
    counts = [memory.num_blocks(shape, each, 100_000, mesh) for each in (config, plain)]
    assert counts[0] > 2.5 * counts[1]
    assert llm.vllm_config.cache_config.cache_dtype == kind


def test_arrays_that_a_gpu_can_not_count_are_left_out(tiny, monkeypatch, caplog):
    mesh, sizes = make_mesh(None), {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32}
    shape = model_shape(tiny.cfg, *nnx.split(tiny.model), mesh)
    wanted = EngineConfig(max_model_len=64, num_blocks=2**30, kv_cache_dtype="fp8", **sizes)
    each = 2 * 2 * 32 * 16  # bytes of a block in a layer's array
    many, few = 3 * 2**30 // each, 2**31 // each
    monkeypatch.setattr(memory, "platform_of", lambda mesh: "gpu")
    assert memory.countable(shape, wanted, many, mesh) == few
    assert "the KV pool has" in caplog.text
    for fine in (few, 2**32 // each + 1):
        assert memory.countable(shape, wanted, fine, mesh) == fine
    with pytest.raises(
        ValueError, match=f"num_blocks={many} .*: give at most {few} blocks, or more than {2**32 // each}"
    ):
        size_engine(shape, wanted, mesh, many, None, explicit_len=True)
    plain = replace(wanted, kv_cache_dtype="auto")
    assert memory.countable(shape, plain, many, mesh) == many


SCALED = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
SPELLINGS = {
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", {"kv_cache_quant_algo": "FP8"}),
    "compressed-tensors": (
        *("self_attn.k_scale", "self_attn.v_scale"),
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}},
    ),
}
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 16, "block_size": 8, "max_model_len": 64}


def scaled_checkpoint(folder, spelling: str, damage=()):
    """Of FP8 products, with scales of the KV cache; `damage` replaces or (None) drops tensors."""
    key, value, extra = SPELLINGS[spelling]
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", **extra}
    write_checkpoint(folder, quantization_config=config, **SCALED)
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    changes = {}
    for i in range(HF["num_hidden_layers"]):
        name, shape = f"model.layers.{i}.mlp.up_proj.weight", (SCALED["intermediate_size"], SCALED["hidden_size"])
        changes |= {name: np.ones(shape, jnp.float8_e4m3fn), f"{name}_scale": np.full((), 0.01, np.float32)}
        changes |= {f"model.layers.{i}.{part}": np.full((), 0.02 + 0.01 * i, np.float32) for part in (key, value)}
    rewrite(folder, changes | dict(damage))
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_of_a_checkpoint(tmp_path, spelling, caplog):
    folder = scaled_checkpoint(tmp_path, spelling)
    caplog.set_level(logging.INFO)
    with LLM(folder, kv_cache_dtype="fp8", dtype="float32", **SIZES) as llm:
        scales = llm.engine.runner.executor.kv_scales
        assert [np.unique(scale).tolist() for scale in scales] == [[np.float32(0.02)], [np.float32(0.03)]]
        assert "with scales that are the checkpoint's" in caplog.text
        assert "measure_kv_scales" not in llm.engine.runner.compile_plan.names
        before = [np.asarray(scale) for scale in scales]
        llm.update_params(llm.params)
        for scale, old in zip(llm.engine.runner.executor.kv_scales, before, strict=True):
            np.testing.assert_array_equal(scale, old)
    with LLM(folder, kv_cache_dtype="int8", dtype="float32", **SIZES) as llm:  # they are of fp8
        assert llm.engine.config.measures_kv_scales
    with LLM(folder, dtype="float32", **SIZES) as llm:
        assert llm.engine.config.kv_cache_dtype == "auto" and not llm.engine.runner.executor.kv_scales


def test_a_checkpoint_of_dense_weights_may_bring_scales(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    write_checkpoint(tmp_path, quantization_config=config)
    names = [f"model.layers.{i}.self_attn.{which}_scale" for i in range(2) for which in "kv"]
    rewrite(tmp_path, {name: np.full((1,), 0.02, np.float32) for name in names})
    source = model_source(str(tmp_path), "float32", "cpu", None, Reading(skip_tokenizer_init=True))
    assert source.kv_scales("fp8") == [(pytest.approx(0.02), pytest.approx(0.02))] * 2
    assert source.kv_scales("int8") is None
    source.place(nnx.split(source.model)[1], make_mesh(None))
    rewrite(tmp_path, dict.fromkeys(names))
    with pytest.raises(ModelFormatError, match="it says compressed-tensors, but no weight is quantised"):
        model_source(str(tmp_path), "float32", "cpu", None, Reading(skip_tokenizer_init=True))


def test_damaged_scales_are_refused_by_name(tmp_path):
    name = "model.layers.1.self_attn.k_proj.k_scale"
    folder = scaled_checkpoint(tmp_path, "modelopt", {name: np.full((), -1.0, np.float32)})
    with pytest.raises(ModelFormatError, match=f"{name} is -1; a scale must be positive and finite"):
        LLM(folder, kv_cache_dtype="fp8", dtype="float32", **SIZES)
    scaled_checkpoint(folder, "modelopt", {name: None, "model.layers.1.self_attn.v_proj.v_scale": None})
    with pytest.raises(ModelFormatError, match=r"scales of cached keys and values, but layers \[1\] have none"):
        LLM(folder, kv_cache_dtype="fp8", dtype="float32", **SIZES)


def test_names():
    assert kv_dtype_name("fp8_e4m3") == kv_dtype_name(jnp.float8_e4m3fn) == "fp8"
    assert kv_dtype_name(None) == kv_dtype_name("auto") == "auto"
    assert check_kv_dtype(kv_dtype_name("half"), jnp.float16) == check_kv_dtype("bfloat16", jnp.bfloat16) == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' has two bits of mantissa; give 'fp8'"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "has a scale for each token; a head has one: give 'int8'"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4' is not supported; give 'int8' or 'fp8', or leave it"),
        ({"kv_cache_dtype": "bfloat16"}, "'bfloat16' is not the model's dtype, which is float32"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales is for kv_cache_dtype='fp8' or 'int8'"),
    ],
)
def test_wrong_wishes(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny.model, **SIZES, **options)


def test_the_commands(capsys):
    assert main(["generate", "hi", "--kv-cache-dtype", "int8_per_token_head"]) == 2
    assert "kv_cache_dtype='int8_per_token_head' has a scale for each token" in capsys.readouterr().err
    for words in (["--kv-cache-dtype", "fp8", "--calculate-kv-scales"], ["--no-calculate-kv-scales"]):
        parser = CommandParser("jaxllm serve")
        add_engine_arguments(parser)
        given = engine_kwargs(parser.parse_args(words))
        assert given == (
            {"kv_cache_dtype": "fp8", "calculate_kv_scales": True} if words[1:] else {"calculate_kv_scales": False}
        )


def test_models_and_platforms_without(monkeypatch):
    recurrent = Tiny(layers=(RECURRENT, RECURRENT))
    with pytest.raises(ValueError, match="kv_cache_dtype='int8': the model caches no keys and values; leave it out"):
        LLM(recurrent.model, kv_cache_dtype="int8", **SIZES)
    mesh, tiny = make_mesh(None), Tiny(head_dim=64, dtype=jnp.bfloat16)
    shape = model_shape(tiny.cfg, *nnx.split(tiny.model), mesh)
    config = EngineConfig(**SIZES, kv_cache_dtype="fp8")
    for name in ("jaxllm.engine.kv_cache", "jaxllm.models.cache_spec"):
        monkeypatch.setattr(f"{name}.platform_of", lambda mesh: "gpu", raising=False)
    monkeypatch.setattr("jaxllm.pallas_kernels.dispatch.Placement.platform", "gpu")
    for module in ("jaxllm.engine.kv_cache", "jaxllm.pallas_kernels.paged_attention.gpu"):
        monkeypatch.setattr(f"{module}.compute_capability", lambda: 80)
    wide = replace(config, block_size=32)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' needs a GPU .* an A100 reads no float8; give 'int8'"):
        check_platform(shape, wide, mesh, 4)
    check_platform(shape, replace(wide, kv_cache_dtype="int8"), mesh, 4)
    monkeypatch.setattr("jaxllm.engine.kv_cache.platform_of", lambda mesh: "tpu")
    monkeypatch.setattr("jaxllm.pallas_kernels.dispatch.Placement.platform", "tpu")
    with pytest.raises(ValueError, match="needs blocks of at least 32 tokens on a TPU, not block_size=16; give"):
        check_platform(shape, replace(config, block_size=16), mesh, 4)


def test_a_recording_has_its_scales(tmp_path):
    folder = scaled_checkpoint(tmp_path, "modelopt")
    for kind, command in (("fp8", "kv_scales"), ("int8", "measure_kv_scales")):
        path = tmp_path / f"{kind}.commands"
        with LLM(folder, kv_cache_dtype=kind, dtype="float32", record=path, **SIZES) as llm:
            llm.generate(ids([1, 2, 3]), greedy(6))
        data = path.read_bytes()
        frames = list(CommandLog(io.BytesIO(data)).frames())
        assert command in {each.kind for frame in frames for each in getattr(frame, "commands", ())}
        report = replay(io.BytesIO(data))
        assert report.is_equal and report.compared, report
