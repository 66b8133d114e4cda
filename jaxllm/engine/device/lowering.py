"""Lowers every executable for an engine's shapes. The list is known before the start."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import block_moves, executables, kv_scales
from jaxllm.engine.device.cache_layout import CacheLayout
from jaxllm.engine.device.columns import RowLayout, join
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.device.packing import (
    ADMIT_SIZES,
    PoolLayout,
    SampleLayout,
    StepLayout,
    pick_bucket,
    pool_ladder,
    sample_ladder,
    token_ladder,
)
from jaxllm.engine.device.slot_rows import AdmitLayout, TableShape, table_shapes
from jaxllm.engine.device.state import SAMPLING_LAYOUT, DeviceState, LogitRules, Slots, empty_slots, rules_layout
from jaxllm.grammar.matcher import mask_words
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.zeros import zeros
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import num_shards, over_shards, replicated, shard_mesh, sharding

NUM_FIRST = 4  # executables that suffice to serve a request, where nothing is measured before


@dataclass(frozen=True)
class Lowering:
    """Lowers each function for its shapes, with every argument's and result's sharding pinned."""

    model_shape: ModelShape
    config: EngineConfig
    mesh: Mesh

    @property
    def placement(self) -> Placement:
        """Of a shard: what the functions see is its part alone."""
        return Placement(shard_mesh(self.mesh), self.config.batch_invariant)

    @property
    def num_shards(self) -> int:
        return num_shards("shards", self.mesh)

    def jobs(self) -> dict[Hashable, Callable[[], jax.stages.Lowered]]:
        """Name -> lowering of every executable: a step for each bucket of tokens, four for each bucket of samples, the
        admits, three more, those that pool, and those that move blocks; one of the largest size in which shards of data
        compute a prompt together; one that measures the scales of 8-bit keys and values, where that is asked for. A
        model that does not generate has no samplers.

        Smallest first: the first `num_first` suffice to serve a request. On accelerators, where each takes seconds,
        steps of 8 and 64 times as many tokens follow, with plain samplers: prompts and batches soon need few steps.
        """
        moves = block_moves.jobs(self.state().pools, self.config.max_num_seqs)
        admits = {("admit", rows): partial(self.lower_admit, rows) for rows in ADMIT_SIZES}
        pools = {("pool", n): partial(self.lower_pool, self._pool_layout(n)) for n in self._pool_buckets}
        jobs: dict[Hashable, Callable[[], jax.stages.Lowered]] = {}
        if self.config.measures_kv_scales:
            jobs["measure_kv_scales"] = self.lower_measure
        jobs["init"] = self.lower_init
        jobs["admit", 1] = admits["admit", 1]
        if not self.model_shape.generates:
            jobs["step", self.token_buckets[0]] = self._step_job(self.token_buckets[0])
            jobs |= pools
        for tokens in self._first_buckets():
            samplers = self._samplers_of(tokens)
            jobs["step", tokens] = self._step_job(tokens)
            jobs |= {name: job for name, job in samplers.items() if name[0] == "sample"}
        for tokens in self.token_buckets:
            jobs["step", tokens] = self._step_job(tokens)
            jobs |= self._samplers_of(tokens)
            if self.model_shape.generates:
                jobs |= {"rules": self.lower_rules, "prompt_logprobs": self.lower_prompt_logprobs}
            jobs |= admits
            jobs |= {name: job for name, job in moves.items() if isinstance(name, tuple) and name[0] == "copy"}
        if self.config.shares_prompts:
            most = self.config.max_num_batched_tokens
            jobs["step_shared", most] = partial(self.lower_step, self.step_layout(most, sharers=self.num_shards))
        return jobs | pools | moves  # swaps last: until then, preempted sequences are recomputed

    @property
    def num_first(self) -> int:
        """Executables that suffice to serve a request: the first ones of the plan."""
        return NUM_FIRST + self.config.measures_kv_scales

    @property
    def names_of_many(self) -> list[Hashable]:
        """Executables that suffice to serve as many requests at once as there may be: the largest step, and that in
        which all decode, with their samplers."""
        decodes = pick_bucket(self.token_buckets, min(self.config.max_num_seqs, self.token_buckets[-1]))
        steps = self.token_buckets[-1], decodes
        samplers = (name for tokens in steps for name in self._samplers_of(tokens) if name[0] == "sample")
        return list(dict.fromkeys([("step", steps[0]), *samplers, ("step", decodes)]))

    def _step_job(self, tokens: int) -> Callable[[], jax.stages.Lowered]:
        return partial(self.lower_step, self.step_layout(tokens))

    def _pool_layout(self, tokens: int) -> PoolLayout:
        return PoolLayout(tokens, self.config.max_num_seqs)

    @property
    def _pool_buckets(self) -> tuple[int, ...]:
        return pool_ladder(self.config.max_num_batched_tokens)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Of steps."""
        config = self.config
        return token_ladder(config.max_num_batched_tokens, config.min_bucket, free_padding=config.free_padding)

    @property
    def sample_buckets(self) -> tuple[int, ...]:
        """Of samplers."""
        return sample_ladder(self.config.max_num_seqs, self.config.min_bucket)

    def _first_buckets(self) -> list[int]:
        """The buckets of tokens that come first on accelerators, each at least eight times the one before."""
        first: list[int] = []
        for tokens in self.token_buckets if platform_of(self.mesh) != "cpu" else ():
            if not first or tokens >= 8 * first[-1]:
                first.append(tokens)
        return first

    def _samplers_of(self, tokens: int) -> dict[tuple[str, int], Callable[[], jax.stages.Lowered]]:
        """Those that a step of so many tokens may need."""
        if not self.model_shape.generates:
            return {}
        most = self.config.max_num_seqs
        layout = SampleLayout(pick_bucket(self.sample_buckets, min(tokens, most)), most)
        lowerings = {
            "sample": self.lower_sample,
            "logits": self.lower_logits,
            "alter": self.lower_alter,
            "sample_full": self.lower_sample_full,
        }
        return {(name, layout.samples): partial(lower, layout) for name, lower in lowerings.items()}

    def step_layout(self, tokens: int, sharers: int = 1) -> StepLayout:
        """Of a step of so many tokens."""
        config = self.config
        return StepLayout(tokens, config.max_num_seqs, config.block_size, config.pages_per_block, sharers)

    @cached_property
    def cache_layout(self) -> CacheLayout:
        """Of the groups that the configuration has."""
        config = self.config
        layout = self.model_shape.cache_layout(config, self.mesh)
        assert layout.groups == config.groups, (layout.groups, config.groups)
        return layout

    @property
    def _tables(self) -> tuple[TableShape, ...]:
        return table_shapes(self.config)

    def state(self) -> DeviceState:
        """The shapes of the state of all shards, with shardings."""
        num_pages = self.config.num_pages
        arrays = self.cache_layout.arrays
        pools: Any = [self._like((num_pages, *each.shape), each.dtype, (None, *each.axes)) for each in arrays]
        history: Any = self._ints(num_pages, self.config.block_size)
        return DeviceState(pools, history, *self.small_state())

    def small_state(self) -> tuple[Slots, Any, LogitRules, Any, Any]:
        """Shapes of the state that does not grow with the pool."""
        shape, config = self.model_shape, self.config
        hidden = self._like((config.max_num_batched_tokens, *shape.hidden.shape), shape.hidden.dtype)
        sums = self._like((config.max_num_seqs, *shape.hidden.shape), jnp.float32)
        return *self._like_tables, hidden, sums

    @cached_property
    def _like_tables(self) -> tuple[Slots, Any, LogitRules]:
        return jax.tree.map(lambda x: self._like(x.shape, x.dtype), jax.eval_shape(self._empty_tables))

    def _empty_tables(self) -> tuple[Slots, Any, LogitRules]:
        num_slots = self.config.max_num_seqs
        slots = empty_slots(num_slots, [table.shape for table in self._tables])
        return slots, join(SAMPLING_LAYOUT.empty(num_slots)), self._rules.empty(num_slots)

    @property
    def _rules(self) -> RowLayout:
        return rules_layout(self.model_shape.vocab)

    def lower_init(self) -> jax.stages.Lowered:
        state = self.state()

        def own(x: Any) -> tuple[int, ...]:
            return (x.shape[0] // self.num_shards, *x.shape[1:])

        def init() -> DeviceState:
            pools = [zeros(own(pool), pool.dtype, placement=self.placement) for pool in state.kv_pools]
            history = jnp.zeros(own(state.history), jnp.int32)
            hidden, sums = (jnp.zeros(own(x), x.dtype) for x in (state.hidden, state.sums))
            return DeviceState(pools, history, *self._empty_tables(), hidden, sums)

        fn = over_shards(init, self.mesh)
        return jax.jit(fn, out_shardings=jax.tree.map(lambda x: x.sharding, state)).lower()

    def lower_step(self, layout: StepLayout) -> jax.stages.Lowered:
        state = self.state()
        # Where padding is free, so are tokens that are left out. Among few tokens most are read.
        skips_unread = self.config.free_padding and layout.tokens > layout.seqs
        sizes = {"layout": layout, "tables": self._tables, "caches": self.cache_layout, "skips_unread": skips_unread}
        fn = partial(executables.step, model_shape=self.model_shape, placement=self.placement, **sizes)
        written = state.kv_pools, state.history, state.slots, state.hidden
        out = jax.tree.map(lambda x: x.sharding, (*written, self._ints(4)))
        fn = over_shards(fn, self.mesh, num_shared=1)
        jitted = jax.jit(fn, donate_argnums=(1, 2, 3, 4), out_shardings=out)
        return jitted.lower([*self.model_shape.leaves, *self.scales()], *written, self._ints(layout.size))

    def scales(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what a step reads beside a pool of 8-bit numbers; none with another."""
        return [] if self.config.kv_cache_dtype == "auto" else kv_scales.scale_shapes(self.model_shape, self.mesh)

    def lower_measure(self) -> jax.stages.Lowered:
        shape = self.model_shape
        sizes = {"dtype": shape.kv_dtype(self.config), "placement": self.placement}
        fn = partial(kv_scales.measure, model_shape=shape, **sizes)
        tokens = kv_scales.measured_tokens(self.config, shape.vocab, None)
        fn = over_shards(fn, self.mesh, num_shared=2, shares_results=True)
        jitted = jax.jit(fn, out_shardings=[each.sharding for each in self.scales()])
        tokens = jax.ShapeDtypeStruct(tokens.shape, jnp.int32, sharding=replicated(self.mesh))
        return jitted.lower(list(shape.leaves), tokens)

    def lower_sample(self, layout: SampleLayout) -> jax.stages.Lowered:
        slots, sampling, _, hidden, _ = self.small_state()
        fn = partial(executables.sample_step, model_shape=self.model_shape, layout=layout, placement=self.placement)
        fn = over_shards(fn, self.mesh, num_shared=1)
        jitted = jax.jit(fn, donate_argnums=2, out_shardings=(slots.last_token.sharding, replicated(self.mesh)))
        packed = self._ints(layout.size)
        return jitted.lower(self.model_shape.head, hidden, slots.last_token, slots.length, sampling, packed)

    def lower_logits(self, layout: SampleLayout) -> jax.stages.Lowered:
        *_, hidden, _ = self.small_state()
        fn = partial(executables.logits_step, model_shape=self.model_shape, layout=layout, placement=self.placement)
        fn = over_shards(fn, self.mesh, num_shared=1)
        jitted = jax.jit(fn, out_shardings=self._logits(layout).sharding)
        return jitted.lower(self.model_shape.head, hidden, self._ints(layout.size))

    def lower_alter(self, layout: SampleLayout) -> jax.stages.Lowered:
        slots, sampling, rules, *_ = self.small_state()
        logits, masks = self._logits(layout), self._ints(layout.samples, mask_words(self.model_shape.vocab))
        fn = partial(executables.alter_step, layout=layout, placement=self.placement)
        jitted = jax.jit(over_shards(fn, self.mesh), out_shardings=logits.sharding)
        return jitted.lower(logits, masks, self._ints(layout.size), slots, sampling, rules, self.state().history)

    def lower_sample_full(self, layout: SampleLayout) -> jax.stages.Lowered:
        slots, sampling, rules, *_ = self.small_state()
        vocab = self.model_shape.vocab
        fn = partial(executables.sample_full_step, vocab=vocab, layout=layout, placement=self.placement)
        out = slots.last_token.sharding, *(replicated(self.mesh),) * 2
        jitted = jax.jit(over_shards(fn, self.mesh), donate_argnums=0, out_shardings=out)
        logits, packed = self._logits(layout), self._ints(layout.size)
        return jitted.lower(slots.last_token, slots.length, sampling, rules, logits, logits, packed)

    def lower_rules(self) -> jax.stages.Lowered:
        _, _, rules, *_ = self.small_state()
        fn = partial(executables.install_rules, layout=self._rules)
        out = jax.tree.map(lambda x: x.sharding, rules)
        jitted = jax.jit(over_shards(fn, self.mesh), donate_argnums=0, out_shardings=out)
        return jitted.lower(rules, self._ints(1, 1 + self._rules.size))

    def lower_pool(self, layout: PoolLayout) -> jax.stages.Lowered:
        *_, hidden, sums = self.small_state()
        fn = partial(executables.pool_step, model_shape=self.model_shape, layout=layout, placement=self.placement)
        fn = over_shards(fn, self.mesh, num_shared=1)
        jitted = jax.jit(fn, donate_argnums=1, out_shardings=(sums.sharding, replicated(self.mesh)))
        return jitted.lower(self.model_shape.pool_head, sums, hidden, self._ints(layout.size))

    def lower_prompt_logprobs(self) -> jax.stages.Lowered:
        *_, hidden, _ = self.small_state()
        fn = partial(executables.prompt_logprobs, model_shape=self.model_shape, placement=self.placement)
        jitted = jax.jit(over_shards(fn, self.mesh, num_shared=1), out_shardings=replicated(self.mesh))
        return jitted.lower(self.model_shape.head, hidden, self._ints(2, self.config.max_num_seqs))

    def lower_admit(self, rows: int) -> jax.stages.Lowered:
        layout = AdmitLayout(rows, self.config.max_num_seqs, tuple(table.shape for table in self._tables))
        slots, sampling, *_ = self.small_state()
        fn = over_shards(partial(executables.admit, layout=layout), self.mesh)
        out = jax.tree.map(lambda x: x.sharding, (slots, sampling))
        jitted = jax.jit(fn, donate_argnums=(0, 1), out_shardings=out)
        return jitted.lower(slots, sampling, self._ints(rows, layout.size))

    def _like(self, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] | None = None) -> jax.ShapeDtypeStruct:
        """Of all shards' arrays of this shape and these axes, one after the other."""
        own = (None,) * len(shape) if axes is None else axes
        place = sharding(("shards", *own[1:]), self.mesh)
        return jax.ShapeDtypeStruct((self.num_shards * shape[0], *shape[1:]), dtype, sharding=place)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._like(shape, jnp.int32)

    def _logits(self, layout: SampleLayout) -> jax.ShapeDtypeStruct:
        return self._like((layout.samples, self.model_shape.logits_width), jnp.float32, (None, "vocab"))
