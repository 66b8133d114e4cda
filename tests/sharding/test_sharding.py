"""The same tokens on one device and on several, and meshes that don't fit."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxllm import LLM, SamplingParams
from jaxllm.errors import MeshError
from jaxllm.sharding.mesh import make_mesh, map_axes
from jaxllm.sharding.rules import check_divides, local_shape, partition_spec
from tests.tiny import Tiny, clean, greedy, ids, make_llm, prompts_of, tokens

PROMPTS = prompts_of([1, 5, 16, 33, 7])


@pytest.fixture(scope="module")
def wide():
    """Four KV heads, so that four devices can have one each."""
    return Tiny(kv_heads=4)


@pytest.fixture(scope="module")
def drawn():
    """Sampled tokens of the mesh that came first, then of the others."""
    return []


@pytest.mark.parametrize(
    "mesh", ["tensor=1", "tensor=4", "data=1,tensor=2", pytest.param("tensor=2", marks=pytest.mark.slow)]
)
def test_the_same_tokens_on_every_mesh(wide, drawn, mesh):
    where = {"tensor_parallel_size": 4} if mesh == "tensor=4" else {"mesh": mesh}
    with make_llm(wide.model, **where, max_num_seqs=4, max_num_batched_tokens=8) as llm:
        size = llm.engine.runner.executor.mesh.shape["tensor"]
        for _ in range(2):  # the second time with prefix hits
            for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(8))), strict=True):
                wide.assert_greedy(prompt, output)
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.01, seed=5, max_tokens=6, min_tokens=2)
        drawn.append(tokens(llm.generate(ids(*PROMPTS), params)))
        everything = SamplingParams(
            seed=6,
            max_tokens=6,
            logprobs=2,
            prompt_logprobs=1,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias={5: 2.0},
            allowed_token_ids=list(range(0, 96, 2)),
        )
        outputs = llm.generate(ids(*PROMPTS), everything)
        drawn[-1] += tokens(outputs) + [list(found) for out in outputs for found in out.prompt_logprobs[1:]]
        assert drawn[0] == drawn[-1]  # one draw for one seed, on every mesh
        pool = llm.engine.runner.executor.state.kv_pools[0]
        assert pool.sharding.shard_shape(pool.shape)[2] == 4 // size
        sharded = [leaf for leaf in llm.engine.runner.executor.leaves if not leaf.sharding.is_fully_replicated]
        assert len(sharded) >= 4 * wide.cfg.num_layers or size == 1
        clean(llm)


def test_the_callers_mesh_and_parameters_are_used_where_they_lie(wide):
    theirs = Mesh(np.array(jax.devices()[2:4]), ("model",), axis_types=(AxisType.Explicit,))
    with pytest.raises(MeshError, match=r"\['model'\] are unknown.*axes="):
        LLM(wide.model, mesh=theirs)
    mesh = map_axes(theirs, {"tensor": "model"})
    with make_llm(wide.model, mesh=mesh, max_num_seqs=1, max_num_batched_tokens=8) as llm:
        assert set(llm.engine.runner.executor.mesh.devices.flat) == set(jax.devices()[2:4])
        placed = llm.engine.runner.executor.leaves
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(3))), strict=True):
            wide.assert_greedy(prompt, output)
        llm.update_params(jax.tree.unflatten(jax.tree.structure(llm.engine.runner.executor.abstract_params), placed))
        addresses = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in placed]
        again = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in llm.engine.runner.executor.leaves]
        assert addresses == again  # no copy


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tensor=3", r"3 devices, which do not divide the 4 kv_heads of layers\.0\.attn\.\S+, nor .* have 1, 2, 4"),
        ("tensor=8", r"8 devices, which do not divide the 4 kv_heads of .*for this model it can have 1, 2, 4$"),
        ("tensor=16", r"^mesh 'tensor=16' needs 16 devices, but JAX has 8 \(cpu\).*JAX_NUM_CPU_DEVICES=16 before"),
        ("tensor", "bad mesh 'tensor': give axes and their sizes.*as in 'tensor=4'"),
        ("banana=2", "the axes are data, stage, expert, tensor, each once"),
        ("tensor=2,tensor=2", "each once"),
        ("tensor=0", "sizes, at least 1"),
        ("stage=2", "mesh axis 'stage' has 2 devices that would all do the same work.*leave it out"),
        ("data=2,stage=2", "mesh axis 'stage' has 2 devices that would all do the same work"),
        ("expert=2,tensor=2", "mesh axis 'expert' has 2 devices that would all do the same work"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_with_the_reason(wide, mesh, message):
    with pytest.raises(MeshError, match=message):
        LLM(wide.model, mesh=mesh)


def test_one_way_to_say_it():
    with pytest.raises(ValueError, match="mesh and tensor_parallel_size=2 exclude each other"):
        LLM(mesh="tensor=2", tensor_parallel_size=2)


def test_messages_speak_of_what_was_given(wide):
    with pytest.raises(MeshError, match="^tensor_parallel_size=16 needs 16 devices, but JAX has 8"):
        LLM(wide.model, tensor_parallel_size=16)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"^tensor_parallel_size={size} must be an integer"):
            LLM(wide.model, tensor_parallel_size=size)


def test_rules():
    mesh = make_mesh("data=2,tensor=2")
    assert partition_spec(("embed", "kv_heads", None), mesh) == PartitionSpec(None, "tensor", None)
    assert partition_spec(("experts",), mesh) == PartitionSpec(None)  # the mesh has no such axis
    with pytest.raises(ValueError, match="twice"):
        partition_spec(("heads", "kv_heads"), mesh)


def test_devices_that_share_experts_share_the_rest_too():
    mesh = make_mesh("tensor=2,expert=4")
    assert partition_spec(("experts", "embed", None, "mlp"), mesh) == PartitionSpec("expert", None, None, "tensor")
    assert partition_spec(("embed", None, "mlp"), mesh) == PartitionSpec(None, None, ("tensor", "expert"))
    assert partition_spec(("embed", "kv_heads"), make_mesh("expert=4")) == PartitionSpec(None, "expert")
    assert local_shape((8, 16, 2, 6), ("experts", "embed", None, "mlp"), mesh) == (2, 16, 2, 3)
    assert local_shape((8, 16), ("vocab", "embed"), mesh) == (1, 16)
    with pytest.raises(
        MeshError, match="'tensor' and 'expert' have 8 devices together, which do not divide the 12 mlp"
    ):
        check_divides("x", (12,), ("mlp",), mesh)


def test_several_axes_of_the_callers_make_one():
    theirs = jax.make_mesh((2, 1, 2), ("fsdp", "sp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    mesh = map_axes(theirs, {"tensor": ("tp",), "data": ("fsdp", "sp")})
    assert list(mesh.shape.items()) == [("data", 2), ("tensor", 2)]
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.tolist() == theirs.devices[:, 0].tolist()
    swapped = map_axes(theirs, {"data": ("tp", "fsdp")})
    assert swapped.devices.tolist() == theirs.devices[:, 0].T.ravel().tolist()


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"tensor": "model"}, "'model', which mesh has not"),
        ({"tensor": "tp", "data": "tp"}, "twice"),
        ({"tensor": "tp"}, r"leaves out \['fsdp'\]"),
        ({"model": "tp"}, "must be a dict from some of"),
        ({"tensor": 2}, r"axes\['tensor'\]=2 must be the name of an axis of mesh"),
        ({"data": ("fsdp", None)}, r"axes\['data'\]=\('fsdp', None\) must be the name"),
        ({"data": ()}, r"axes\['data'\]=\(\) must be the name"),
        ({}, "must be a dict"),
    ],
)
def test_axes_that_do_not_fit(axes, says):
    theirs = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(MeshError, match=says):
        map_axes(theirs, axes)
    with pytest.raises(MeshError, match="mesh is a str; leave axes out"):
        map_axes("tensor=2", axes)
