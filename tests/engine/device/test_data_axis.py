"""Two shards of data: commands, pools and slots stacked on a leading axis, one device for each. Encoder, executor and
executables are those of one shard; only the functions are lifted over the axis."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import SamplingParams
from jaxllm.engine.build import model_shape
from jaxllm.engine.device import block_moves, executables
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.packing import AdmitLayout, SampleLayout
from jaxllm.engine.device.state import DeviceState, rules_layout
from jaxllm.pallas_kernels.dispatch import UNPLACED
from jaxllm.sharding.mesh import make_mesh
from tests.tiny import greedy, ids, make_llm, prompts_of

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_blocks=24, enable_prefix_caching=False)
SIZES["kv_cache_dtype"] = "int8"
LENGTHS = [9, 5, 14, 7]


def empty_state(lowering: Lowering) -> DeviceState:
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), lowering.state())
    slots, sampling, rules = lowering._empty_tables()
    return state._replace(slots=slots, sampling=sampling, rules=rules)


class LiftedPlan(dict):
    """In place of compiled executables: functions, lifted over the axis when they are first called."""

    def wait(self, names):
        assert all(name in self for name in names)

    def awaited(self, name):
        return self[name]


class Shards(Executor):
    """An executor whose state and commands have a leading axis of the size of `mesh`."""

    def __init__(self, lowering: Lowering, leaves, kv_scales, mesh: Mesh):
        self.mesh, self.lowering = mesh, lowering
        self.compile_plan = LiftedPlan()
        self.moves = block_moves.BlockMoves(self.compile_plan.awaited)
        self.leaves, self.kv_scales = jax.device_put((leaves, kv_scales), NamedSharding(mesh, P()))
        self._head = [self.leaves[i] for i in lowering.model_shape.head_indices]
        self.state = self._logits = self._altered = None

    def apply_to_all(self, streams: list[Command]) -> list[np.ndarray]:
        """The same command of each shard, with arrays of its own."""
        first = streams[0]
        if first.name not in self.compile_plan:
            self.compile_plan[first.name] = self._lifted(first)
        if first.kind in ("copy", "swap_out", "swap_in"):
            for ids in first.arrays:
                name = first.kind, ids.shape[-1]
                self.compile_plan[name] = self._lifted(Command(name))
        arrays = tuple(np.stack(each) for each in zip(*(command.arrays for command in streams), strict=True))
        return [np.asarray(result) for result in self.apply([first._replace(arrays=arrays)])]

    def _lifted(self, command: Command):
        fn, num_shared = self._function(command)
        if command.kind == "init":
            shards = len(self.mesh.devices)
            repeat = partial(jax.tree.map, lambda x: jnp.repeat(x[None], shards, 0))
            return jax.jit(lambda: repeat(fn()), out_shardings=NamedSharding(self.mesh, P("data")))

        def of_one(*arguments):
            own = jax.tree.map(lambda x: x[0], arguments[num_shared:])
            return jax.tree.map(lambda x: x[None], fn(*arguments[:num_shared], *own))

        def call(*arguments):
            specs = tuple(P() if i < num_shared else P("data") for i in range(len(arguments)))
            return jax.shard_map(of_one, mesh=self.mesh, in_specs=specs, out_specs=P("data"), check_vma=False)(
                *arguments
            )

        return jax.jit(call)

    def _function(self, command: Command):
        """The function of a command's executable, and how many of its arguments all shards share."""
        lowering, config = self.lowering, self.lowering.config
        size = command.name[1] if isinstance(command.name, tuple) else 0
        of_model, placed = {"model_shape": lowering.model_shape}, {"placement": UNPLACED}
        samples = {"layout": SampleLayout(size, config.max_num_seqs)}
        tables = lowering._tables
        match command.kind:
            case "init":
                state = lowering.state()
                small = lowering._empty_tables
                zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
                return lambda: zeros(state)._replace(
                    **dict(zip(("slots", "sampling", "rules"), small(), strict=True))
                ), 0
            case "step":
                sizes = {"layout": lowering.step_layout(size), "tables": tables, "caches": lowering.cache_layout}
                return partial(executables.step, **of_model, **sizes, **placed), 1
            case "admit":
                layout = AdmitLayout(size, config.max_num_seqs, tuple(table.shape for table in tables))
                return partial(executables.admit, layout=layout), 0
            case "rules":
                return partial(executables.install_rules, layout=rules_layout(lowering.model_shape.vocab)), 0
            case "sample":
                return partial(executables.sample_step, **of_model, **samples, **placed), 1
            case "logits":
                return partial(executables.logits_step, **of_model, **samples, **placed), 1
            case "alter":
                return partial(executables.alter_step, **samples, **placed), 0
            case "sample_full":
                vocab = lowering.model_shape.vocab
                return partial(executables.sample_full_step, vocab=vocab, **samples, **placed), 0
            case "prompt_logprobs":
                return partial(executables.prompt_logprobs, **of_model, **placed), 1
        moves = {
            "copy": block_moves.copy_blocks,
            "swap_out": block_moves.read_blocks,
            "swap_in": block_moves.write_blocks,
        }
        return moves.get(command.kind, lambda: None), 0


def stream_of(llm, seed: int):
    """Each command of a run that begins with an empty state, with its results."""
    found = []
    executor = llm.engine.runner.executor
    apply = executor.apply

    def noting(commands):
        results = []
        for command in commands:
            one = apply([command])
            found.append((command, one))
            results += one
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "apply", noting)
        llm.engine.runner.reset()
        prompts, before = prompts_of(LENGTHS, seed=seed), llm.stats().num_swapped
        llm.engine.set_preemption("swap")
        llm.generate(ids(*prompts), greedy(16))
        assert llm.stats().num_swapped > before
        llm.engine.set_preemption("recompute")
        penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {seed: 3.0}}
        sampled = SamplingParams(n=2, seed=seed, temperature=0.9, max_tokens=6, ignore_eos=True, **penalties)
        llm.generate(ids(*prompts[:2]), [sampled, greedy(4, prompt_logprobs=1)])
    return [(command, [np.asarray(result) for result in results]) for command, results in found]


def tokens_of(command: Command, result: np.ndarray) -> list[int]:
    """The samples' tokens, without padding."""
    _, size = command.name
    slots = SampleLayout(size, SIZES["max_num_seqs"]).unpack(command.arrays[-1]).slots
    tokens = result if result.ndim == 1 else result[:, 0]
    return tokens[slots < SIZES["max_num_seqs"]].tolist()


@pytest.mark.timeout(600)
def test_shards_on_a_leading_axis_draw_the_tokens_that_each_draws_alone(tiny):
    with make_llm(tiny.model, **SIZES) as llm:
        llm.generate(ids([1]), greedy(1))  # builds the state that the runs begin with anew
        one, other, config = stream_of(llm, 1), stream_of(llm, 2), llm.engine.config
        scales = llm.engine.runner.executor.kv_scales  # which shards share, as the parameters
    graph, state = nnx.split(tiny.model)
    assert [command.name for command, _ in one] == [command.name for command, _ in other], "the same executables"
    lowering = Lowering(model_shape(tiny.cfg, graph, state, make_mesh(None)), config, make_mesh(None))
    shards = Shards(lowering, jax.tree.leaves(state), scales, Mesh(np.array(jax.devices()[:2]), ("data",)))
    kinds, drawn = set(), 0
    for (ours, our_results), (theirs, their_results) in zip(one, other, strict=True):
        results = shards.apply_to_all([ours, theirs])
        kinds.add(ours.kind)
        if ours.kind in ("sample", "sample_full"):
            for i, (command, alone) in enumerate(((ours, our_results), (theirs, their_results))):
                assert tokens_of(command, results[0][i]) == tokens_of(command, alone[0])
                drawn += len(tokens_of(command, alone[0]))
    assert kinds >= {"init", "admit", "rules", "step", "sample", "alter", "sample_full", "copy", "swap_out", "swap_in"}
    assert drawn > 2 * len(LENGTHS) * 16
    assert all(len(x.sharding.device_set) == 2 and x.shape[0] == 2 for x in jax.tree.leaves(shards.state))
