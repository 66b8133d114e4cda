"""Of several hosts each reads what its own devices hold, holds no more, and they get what one host would give them."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from flax import nnx
from safetensors.numpy import save_file

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.fill import Filler, Filling, WeightPart
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.gguf.blocks import BLOCKS, dequantize
from jaxllm.checkpoint.loader import load_params
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import place_params
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.checkpoint.window import HostArray, HostWindow, Needed, concrete, needed, own_devices, shard_at
from jaxllm.engine.device.kv_scales import place_scales
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.weights import Weight
from jaxllm.sharding import rules
from jaxllm.sharding.expand import expansion
from jaxllm.sharding.mesh import make_mesh
from tests import hosts, mixtures
from tests.checkpoints import FUSED, HF, load, random_tensors, shapes, split_in_two, write_checkpoint, write_config
from tests.hosts import PARTITIONS, check_hosts, readers
from tests.sharding.test_expand import CASES, leaf_of


def write_distinct(folder, names):
    """A checkpoint's tensors, in which no two numbers are equal."""
    values, at = {}, 1
    for name, shape in names.items():
        values[name] = np.arange(at, at + math.prod(shape), dtype=np.float32).reshape(shape)
        at += math.prod(shape)
    assert at < 2**24
    save_file(values, folder / "model.safetensors")


def loading(folder, mesh):
    """Loads a checkpoint, and gives its arrays away by name."""
    spec = read_config(folder, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    expand_model(model, mesh)
    return lambda take: load_params(open_checkpoint(folder), spec, nnx.state(model), mesh, take=take)


def distinct_bytes(arrays):
    """Of float32 numbers in the hosts' arrays, without padding."""
    found = {number for parts in arrays.values() for part in parts.values() for number in np.unique(part).tolist()}
    return 4 * len(found - {0.0})


DENSE = {
    "plain": ("tensor=8", {"intermediate_size": 40, "num_key_value_heads": 8}),
    "repeated and padded": ("tensor=8", {"vocab_size": 27, "intermediate_size": 40}),
    "shared out": ("tensor=8", {"num_key_value_heads": 1, "intermediate_size": 40, "tie_word_embeddings": True}),
    "fused": ("tensor=8", FUSED | {"intermediate_size": 40, "num_key_value_heads": 8}),
}


@pytest.mark.parametrize("reader", ["numpy", "C++"])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("case", DENSE)
def test_no_byte_is_read_that_no_device_holds(tmp_path, case, partition, reader):
    spec, changes = DENSE[case]
    write_config(tmp_path, **changes)
    names = shapes(HF | changes)
    if changes.get("tie_word_embeddings"):
        del names["lm_head.weight"]
    write_distinct(tmp_path, names)
    split_in_two(tmp_path)
    mesh = make_mesh(spec)
    with readers(reader):
        found, whole = check_hosts(mesh, loading(tmp_path, mesh), partition)
    for host in found:
        assert host.read.total() == distinct_bytes(host.arrays)
        if case in ("plain", "fused"):
            assert host.held_bytes == host.read.total()
    replicated = sum(x.nbytes for x in whole.values() if x.sharding.is_fully_replicated)
    total = sum(host.read.total() for host in found)
    if case in ("plain", "fused"):
        assert total == sum(x.nbytes for x in whole.values()) + (len(found) - 1) * replicated


@pytest.mark.parametrize("spec", ["expert=4,tensor=2", "expert=2,tensor=4"])
@pytest.mark.parametrize(("family", "form"), [("Qwen3Moe", 0), ("Qwen3Moe", 1), ("GptOss", 0), ("Mixtral", 0)])
def test_experts_are_read_where_they_are(tmp_path, family, form, spec):
    config = mixtures.write_config(tmp_path, family, num_attention_heads=8, num_key_value_heads=8)
    table, values = mixtures.form_table(config, form), mixtures.random_values(config)
    made = mixtures.tensors_of(values, table)
    write_distinct(tmp_path, {name: value.shape for name, value in made.items()})
    mesh = make_mesh(spec)
    found, _ = check_hosts(mesh, loading(tmp_path, mesh), "halves")
    for host in found:
        assert host.read.total() == host.held_bytes == distinct_bytes(host.arrays)
    if form == 0 and family == "Qwen3Moe":
        asked = [{name for name in host.read if ".experts." in name} for host in found]
        assert asked[0] and asked[1] and not asked[0] & asked[1]


@pytest.mark.parametrize("leaf", [leaf_of(8, 2), *(leaf for leaf, count in CASES if count == 8)])
def test_any_set_of_devices(leaf):
    """Of the parts of an array a host has what each of its devices takes, which one by one need all of it."""
    mesh = make_mesh("tensor=8")
    how = expansion(leaf, mesh)
    value = jax.ShapeDtypeStruct(leaf.shape if how is None else how.shape, jnp.float32)
    variable = nnx.Param(value, axes=leaf.axes, **({} if how is None else {"expansion": how}))
    whole = np.arange(1, 1 + math.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape)
    held = whole if how is None else how.expand(whole)
    indices = rules.sharding(leaf.axes, mesh).devices_indices_map(value.shape)
    seen = set()
    for own in (set(devices) for count in range(1, 9) for devices in combinations(indices, count)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxllm.checkpoint.window.own_devices", lambda mesh, own=own: own)
            windows = [one.window for one in needed(variable, mesh)]
        host = HostArray([HostWindow(whole[box], tuple(part.start for part in box)) for box in windows])
        assert sum(window.values.size for window in host.windows) <= whole.size
        for device in own:
            box = concrete(indices[device], value.shape)
            got = shard_at(host, how, box, np.empty)
            np.testing.assert_array_equal(got, held[box])
            seen |= set(got.reshape(-1).tolist()) if len(own) == 1 else set()
    assert seen - {0.0} == set(whole.reshape(-1).tolist())
    assert own_devices(mesh) == set(mesh.devices.flat)


def test_boxes():
    def box(*ends):
        return tuple(slice(*pair) for pair in ends)

    everything = box((0, 4), (0, 6))
    wanted = Needed((4, 6), everything, [box((0, 2), (1, 3)), box((2, 3), (1, 3)), box((4, 4), (0, 6))])
    assert wanted.of(everything) == [box((0, 3), (1, 3))]
    assert wanted.of(box((2, 4), (0, 6))) == [box((2, 3), (1, 3))]
    assert wanted.of(box((3, 4), (0, 6))) == wanted.of(box((0, 4), (5, 6))) == []
    apart = [box((0, 1), (0, 6)), box((2, 3), (0, 6)), box((2, 4), (3, 6))]
    assert Needed((4, 6), everything, apart).of(everything) == [apart[0], box((2, 4), (0, 6))]


def blocks_of(rows, columns, dtype):
    block, draw = BLOCKS[dtype], np.random.default_rng(0)
    data = draw.integers(0, 256, (rows * columns // block.num_values, block.num_bytes)).astype(np.uint8)
    data[:, :2] = draw.uniform(-0.1, 0.1, len(data)).astype(np.float16)[:, None].view(np.uint8)
    return data


@pytest.mark.parametrize("reader", ["numpy", "C++"])
@pytest.mark.parametrize(
    ("start", "stop", "rows_read"),
    [(32, 96, 64), (0, 128, 128), (48, 80, 128)],
    ids=["whole blocks", "whole rows", "cut blocks"],
)
def test_blocks_of_values(tmp_path, start, stop, rows_read, reader):
    """Where a window cuts blocks whole rows are read."""
    data = blocks_of(6, 128, "Q8_0")
    (tmp_path / "w").write_bytes(data.tobytes())
    tensor = StoredTensor(tmp_path / "w", "w", "Q8_0", (6, 128), 0)
    part = WeightPart.at("w", Weight("", "d (f h) -> f h d"), (16, 8, 6), 0)
    part = part.within((slice(start // 8, stop // 8), slice(0, 8), slice(0, 6)))
    host = HostWindow(np.zeros(((stop - start) // 8, 8, 6), np.float32), (start // 8, 0, 0))
    own = part.of(tensor)
    assert own.num_bytes == 6 * rows_read // 32 * 34
    with readers(reader), ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        with hosts.count_bytes(patch) as read:
            Filler(pool).fill([Filling(host, part, own)])
    assert read.total() == own.num_bytes
    want = dequantize("Q8_0", data.reshape(-1)).reshape(6, 128)[:, start:stop]
    np.testing.assert_array_equal(host.values, rearrange(want, "d (f h) -> f h d", h=8))


@pytest.mark.parametrize("reader", ["numpy", "C++"])
def test_a_large_window_is_divided_among_threads(tmp_path, reader):
    """Rows of more than a megabyte, which lie in pieces."""
    values = np.random.default_rng(0).standard_normal((2, 700, 1000)).astype(np.float32)
    save_file({"w": values.reshape(1400, 1000)}, tmp_path / "model.safetensors")
    start = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    tensor = StoredTensor(tmp_path / "model.safetensors", "w", "F32", (1400, 1000), start)
    part = WeightPart.at("w", Weight("", "(u f) d -> d u f"), (1000, 2, 700), 0)
    part = part.within((slice(0, 1000), slice(0, 2), slice(200, 690)))
    host = HostWindow(np.zeros((1000, 2, 490), np.float32), (0, 0, 200))
    with readers(reader), ThreadPoolExecutor(2) as pool:
        Filler(pool).fill([Filling(host, part, part.of(tensor))])
    np.testing.assert_array_equal(host.values, values[:, 200:690].transpose(2, 0, 1))


def test_parameters_of_the_caller_go_to_own_devices(tmp_path, monkeypatch):
    """Each process has them whole; nothing is held against other processes' values."""
    write_checkpoint(tmp_path, vocab_size=27, intermediate_size=40)
    mesh, spec = make_mesh("tensor=8"), read_config(tmp_path, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    expand_model(model, mesh)
    given = jax.tree.map(np.asarray, nnx.to_pure_dict(load(tmp_path)))
    want = place_params(given, nnx.state(model), mesh)
    monkeypatch.setattr(rules, "_is_own", lambda sharding: False)
    put = []
    monkeypatch.setattr(jax, "device_put", lambda *args: put.append(args))
    got = place_params(given, nnx.state(model), mesh)
    scales = place_scales(
        np.float32([[1, 2]]).view(np.int32),
        [jax.ShapeDtypeStruct((2, 8), jnp.float32, sharding=rules.sharding((None, "kv_heads"), mesh))],
    )
    assert not put
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(scales[0], [[1] * 8, [2] * 8])


def test_damage_is_told_by_those_who_read_it(tmp_path):
    """Others wait for nothing while they load, and end when somebody sees that this process has."""
    write_config(tmp_path, vocab_size=32)
    tensors = random_tensors(hf=HF | {"vocab_size": 32})
    tensors["model.embed_tokens.weight"][20, 3] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    mesh = make_mesh("tensor=4")
    first, last = list(mesh.devices.flat)[:2], list(mesh.devices.flat)[2:]
    assert "embed.weight" in hosts.load_as(first, loading(tmp_path, mesh)).arrays
    with pytest.raises(ModelFormatError, match="model.embed_tokens.weight holds values that are not finite"):
        hosts.load_as(last, loading(tmp_path, mesh))
