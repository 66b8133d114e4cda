"""Applies commands: owns parameters, state and executables, and knows no sequence."""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.block_moves import BlockMoves, host_bytes, measure_bandwidth
from jaxllm.engine.device.commands import Command, unknown
from jaxllm.engine.device.compat import takes_four_bits
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.device_memory import Claim
from jaxllm.engine.device.executable_store import open_store
from jaxllm.engine.device.kv_scales import place_scales
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.device.state import DeviceState
from jaxllm.models.transformer import Params
from jaxllm.pallas_kernels.native import huge_pages

log = logging.getLogger(__name__)

_COMPILE_SHARE = 0.05  # of the time of a CPU that steps too, for what no request needs yet

Results = list[Array | np.ndarray]  # of commands, in their order


class Executor:
    """Runs on `mesh`. Compiling starts at once; the commands "update_params" and "init" must come before the others.
    `compilation_cache` is as in `open_store`; `claim` is what it takes of the devices, until it is closed. An executor
    for a CPU that `starts_quickly` replaces its first executables later by others, whose results may differ in the last
    bits."""

    def __init__(
        self,
        model_shape: ModelShape,
        config: EngineConfig,
        mesh: Mesh,
        *,
        compilation_cache: bool | str | Path | None = False,
        claim: Claim | None = None,
        starts_quickly: bool = False,
    ):
        self.mesh, self.model_shape = mesh, model_shape
        self._claim = claim
        self.abstract_params = jax.tree.unflatten(model_shape.treedef, model_shape.leaves)
        lowering = Lowering(model_shape, config, mesh)
        self.temp_bound = memory.step_bytes(model_shape, config, mesh)
        check = partial(_check_memory, ("step", config.max_num_batched_tokens), self.temp_bound)
        jobs, compilers = lowering.jobs(), open_store(compilation_cache, mesh)
        is_cpu = lowering.placement.platform == "cpu"
        starts_quickly &= is_cpu
        first = list(jobs)[: lowering.num_first]

        def compile_quickly(lowered: Any) -> tuple[Any, bool]:
            compiled, is_same = compilers.compile_quickly(lowered)
            return takes_four_bits(compiled), is_same

        self.compile_plan = CompilePlan(
            *(jobs, check),
            compile=lambda lowered: takes_four_bits(compilers.compile(lowered)),
            compile_quickly=compile_quickly if starts_quickly else None,
            first=first,
            ahead=[*first, *lowering.names_of_many] if starts_quickly else (),
            share=_COMPILE_SHARE if is_cpu else 1.0,
        )
        self.page_bytes = host_bytes(lowering.state().pools)  # of a page in host memory
        self._num_shards = config.num_shards
        self.moves = BlockMoves(self.compile_plan.awaited, self._num_shards)
        self.leaves: list[Array] = []
        self._scale_shapes = lowering.scales()
        self.kv_scales: list[Array] = []  # of a pool of 8-bit numbers
        self._offered: dict[int, list[Array]] = {}  # parameters by version, for commands to come
        self.state: DeviceState | None = None
        self._head_indices, self._head = model_shape.head_indices, []
        self._pool_indices, self._pool_head = model_shape.pool_indices, []
        self._logits: Array | None = None  # of the step's samples
        self._altered: Array | None = None
        if claim is not None:
            claim.follow(self)

    def offer_params(self, version: int, params: Params) -> None:
        """Holds `params`, which lie where the executables want them, for the command that names this version.
        ValueError for a dtype other than that of the parameters before."""
        want = jax.tree_util.tree_leaves_with_path(self.abstract_params)
        leaves = jax.tree.leaves(params)
        for (path, expected), leaf in zip(want, leaves, strict=True):
            if leaf.dtype != expected.dtype:
                name = jax.tree_util.keystr(path)
                raise ValueError(f"parameter {name} is {leaf.dtype}, the engine's is {expected.dtype}; cast it first")
        self._offered[version] = leaves

    def lacks_params(self) -> bool:
        """Whether someone has deleted or donated arrays of the parameters."""
        return any(leaf.is_deleted() for leaf in self.leaves)

    def apply(self, commands: Sequence[Command]) -> Results:
        """Puts the commands on the device's queue, in their order, and awaits nothing but room for blocks that are
        swapped, and executables for them; and what a measurement measures. Returns what they compute for the host,
        still on its way. ValueError for what is no command."""
        results: Results = []
        for command in commands:
            handler = HANDLERS.get(command.kind)
            if handler is None:
                raise unknown(command)
            results += handler(self, command) or ()
        return results

    def close(self) -> None:
        """Stops compiling and lets go of the device's memory."""
        self.compile_plan.close()
        self.release_params()
        self._offered.clear()
        self.kv_scales = []
        self.release_state()
        if self._claim is not None:
            self._claim.release()

    def release_params(self) -> None:
        """Lets go of the parameters, until others are offered."""
        self.leaves, self._head, self._pool_head = [], [], []

    def release_state(self) -> None:
        """Lets go of the state, until the next "init"."""
        self.state = self._logits = self._altered = None
        self.moves.clear()

    @property
    def _live(self) -> DeviceState:
        """The state, of which there is one from the first "init" to `close`."""
        assert self.state is not None
        return self.state

    def _set_pools(self, pools: Sequence[Array]) -> None:
        self.state = self._live._replace(kv_pools=list(pools[:-1]), history=pools[-1])

    def _update_params(self, command: Command) -> None:
        leaves = self._offered.pop(command.key)
        self.leaves, self._head = leaves, [leaves[i] for i in self._head_indices]
        self._pool_head = [leaves[i] for i in self._pool_indices]
        huge_pages.collapse_soon(leaves)

    def _place_kv_scales(self, command: Command) -> None:
        (pairs,) = command.arrays
        self.kv_scales = place_scales(pairs, self._scale_shapes)

    def _measure_kv_scales(self, command: Command) -> None:
        self.kv_scales = self.compile_plan.awaited(command.name)(self.leaves, *command.arrays)

    def _init(self, command: Command) -> None:
        self.release_state()  # free the old pool first
        self.state = self.compile_plan["init"]()

    def _move(self, command: Command) -> None:
        self._set_pools(self.moves.apply(self._live.pools, command))

    def _settle(self, command: Command) -> None:
        self.moves.settle()

    def _measure_bandwidth(self, command: Command) -> list[np.ndarray]:
        """Bytes a second, float64 `[1]`."""
        (ids,) = command.arrays
        pools, bandwidth = measure_bandwidth(self._live.pools, self.compile_plan.awaited, ids, self._num_shards)
        self._set_pools(pools)
        return [np.array([bandwidth])]

    def _admit(self, command: Command) -> None:
        state = self._live
        slots, sampling = self.compile_plan[command.name](state.slots, state.sampling, *command.arrays)
        self.state = state._replace(slots=slots, sampling=sampling)

    def _install_rules(self, command: Command) -> None:
        rules = self.compile_plan[command.name](self._live.rules, *command.arrays)
        self.state = self._live._replace(rules=rules)

    def _step(self, command: Command) -> list[Array]:
        pools, history, slots, _, _, hidden, _ = self._live
        pools, history, slots, hidden, done = self.compile_plan[command.name](
            [*self.leaves, *self.kv_scales], pools, history, slots, hidden, *command.arrays
        )
        self.state = self._live._replace(kv_pools=pools, history=history, slots=slots, hidden=hidden)
        return [done]

    def _prompt_logprobs(self, command: Command) -> list[Array]:
        return [self.compile_plan.awaited(command.name)(self._head, self._live.hidden, *command.arrays)]

    def _pool(self, command: Command) -> list[Array]:
        state = self._live
        pool = self.compile_plan.awaited(command.name)
        sums, pooled = pool(self._pool_head, state.sums, state.hidden, *command.arrays)
        self.state = state._replace(sums=sums)
        return [pooled]

    def _sample(self, command: Command) -> list[Array]:
        _, _, slots, sampling, _, hidden, _ = self._live
        draw = self.compile_plan[command.name]
        last_token, tokens = draw(self._head, hidden, slots.last_token, slots.length, sampling, *command.arrays)
        self.state = self._live._replace(slots=slots._replace(last_token=last_token))
        return [tokens]

    def _make_logits(self, command: Command) -> None:
        self._logits = self.compile_plan[command.name](self._head, self._live.hidden, *command.arrays)
        self._altered = self._logits

    def _alter(self, command: Command) -> None:
        _, history, slots, sampling, rules, *_ = self._live
        alter = self.compile_plan[command.name]
        self._altered = alter(self._logits, *command.arrays, slots, sampling, rules, history)

    def _sample_full(self, command: Command) -> list[Array]:
        _, _, slots, sampling, rules, *_ = self._live
        logits, altered, self._logits, self._altered = self._logits, self._altered, None, None
        last_token, rows, candidates = self.compile_plan[command.name](
            slots.last_token, slots.length, sampling, rules, logits, altered, *command.arrays
        )
        self.state = self._live._replace(slots=slots._replace(last_token=last_token))
        return [rows, candidates]


HANDLERS: dict[Hashable, Callable[[Executor, Command], Sequence[Array | np.ndarray] | None]] = {  # of `KINDS`
    "update_params": Executor._update_params,
    "kv_scales": Executor._place_kv_scales,
    "measure_kv_scales": Executor._measure_kv_scales,
    "init": Executor._init,
    "measure_bandwidth": Executor._measure_bandwidth,
    **dict.fromkeys(("swap_out", "swap_in", "copy", "release"), Executor._move),
    "settle": Executor._settle,
    "admit": Executor._admit,
    "rules": Executor._install_rules,
    "step": Executor._step,
    "step_shared": Executor._step,
    "prompt_logprobs": Executor._prompt_logprobs,
    "pool": Executor._pool,
    "sample": Executor._sample,
    "logits": Executor._make_logits,
    "alter": Executor._alter,
    "sample_full": Executor._sample_full,
}


def _check_memory(largest: Hashable, bound: int, name: Hashable, compiled: jax.stages.Compiled) -> None:
    """Compares the bound that sized the pool, in bytes, with what the compiler says the largest step takes."""
    if name != largest:
        return
    analysis = compiled.memory_analysis()
    if analysis is not None and analysis.temp_size_in_bytes > bound:
        log.warning(
            "the largest step takes %.2f GB of temporary memory, more than the %.2f GB left beside the KV pool; if it "
            "runs out of memory, lower max_num_batched_tokens or num_blocks",
            analysis.temp_size_in_bytes / 1e9,
            bound / 1e9,
        )
