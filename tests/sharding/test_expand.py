"""What a mesh can't split as it is: how arrays are expanded for it, where they come from, and what is refused."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jaxllm.aot.prepare import find_model
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import load_params
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import canonical_params, expansion_of, named, place_params, sharding_before
from jaxllm.checkpoint.window import concrete
from jaxllm.engine import dummy
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.block_moves import host_bytes
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import model_shape
from jaxllm.errors import MeshError
from jaxllm.models import qwen3, transformer
from jaxllm.sharding import rules
from jaxllm.sharding.expand import Leaf, check_splits, expansion, padded, repeated
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import load, write_checkpoint
from tests.tiny import Tiny


def leaf_of(kv_heads, group, *, embed=3, head_dim=2):
    axes = ("embed", "kv_heads", "qkv", "head_dim")
    return Leaf(axes=axes, shape=(embed, kv_heads, group + 2, head_dim), members={"qkv": (group, 1, 1)})


def test_a_head_is_repeated_and_its_queries_shared_out():
    how = expansion(leaf_of(1, 3, embed=1, head_dim=1), make_mesh("tensor=2"))
    assert how.shape == (1, 2, 4, 1)
    x = np.array([10, 11, 12, 20, 30]).reshape(1, 1, 5, 1)
    assert how.expand(x)[0, :, :, 0].tolist() == [[10, 11, 20, 30], [12, 0, 20, 30]]
    out = Leaf(axes=("kv_heads", "group", "head_dim", "embed"), shape=(2, 2, 1, 1))
    how = expansion(out, make_mesh("tensor=4"))
    assert how.expand(np.arange(4).reshape(2, 2, 1, 1)).tolist() == np.arange(4).reshape(4, 1, 1, 1).tolist()
    scale = Leaf(axes=("kv_heads",), shape=(2,))
    assert expansion(scale, make_mesh("tensor=4")).expand(np.array([1, 2])).tolist() == [1, 1, 2, 2]
    table = Leaf(axes=("vocab", "embed"), shape=(3, 1))
    assert expansion(table, make_mesh("tensor=2")).expand(np.ones((3, 1), np.int8)).tolist() == [[1], [1], [1], [0]]


CASES = [
    *((leaf_of(k, g), n) for k, g, n in product((1, 2, 4), (2, 4, 8), (2, 4, 8)) if k < n <= k * g),
    (leaf_of(1, 7), 4),  # 2, 2, 2 and 1
    (leaf_of(2, 7), 8),
    (Leaf(axes=("kv_heads", "group", "head_dim", "embed"), shape=(2, 3, 2, 5)), 4),
    (Leaf(axes=("kv_heads", "qkv"), shape=(2, 1), members={"qkv": (1,)}), 8),
    (Leaf(axes=("kv_heads", "head_dim"), shape=(1, 3)), 4),
    (Leaf(axes=("vocab", "embed"), shape=(259, 3)), 8),
    (Leaf(axes=("embed", "vocab"), shape=(3, 9)), 8),
]


@pytest.mark.parametrize(("leaf", "count"), CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_every_part_is_that_of_the_whole_and_back_again(leaf, count, dtype):
    mesh = make_mesh(f"tensor={count}")
    assert leaf.unsplit(mesh) is None
    how, where = expansion(leaf, mesh), rules.sharding(leaf.axes, mesh)
    host = np.arange(1, 1 + np.prod(leaf.shape)).reshape(leaf.shape).astype(dtype)
    whole = how.expand(host)
    assert isinstance(whole, np.ndarray) and whole.dtype == dtype and whole.shape == how.shape
    origin = (0,) * host.ndim
    sharded = jax.make_array_from_callback(
        how.shape, where, lambda index: how.shard(host, concrete(index, how.shape), origin, np.empty)
    )
    np.testing.assert_array_equal(np.asarray(sharded), whole)
    assert sharded.addressable_shards[0].data.shape[how.dim] == how.size // count
    before = jax.device_put(host, how.canonical_sharding(leaf.axes, mesh))
    inside = jax.jit(how.expand, out_shardings=where)(before)
    np.testing.assert_array_equal(np.asarray(inside), whole)
    np.testing.assert_array_equal(np.asarray(how.contract(whole)), host)
    np.testing.assert_array_equal(np.asarray(jax.jit(how.contract)(inside)), host)


def test_no_device_has_a_whole_array_on_the_way():
    mesh = make_mesh("tensor=8")
    for leaf in (leaf_of(2, 4, embed=512, head_dim=16), Leaf(axes=("vocab", "embed"), shape=(2051, 512))):
        how = expansion(leaf, mesh)
        before, after = how.canonical_sharding(leaf.axes, mesh), rules.sharding(leaf.axes, mesh)
        assert not before.is_fully_replicated
        for fn, shape, given, wanted in (
            (how.expand, leaf.shape, before, after),
            (how.contract, how.shape, after, before),
        ):
            array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=given)
            memory = jax.jit(fn, out_shardings=wanted).lower(array).compile().memory_analysis()
            sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
            assert max(sizes) < np.prod(how.shape) * 4 / 2, sizes


@pytest.mark.parametrize(
    ("leaf", "count", "message"),
    [
        (leaf_of(4, 2), 6, "6 devices, which do not divide the 4 kv_heads of it, nor .*; .* can have 1, 2, 4, 8$"),
        (leaf_of(3, 4), 2, "2 devices, which do not divide the 3 kv_heads of it, nor .*; .* can have 1, 3$"),
        (Leaf(axes=("kv_heads", "group"), shape=(4, 1)), 8, "the 4 kv_heads of it, nor have .* can have 1, 2, 4$"),
        (Leaf(axes=("kv_heads", "group"), shape=(1, 5)), 4, "the 1 kv_heads of it, nor have .* can have 1, 2, 3, 5$"),
        (Leaf(axes=("mlp",), shape=(12,)), 8, "8 devices, which do not divide the 12 mlp of it; .* 1, 2, 3, 4, 6, 12$"),
        (Leaf(axes=("heads",), shape=(14,)), 4, "4 devices, which do not divide the 14 heads of it; .* 1, 2, 7$"),
    ],
)
def test_what_can_not_be_split_says_which_sizes_do(leaf, count, message):
    with pytest.raises(MeshError, match=message):
        check_splits({"it": leaf}, make_mesh(f"tensor={count}"))


@pytest.mark.parametrize(
    ("model", "count", "qkv", "o"),
    [
        ("qwen3-0.6b", 16, (1024, 16, 1 + 2, 128), (16, 1, 128, 1024)),  # 8 KV heads of 2 queries
        ("gemma-3-4b", 8, (2560, 8, 1 + 2, 256), (8, 1, 256, 2560)),  # 4 of 2
        ("llama-3.1-8b", 32, (4096, 32, 1 + 2, 128), (32, 1, 128, 4096)),  # 8 of 4
    ],
)
def test_published_models_on_more_devices_than_they_have_heads(model, count, qkv, o):
    spec = read_config(find_model(model), jnp.bfloat16)
    abstract = transformer.abstract(spec.module.Model, spec.cfg)
    assert expand_model(abstract, AbstractMesh((count,), ("tensor",)))
    attn = abstract.layers[-1].attn
    assert (attn.qkv.weight.shape, attn.o.weight.shape) == (qkv, o)
    assert tuple(attn.qkv.shape.weight_axes.values()) == qkv and attn.qkv.shape.slice_of("v") == slice(2, 3)
    assert tuple(attn.o.shape.weight_axes.values()) == o
    with pytest.raises(MeshError, match=r"do not divide the \d kv_heads of .*, nor .* can have 1, 2, 4"):
        expand_model(transformer.abstract(spec.module.Model, spec.cfg), AbstractMesh((128,), ("tensor",)))


def test_the_pool_and_its_bounds_count_what_the_mesh_holds():
    sizes = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)
    tiny, blocks, state = Tiny(kv_heads=2, heads=8, vocab=97), {}, {}
    for name in ("tensor=1", "tensor=2", "tensor=8"):
        mesh, model = make_mesh(name), transformer.abstract(qwen3.Model, tiny.cfg)
        expand_model(model, mesh)
        shape = model_shape(tiny.cfg, *nnx.split(model), mesh)
        assert (shape.vocab, shape.logits_width) == (97, padded(97, mesh))
        blocks[name] = memory.block_bytes(shape, sizes, mesh) - 4 * 4  # of KV, on each device
        state[name] = host_bytes(Lowering(shape, sizes, mesh).state().pools) - 4 * 4  # swapped, of all devices
    assert blocks["tensor=1"] == 2 * blocks["tensor=2"] == 2 * blocks["tensor=8"]
    assert state["tensor=8"] == 4 * state["tensor=2"] == 4 * state["tensor=1"]


def test_sizes_of_a_mesh():
    mesh = make_mesh("data=1,tensor=8")
    assert [repeated(n, mesh) for n in (1, 4, 8, 16)] == [8, 8, 8, 16]
    assert [padded(n, mesh) for n in (1, 8, 259)] == [8, 8, 264]


def on_mesh(model_cls, cfg, mesh):
    """The abstract parameters, and whether some are expanded."""
    model = transformer.abstract(model_cls, cfg)
    changed = expand_model(model, mesh)
    return nnx.state(model, nnx.Param), changed


def arrays(params):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def test_a_checkpoint_and_arrays_make_the_same_parameters(tmp_path):
    write_checkpoint(tmp_path, vocab_size=27, intermediate_size=24)  # 8 heads, 4 KV heads
    spec, mesh = read_config(tmp_path, jnp.float32), make_mesh("tensor=8")
    abstract, changed = on_mesh(spec.module.Model, spec.cfg, mesh)
    whole = load(tmp_path)
    loaded = load_params(open_checkpoint(tmp_path), spec, abstract, mesh)
    given = {
        "host": jax.tree.map(np.asarray, nnx.to_pure_dict(whole)),
        "one device": whole,
        "mesh": canonical_params(loaded, mesh),
        "other devices": jax.device_put(whole, jax.devices()[3]),
    }
    for params in given.values():
        placed = place_params(params, abstract, mesh)
        assert jax.tree.structure(placed) == jax.tree.structure(loaded)
        for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(loaded), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    attn = loaded["layers"][1]["attn"]
    shards = {name: attn[name]["weight"].get_value().addressable_shards[0].data.shape for name in ("qkv", "o")}
    assert changed and shards == {"qkv": (16, 1, 3, 4), "o": (1, 1, 4, 16)}
    assert (
        loaded["embed"]["weight"].get_value().shape == loaded["lm_head"]["weight"].get_value().shape[::-1] == (32, 16)
    )
    back = canonical_params(loaded, mesh)
    assert jax.tree.structure(back) == jax.tree.structure(whole)
    for a, b in zip(arrays(back), arrays(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, variable in named(back).items():
        assert variable.get_value().sharding == sharding_before(named(loaded)[name], mesh)


def test_only_what_is_expanded_is_copied():
    tiny, mesh = Tiny(kv_heads=2, vocab=97), make_mesh("tensor=4")
    abstract, _ = on_mesh(qwen3.Model, tiny.cfg, mesh)
    first = place_params(nnx.state(tiny.model, nnx.Param), abstract, mesh)
    again = named(place_params(canonical_params(first, mesh), abstract, mesh))
    for name, variable in named(first).items():
        (a, *_), (b, *_) = (v.get_value().addressable_shards for v in (variable, again[name]))
        is_shared = a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()
        assert is_shared == (expansion_of(variable) is None), name
    copied = {name.split(".")[-2] for name, variable in named(first).items() if expansion_of(variable) is not None}
    assert copied == {"embed", "lm_head", "qkv", "o"}


def test_nothing_is_expanded_where_everything_divides():
    for mesh in ("tensor=1", "tensor=4"):
        tiny = Tiny(kv_heads=4)
        plain = transformer.abstract(qwen3.Model, tiny.cfg)
        same = transformer.abstract(qwen3.Model, tiny.cfg)
        assert not expand_model(same, make_mesh(mesh))
        assert nnx.graphdef(same) == nnx.graphdef(plain)
        assert jax.tree.structure(nnx.state(same)) == jax.tree.structure(nnx.state(plain))


def test_parameters_of_the_expanded_shape_are_refused():
    tiny, mesh = Tiny(kv_heads=2, vocab=97), make_mesh("tensor=4")
    abstract, _ = on_mesh(qwen3.Model, tiny.cfg, mesh)
    placed = place_params(nnx.state(tiny.model, nnx.Param), abstract, mesh)
    with pytest.raises(
        ValueError, match=r"embed.weight has shape \(100, 32\), but the model's config wants \(97, 32\)"
    ):
        place_params(placed, abstract, mesh)


def test_dummy_parameters_are_canonical(tmp_path):
    write_checkpoint(tmp_path, vocab_size=27, intermediate_size=24)
    one, eight = (dummy.dummy_model(tmp_path, "float32", make_mesh(mesh))[1] for mesh in (None, "tensor=8"))
    for a, b in zip(arrays(one), arrays(eight), strict=True):
        np.testing.assert_array_equal(a, b)
