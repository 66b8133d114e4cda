"""What its caller sets for the rest of the program changes nothing of what an engine says."""

import copy
import multiprocessing
import pickle
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.errors import EngineDeadError
from tests.tiny import Tiny, greedy, make_llm, prompts_of, tokens

PROMPTS = prompts_of((5, 30), seed=21)  # the second takes two steps


@contextmanager
def setting(name: str, value: object) -> Iterator[None]:
    """For all threads, unlike `jax.enable_x64` and its like."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))


SETTINGS = {
    "x64": lambda: setting("jax_enable_x64", True),
    "x64 here": lambda: jax.enable_x64(True),
    "transfers": lambda: setting("jax_transfer_guard", "disallow"),
    "transfers here": lambda: jax.transfer_guard("disallow_explicit"),
    "no jit": lambda: jax.disable_jit(),
    "device": lambda: jax.default_device(jax.local_devices()[3]),
    "auto mesh": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "explicit mesh": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "leaks": lambda: jax.checking_leaks(),
    "explicit, x64, transfers": lambda: together("explicit mesh", "x64", "transfers"),
}


@contextmanager
def together(*names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        yield


WHERE = (None, "tensor=2", "mesh")
QUICK = {("explicit, x64, transfers", "mesh"), ("no jit", None), ("device", None)}  # each builds an engine


@pytest.mark.parametrize(
    ("name", "on"),
    [
        pytest.param(name, on, marks=() if (name, on) in QUICK else pytest.mark.slow, id=f"{name} on {on}")
        for name in SETTINGS
        for on in WHERE
    ],
)
def test_a_setting_changes_nothing(name, on, tiny):
    where = mesh(AxisType.Explicit) if on == "mesh" else on
    twice = jax.tree.map(lambda array: array * 2, nnx.state(tiny.model))
    said = []
    with SETTINGS[name](), make_llm(tiny.model, mesh=where) as llm:
        said = [tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False))]
        llm.update_params(twice)
        said.append(tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False)))
        llm.update_params(nnx.state(tiny.model))
        said.append(tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False)))
        (chosen,) = llm.generate(PROMPTS[:1], greedy(4, allowed_token_ids=[3, 5], logprobs=0), use_tqdm=False)
        served = llm.params
    assert said[0] == said[2] != said[1] and {3, 5} >= set(chosen.outputs[0].token_ids)
    for prompt, output in zip(PROMPTS, said[0], strict=True):
        tiny.assert_greedy(prompt, output)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(served), nnx.to_pure_dict(nnx.state(tiny.model)))


@pytest.mark.parametrize("axes", [{"tensor": "tp", "data": ("fsdp",)}, {"tensor": ("tp", "fsdp")}], ids=str)
def test_a_mesh_in_use_with_axes_of_other_names(axes):
    """In the second case its devices are in another order than those of the mesh around the call."""
    tiny, theirs = Tiny(kv_heads=4), jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)

    def split(variable: nnx.Variable, spec: P) -> nnx.Variable:
        return variable.replace(jax.device_put(variable.get_value(), NamedSharding(theirs, spec)))

    def spread(variable: nnx.Variable) -> nnx.Variable:
        return split(variable, P("fsdp") if variable.get_value().shape[0] % 2 == 0 else P())

    def as_served(variable: nnx.Variable) -> nnx.Variable:
        return split(variable, P(*("tp" if axis in ("vocab", "kv_heads", "mlp") else None for axis in variable.axes)))

    state = nnx.state(tiny.model, nnx.Param)
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    with jax.set_mesh(theirs):
        sharded, alike = (jax.tree.map(f, state, is_leaf=is_variable) for f in (spread, as_served))
        with make_llm((tiny.cfg, sharded), mesh=theirs, axes=axes) as llm:
            before = tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False))
            for prompt, output in zip(PROMPTS, before, strict=True):
                tiny.assert_greedy(prompt, output)
            llm.update_params(jax.tree.map(lambda array: array * 2, sharded))
            llm.update_params(llm.params)
            assert tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) != before
            llm.update_params(alike, in_flight="recompute")
            assert tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == before
            leaves = zip(jax.tree.leaves(alike), llm.engine.runner.executor.leaves, strict=True)
            shared = [_places(given) == _places(served) for given, served in leaves]
    assert all(shared) == ("data" in axes)  # what lies as the engine wants it is not copied


def _places(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_the_callers_device_is_the_engines(tiny):
    device = jax.local_devices()[3]
    with jax.default_device(device), make_llm(tiny.model) as llm:
        assert llm.engine.runner.executor.mesh.devices.tolist() == [device]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x64", "transfers", "explicit mesh"])
def test_sleep_under_a_setting(name, tiny):
    with SETTINGS[name](), make_llm(tiny.model) as llm:
        before = tokens(llm.generate(PROMPTS, greedy(4), use_tqdm=False))
        llm.sleep()
        llm.wake_up()
        assert tokens(llm.generate(PROMPTS, greedy(4), use_tqdm=False)) == before


def test_arrays_of_numpy_are_the_callers_to_write(tiny):
    params = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(tiny.model)))
    with make_llm((tiny.cfg, params)) as llm:
        before = tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False))
        for array in jax.tree.leaves(params):
            array[...] = 0
        llm.reset_prefix_cache()
        assert tokens(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == before


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_an_engine_can_not_be_copied(copied, llm):
    with pytest.raises(TypeError, match="Send its arguments"):
        copied(llm)


def test_a_forked_process_is_told(llm):
    """Not even a second prompt hangs there."""

    def ask(answers) -> None:
        found = []
        for _ in range(2):
            try:
                llm.generate(PROMPTS, greedy(2), use_tqdm=False)
            except EngineDeadError as error:
                found.append(str(error))
        answers.send(found)

    here, there = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's own, that it may hang
        process = multiprocessing.get_context("fork").Process(target=ask, args=(there,))
        process.start()
    assert here.poll(30), "the process hangs"
    assert [("spawn" in text) for text in here.recv()] == [True, True]
    process.join(30)
    assert process.exitcode == 0
