"""Modules that train come from checkpoints and go back to them: what transformers says of both is the same."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import LLM, models
from jaxllm.checkpoint.config import read_config
from jaxllm.errors import MeshError
from jaxllm.interchange.hf_config import family_of
from jaxllm.models import gemma2, gemma3, llama, mistral, qwen2, qwen3
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec
from jaxllm.models.registry import find
from jaxllm.models.rope import Dynamic, LinearRope, Llama3, Rope, Yarn
from jaxllm.models.transformer import DecoderLayer, layers_of
from tests.hf_models import FAMILIES, checkpoint, logits
from tests.seldom import all_but
from tests.tiny import Tiny, dense_caches, greedy, ids, make_llm, tokens

TOKENS = np.random.default_rng(0).integers(2, 96, 24).tolist()


def forward(model, row=TOKENS) -> np.ndarray:
    """`[len(row), vocab]`."""

    @nnx.jit
    def run(model, row):
        ctx = StepContext.of(row)
        hidden, _ = model(row, ctx, dense_caches(model))
        return model.logits(hidden, ctx)[0]

    return np.asarray(run(model, jnp.asarray([row], jnp.int32)))


def same(got, want) -> None:
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def theirs(path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return logits(transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32"), TOKENS)


@pytest.mark.parametrize("family", all_but(("Llama", "Gemma3", "OPT", "Qwen3Moe", "GptOss"), FAMILIES))
def test_what_is_loaded_and_saved_is_what_transformers_has(tmp_path, family):
    want = logits(checkpoint(tmp_path / "in", family), TOKENS)
    model = models.load(tmp_path / "in", "float32")
    same(forward(model), want)
    models.save_hf(model, tmp_path / "out")
    same(theirs(tmp_path / "out"), want)
    read, again = (nnx.state(models.load(tmp_path / name, "float32")) for name in ("in", "out"))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(read), nnx.to_pure_dict(again))


LAYERS = layers_of((None,) * 2, Rope(theta=1e4))
LOCAL = layers_of((8, None), Rope(theta=1e4))
SIZES = dict(vocab=96, embed=32, heads=4, kv_heads=2, head_dim=16, mlp=48, max_len=96, layers=LAYERS)
LLAMA3 = Llama3(theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=16)
MADE = {
    "llama": llama.Config(**SIZES),
    "llama_tied_biases": llama.Config(**SIZES, tie_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama_llama3": llama.Config(**SIZES | {"layers": layers_of((None,) * 2, LLAMA3)}),
    "llama_linear": llama.Config(**SIZES | {"layers": layers_of((None,) * 2, LinearRope(theta=1e4, factor=2.0))}),
    "llama_dynamic": llama.Config(
        **SIZES | {"layers": layers_of((None,) * 2, Dynamic(theta=1e4, factor=2.0, original_max_len=48))}
    ),
    "llama_yarn": llama.Config(
        **SIZES | {"layers": layers_of((None,) * 2, Yarn(theta=1e4, factor=4.0, original_max_len=24))}
    ),
    "mistral": mistral.Config(**SIZES | {"layers": layers_of((8, 8), Rope(theta=500.0))}),
    "qwen2": qwen2.Config(**SIZES | {"layers": LOCAL}),
    "qwen3": qwen3.Config(**SIZES, tie_embeddings=True),
    "gemma2": gemma2.Config(**SIZES | {"layers": LOCAL}, attn_soft_cap=2.0, logit_soft_cap=4.0, query_scale=24**-0.5),
    "gemma3": gemma3.Config(**SIZES | {"layers": layers_of((8, None), Rope(theta=1e6), Rope(theta=1e4))}),
}


@pytest.mark.parametrize("name", MADE)
def test_a_model_made_from_a_config_is_saved_with_one_for_transformers(tmp_path, name):
    cfg = MADE[name]
    model = find(f"{name.split('_')[0].title()}ForCausalLM").Model(cfg, rngs=nnx.Rngs(0))
    models.save_hf(model, tmp_path / "out")
    same(theirs(tmp_path / "out"), forward(model))
    assert dataclasses.replace(read_config(tmp_path / "out", cfg.dtype).cfg, query_scale=cfg.query_scale) == cfg


def test_the_engine_serves_what_was_saved(tmp_path):
    tiny = Tiny()
    models.save_hf(tiny.model, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")) == files
    with make_llm(tmp_path / "out", skip_tokenizer_init=True) as llm:
        (output,) = tokens(llm.generate(ids(TOKENS), greedy(8)))
    tiny.assert_greedy(TOKENS, output)


def test_a_trained_model_of_a_directory_keeps_its_keys_and_tokenizer(tmp_path):
    model = models.load()

    @nnx.jit
    def step(model):
        grads = nnx.grad(lambda model: jnp.square(model.embed.weight[...]).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))

    step(model)
    models.save_hf(model, tmp_path / "out", dtype="bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and config["eos_token_id"] == 1
    with LLM(tmp_path / "out", num_blocks=64, max_num_seqs=2) as llm:
        assert llm.generate("def f(", greedy(2))[0].outputs[0].text
    models.save_hf(models.load(tmp_path / "out"), tmp_path / "again", like=tmp_path / "out")
    assert (tmp_path / "again" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("spec", "num_devices"), [("tensor=2", 2), ("tensor=4", 4), ("data=2,tensor=2", 4)])
def test_parameters_on_a_mesh_have_the_shapes_of_the_config(tmp_path, spec, num_devices):
    """Also on more devices than there are KV heads."""
    models.save_hf(Tiny(vocab=94).model, tmp_path / "out")
    one, model = (models.load(tmp_path / "out", "float32", mesh=mesh) for mesh in (None, spec))
    shapes, found = (jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(m))) for m in (one, model))
    assert found == shapes
    assert len(model.layers[0].mlp.down.weight.sharding.device_set) == num_devices
    same(forward(model), forward(one))
    models.save_hf(model, tmp_path / "again")
    same(forward(models.load(tmp_path / "again")), forward(one))


def test_parameters_lie_on_the_callers_own_mesh(tmp_path):
    models.save_hf(Tiny().model, tmp_path / "out")
    one, theirs = (
        models.load(tmp_path / "out"),
        jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2),
    )
    with jax.set_mesh(theirs):
        for axes, split in (({"data": "fsdp", "tensor": "tp"}, "tp"), ({"tensor": ("tp", "fsdp")}, ("tp", "fsdp"))):
            model = models.load(tmp_path / "out", mesh=theirs, axes=axes)
            down = model.layers[0].mlp.down.weight[...]
            assert down.sharding == NamedSharding(theirs, P(split, None))
            jax.tree.map(np.testing.assert_array_equal, *map(nnx.to_pure_dict, map(nnx.state, (model, one))))
    with pytest.raises(MeshError, match=r"axes=\{'data': \('fsdp',\), 'tensor': 'tp'\}"):
        models.load(tmp_path / "out", mesh=theirs)
    with pytest.raises(MeshError, match="mesh is a str; leave axes out"):
        models.load(tmp_path / "out", mesh="tensor=2", axes={"tensor": "tp"})


def test_importing_the_package_of_models_is_cheap():
    code = "import sys, jaxllm.models; assert not {'jax', 'flax', 'jaxllm.models.conversions'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"load", "save_hf"} <= set(dir(models))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        models.nothing  # noqa: B018


def test_what_an_engine_serves_is_saved_as_it_was(tmp_path):
    """On a mesh that repeats KV heads and pads the vocabulary."""
    tiny = Tiny(vocab=94)
    with make_llm(tiny.model, mesh="tensor=4") as llm:
        models.save_hf(llm.module, tmp_path / "out")
        with pytest.raises(TypeError, match="give a module, as LLM.module is of an LLM"):
            family_of(llm)
    read = models.load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.to_pure_dict, map(nnx.state, (read, tiny.model))))


class Mine(qwen3.Model):
    pass


def test_what_can_not_be_saved_is_refused(tmp_path):
    tiny = Tiny()
    with pytest.raises(ValueError, match="Mine is no architecture's Model"):
        models.save_hf(Mine(tiny.cfg, rngs=nnx.Rngs(0)), tmp_path / "out")
    adapted = Tiny().model
    adapted.layers[0].attn.extra = nnx.Param(jnp.zeros(2))
    with pytest.raises(ValueError, match="holds layers.0.attn.extra"):
        models.save_hf(adapted, tmp_path / "out")
    odd = Tiny(layers=(LayerSpec(rope=Rope(theta=1e4, fraction=0.5)),)).model
    with pytest.raises(ValueError, match="differs from the model .* in layers; give like="):
        models.save_hf(odd, tmp_path / "out")
    models.save_hf(tiny.model, tmp_path / "out")
    with pytest.raises(ValueError, match="not an empty directory"):
        models.save_hf(tiny.model, tmp_path / "out")
    with pytest.raises(ValueError, match=r"config\.json describes .* in mlp; give like="):
        models.save_hf(Tiny(mlp=40).model, tmp_path / "other", like=tmp_path / "out")
    with pytest.raises(ValueError, match="dtype='int8' is unknown"):
        models.save_hf(tiny.model, tmp_path / "other", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Twice(DecoderLayer):
    def __call__(self, *arguments):
        x, cache = super().__call__(*arguments)
        return 2 * x, cache


def short_window(model):
    model.layers[1].attn.window = 4


def other_scale(model):
    model.layers[0].attn.scale = 0.9


def own_layer(model):
    model.layers[0] = Twice(model.cfg, model.cfg.layers[0], rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (short_window, r"layers\.1\.attn\.window is 4 in the model, and None in what its configuration describes"),
        (other_scale, r"layers\.0\.attn\.scale is 0\.9 in the model, and 0\.25 in"),
        (own_layer, r"layers\.0 is tests.*\.Twice in the model, and jaxllm\.models\.transformer\.DecoderLayer in"),
    ],
)
@pytest.mark.parametrize("is_like", [False, True])
def test_a_model_that_is_not_as_its_configuration_says_is_refused(tmp_path, change, says, is_like):
    model = Tiny().model
    like = models.save_hf(model, tmp_path / "in") if is_like else None
    change(model)
    with pytest.raises(ValueError, match=says):
        models.save_hf(model, tmp_path / "out", like=like)
    assert not (tmp_path / "out").exists()


def test_modules_that_a_directory_describes_update_its_engine(tmp_path):
    """Also where its products have another form."""
    models.save_hf(Tiny().model, tmp_path / "in")
    model = models.load(tmp_path / "in")
    for quantization in (None, "int8"):
        with make_llm(tmp_path / "in", skip_tokenizer_init=True, quantization=quantization) as llm:
            llm.update_params(model)
            llm.update_params(models.load(tmp_path / "in", "bfloat16"))
            model.layers[1].attn.scale = 0.5
            with pytest.raises(ValueError, match="scale is 0.5 in the module given, and 0.25 in the one served"):
                llm.update_params(model)
            model.layers[1].attn.scale = 0.25


def test_what_a_lone_processor_serves_is_saved_in_the_order_that_it_was(tmp_path):
    """In panels, with fixed orders of additions."""
    tiny = Tiny()
    models.save_hf(tiny.model, tmp_path / "in")
    options = {"skip_tokenizer_init": True, "dtype": "float32", "batch_invariant": True}
    with make_llm(tmp_path / "in", **options) as llm:
        models.save_hf(llm.module, tmp_path / "out", like=tmp_path / "in")
        llm.update_params(models.load(tmp_path / "out", "bfloat16"))
    read = models.load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.to_pure_dict, map(nnx.state, (read, tiny.model))))


def test_quantised_weights_do_not_train(tmp_path):
    models.save_hf(Tiny().model, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="fp8 quantised"):
        models.load(tmp_path / "out")
