"""Checkpoints and the caller's arrays onto a mesh: equal to transformers, sharded, within bounded memory."""

import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.checkpoint.placement import check_mesh, place_params
from jaxllm.errors import MeshError, ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import FUSED, HF, load, random_tensors, rewrite, split_in_two, write_checkpoint, write_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model_dir(tmp_path):
    return write_checkpoint(tmp_path)


def assert_same(got: nnx.State, want: nnx.State):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "tied", "shard_size", "dtype", "rope", "sizes"),
    [
        ("Llama", False, "1GB", "float32", LLAMA3, {}),
        ("Llama", True, "20KB", "bfloat16", None, {"num_key_value_heads": 4, "head_dim": 12}),
        ("Qwen3", False, "20KB", "float32", LINEAR, {"num_key_value_heads": 1}),
        ("Qwen3", True, "1GB", "bfloat16", None, {}),
    ],
)
def test_logits_equal_transformers(tmp_path, family, tied, shard_size, dtype, rope, sizes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf_cfg = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 56,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 128,
            "rope_parameters": rope,
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
        }
        | sizes
    )
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 48), np.int32)
    theirs = getattr(transformers, f"{family}ForCausalLM")(hf_cfg).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
            weight.copy_(weight.to(getattr(torch, dtype)))
        want = theirs(torch.tensor(tokens, dtype=torch.int64)).logits.numpy()
    theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")

    spec = read_config(tmp_path, jnp.float32)
    assert spec.eos_token_ids == (2, 3) and spec.cfg.tie_embeddings == tied
    graph = nnx.graphdef(transformer.abstract(spec.module.Model, spec.cfg))
    params = load_params(open_checkpoint(tmp_path), spec, abstract_params(spec), make_mesh(None))

    @jax.jit
    def ours(params, tokens):
        model = nnx.merge(graph, params)
        ctx = StepContext.of(tokens)
        return model.logits(model(tokens, ctx, [Dense()] * spec.cfg.num_layers)[0], ctx)

    np.testing.assert_allclose(ours(params, tokens), want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_every_stored_dtype_loads_as_every_wanted_one(model_dir, stored, wanted):
    tensors = random_tensors(stored)
    save_file(tensors, model_dir / "model.safetensors")
    params = load(model_dir, wanted)
    embed, layer = params["embed"]["weight"].get_value(), params["layers"][1]
    assert embed.dtype == wanted
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"].astype(wanted))
    up = tensors["model.layers.1.mlp.up_proj.weight"].astype(wanted)
    np.testing.assert_array_equal(layer["mlp"]["gate_up"]["weight"].get_value()[:, 1], up.T)


def test_tiles_cover_a_parameter_larger_than_one(model_dir):
    write_config(model_dir, vocab_size=40_007)
    big = np.arange(40_007 * 16, dtype=np.float32).reshape(40_007, 16)
    rewrite(model_dir, {"lm_head.weight": big, "model.embed_tokens.weight": big})
    params = load(model_dir)
    np.testing.assert_array_equal(params["lm_head"]["weight"].get_value(), big.T)
    np.testing.assert_array_equal(params["embed"]["weight"].get_value(), big)


@pytest.mark.parametrize("devices", [2, 4])
def test_sharded_load_equals_the_whole(model_dir, devices):
    whole = load(model_dir)
    split_in_two(model_dir)
    params = load(model_dir, mesh=f"tensor={devices}")
    assert_same(params, whole)
    layer = params["layers"][0]
    for var, axis in [
        (layer["attn"]["qkv"]["weight"], 1),
        (layer["attn"]["o"]["weight"], 0),
        (layer["mlp"]["gate_up"]["weight"], 2),
        (layer["mlp"]["down"]["weight"], 0),
        (params["embed"]["weight"], 0),
        (params["lm_head"]["weight"], 1),
        (params["norm"]["scale"], None),
    ]:
        array = var.get_value()
        want = tuple(size // devices if i == axis else size for i, size in enumerate(array.shape))
        assert [shard.data.shape for shard in array.addressable_shards] == [want] * devices


@pytest.mark.parametrize("mesh", [None, "tensor=2"])
def test_fused_tensors_are_taken_apart(tmp_path, mesh):
    write_checkpoint(tmp_path, **FUSED)
    tensors = random_tensors(hf=HF | FUSED)
    layer = load(tmp_path, mesh=mesh)["layers"][1]
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    q, k, v = fused[:32], fused[32:48], fused[48:]
    want = np.concatenate([q.reshape(4, 2, 4, 16), k.reshape(4, 1, 4, 16), v.reshape(4, 1, 4, 16)], axis=1)
    np.testing.assert_array_equal(layer["attn"]["qkv"]["weight"].get_value(), want.transpose(3, 0, 1, 2))
    gate_up = tensors["model.layers.1.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(
        layer["mlp"]["gate_up"]["weight"].get_value(), gate_up.reshape(2, 20, 16).transpose(2, 0, 1)
    )


@pytest.mark.parametrize("rows", [48, 63, 65, 128])
def test_a_fused_tensor_of_another_size_is_refused(tmp_path, rows):
    write_checkpoint(tmp_path, **FUSED)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rewrite(tmp_path, {name: np.ones((rows, 16), np.float32)})
    with pytest.raises(ModelFormatError, match=rf"{name} has shape \[{rows}, 16\], but config.json .* \[64, 16\]"):
        load(tmp_path)


def test_biases_must_be_those_of_the_config(model_dir):
    biases = {
        f"model.layers.{i}.self_attn.{name}_proj.bias": np.full(size, i + 0.5, np.float32)
        for i in range(2)
        for name, size in [("q", 32), ("k", 16), ("v", 16), ("o", 16)]
    }
    rewrite(model_dir, biases)
    with pytest.raises(ModelFormatError, match="unexpected model.layers.0.self_attn.k_proj.bias.* 3 more"):
        load(model_dir)
    write_config(model_dir, attention_bias=True)
    attn = load(model_dir)["layers"][1]["attn"]
    assert attn["qkv"]["bias"].get_value().shape == (4, 4, 4) and attn["o"]["bias"].get_value().shape == (16,)
    np.testing.assert_array_equal(attn["qkv"]["bias"].get_value(), 1.5)
    rewrite(model_dir, {"model.layers.1.self_attn.o_proj.bias": None})
    with pytest.raises(ModelFormatError, match="missing model.layers.1.self_attn.o_proj.bias, unexpected none"):
        load(model_dir)


def test_mesh_that_does_not_divide_is_refused_by_name(model_dir):
    write_config(model_dir, num_key_value_heads=2)
    spec = read_config(model_dir, jnp.float32)
    with pytest.raises(MeshError, match=r"'tensor' has 4 devices.*the 2 kv_heads of layers\.0\.attn\.o"):
        load_params(open_checkpoint(model_dir), spec, abstract_params(spec), make_mesh("tensor=4"))
    check_mesh(abstract_params(spec), make_mesh("tensor=2"))


def test_reports_once_and_is_quiet_without_a_terminal(model_dir, caplog, capfd):
    with caplog.at_level(logging.INFO, "jaxllm"):
        load(model_dir)
    assert len(caplog.records) == 1 and "GB/s" in caplog.text
    assert capfd.readouterr().err == ""


def test_tied_embeddings_ignore_an_lm_head_and_computed_tensors(model_dir):
    write_config(model_dir, tie_word_embeddings=True)
    rewrite(model_dir, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})
    assert "lm_head" not in load(model_dir)


MEASURE = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params, staging_bytes
from jaxllm.sharding.mesh import make_mesh

def status(key):  # ru_maxrss would begin with that of the process that started this one
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

model_dir = Path(sys.argv[1])
spec, mesh = read_config(model_dir, jax.numpy.float32), make_mesh(None)
jax.block_until_ready(jax.numpy.zeros(1))
before = status("VmRSS")
params = load_params(open_checkpoint(model_dir), spec, abstract_params(spec), mesh)
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print(status("VmHWM") - before, sum(sizes), max(sizes), staging_bytes(abstract_params(spec)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("changes", [{}, FUSED], ids=["projections", "fused"])
def test_peak_memory(tmp_path, changes):
    sizes = {"vocab_size": 24_000, "hidden_size": 1024, "num_hidden_layers": 3, "intermediate_size": 4096}
    write_checkpoint(tmp_path, **sizes, **changes, head_dim=128)
    try:
        command = [sys.executable, "-c", MEASURE, str(tmp_path)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        (tmp_path / "model.safetensors").unlink()
    rise, total, largest, stated = map(int, run.stdout.split())
    assert total > 350e6
    assert rise <= total + 2 * largest + 50e6, (rise, total, largest)
    assert rise <= total + stated and 2 * largest < stated < 2 * largest + 70e6, "what is said before it is taken"


def pure(params):
    """Nested dicts and, for the layers, a list."""
    tree = nnx.to_pure_dict(params)
    tree["layers"] = [tree["layers"][i] for i in sorted(tree["layers"])]
    return tree


def test_placed_params_are_sharded_and_keep_their_dtype(model_dir):
    whole = load(model_dir, jnp.bfloat16)
    abstract, mesh = abstract_params(read_config(model_dir, jnp.float32)), make_mesh("tensor=2")
    for params in (whole, pure(whole), jax.tree.map(np.asarray, pure(whole))):
        placed = place_params(params, abstract, mesh)
        assert_same(placed, whole)
        embed = placed["embed"]["weight"].get_value()
        assert embed.dtype == jnp.bfloat16 and embed.addressable_shards[0].data.shape == (12, 16)
    assert isinstance(abstract["embed"]["weight"].get_value(), jax.ShapeDtypeStruct)


def test_params_already_in_place_are_not_copied(model_dir):
    mesh = make_mesh("tensor=2")
    params = load(model_dir, mesh="tensor=2")
    placed = place_params(pure(params), abstract_params(read_config(model_dir, jnp.float32)), mesh)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(placed), strict=True):
        shards = zip(a.addressable_shards, b.addressable_shards, strict=True)
        assert all(x.data.unsafe_buffer_pointer() == y.data.unsafe_buffer_pointer() for x, y in shards)


def donated(array):
    array.delete()
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("embed"), r"missing embed\.weight, unexpected none; pass nnx.state"),
        (lambda tree: tree["layers"].pop(), r"missing layers\.1\.attn\.k_norm.* and 3 more, unexpected none"),
        (lambda tree: tree.update(bias=np.ones(3)), "missing none, unexpected bias"),
        (
            lambda tree: tree["embed"].update(weight=tree["embed"]["weight"].T),
            r"embed.weight has shape \(16, 24\).*wants \(24, 16\)",
        ),
        (lambda tree: tree["embed"].update(weight=np.ones((24, 16), np.int32)), "embed.weight has dtype int32"),
        (lambda tree: tree["embed"].update(weight=1.0), "embed.weight is a float"),
        (
            lambda tree: tree["embed"].update(weight=donated(tree["embed"]["weight"])),
            "embed.weight has been deleted or donated",
        ),
    ],
)
def test_params_that_do_not_fit_are_named(model_dir, change, message):
    tree = pure(load(model_dir))
    change(tree)
    with pytest.raises(ValueError, match=message):
        place_params(tree, abstract_params(read_config(model_dir, jnp.float32)), make_mesh(None))
