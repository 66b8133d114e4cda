"""The samplers compiled for GPUs that are not there: at most one graph, nothing sorted, no copy of the logits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxllm.aot import thunks
from jaxllm.engine.device import memory
from jaxllm.engine.device.columns import join
from jaxllm.engine.device.executables import alter_step, sample_full_step
from jaxllm.engine.device.packing import SampleLayout
from jaxllm.engine.device.sampler import sample
from jaxllm.engine.device.state import SAMPLING_LAYOUT, empty_slots, rules_layout
from jaxllm.grammar.matcher import mask_words
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.token_counts.api import count_tokens
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import replicated, sharding
from tests.compile_only.targets import chip_names, compile_on, mesh_of

pytestmark = pytest.mark.timeout(900)

SORT = re.compile(r"\bsort\(")
SORTS = re.compile(r"\bsort\(|\btopk\(|TopK")


def joined(table, mesh):
    """The packed table's shape."""
    rows = jax.eval_shape(join, table)
    return jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=replicated(mesh))


def lower(chip: str, *, full: bool, rows: int, vocab: int, devices: int = 1) -> jax.stages.Lowered:
    """The plain sampler, of logits that are there, or the full one."""
    mesh = mesh_of(chip, devices)
    slots, table, rules, logits, packed = arguments(mesh, rows, vocab)
    with jax.set_mesh(mesh):
        if not full:
            return jax.jit(partial(sample, placement=Placement(mesh))).lower(logits, slots.length, slots.length, table)
        fn = partial(sample_full_step, layout=SampleLayout(rows, rows), placement=Placement(mesh))
        given = slots.last_token, slots.length, joined(table, mesh), rules, logits, logits, packed
        return jax.jit(fn, donate_argnums=0).lower(*given)


def arguments(mesh, rows: int, vocab: int):
    """Slots, tables, logits and the packed samples, as shapes."""

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh))

    slots = jax.eval_shape(partial(empty_slots, rows, ((1, 8),)))
    tables = jax.eval_shape(lambda: (SAMPLING_LAYOUT.empty(rows), rules_layout(vocab).empty(rows)))
    packed = jax.ShapeDtypeStruct((2 * rows + 1,), jnp.int32)
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32, sharding=sharding((None, "vocab"), mesh))
    slots, (table, rules), packed = jax.tree.map(place, (slots, tables, packed))
    return slots, table, rules, logits, packed


@pytest.mark.parametrize(("full", "rows", "vocab"), [(False, 64, 131072), (True, 256, 151936)])
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_a_sampler_is_one_graph_that_sorts_nothing(chip, full, rows, vocab, tmp_path):
    compiled, listed = thunks.compile_and_list(lower(chip, full=full, rows=rows, vocab=vocab), tmp_path)
    text = compiled.as_text()
    assert "jaxllm_draw" in text and ("jaxllm_best" in text) == full
    assert not SORTS.search(text) and "while(" not in text
    if full:
        assert (listed.command_buffers, sum(listed.outer.values())) == (1, 1), listed
    else:  # XLA makes no graph of so few
        assert sum(listed.outer.values()) <= 4, listed
    # Logits less their normaliser, with what alters them, are laid out for a full draw; nothing else as wide is.
    assert compiled.memory_analysis().temp_size_in_bytes < (4 if full else 0.1) * rows * vocab * 4


@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_gpus_that_share_the_vocabulary_draw_without_a_loop(chip):
    text = lower(chip, full=False, rows=64, vocab=131072, devices=2).compile().as_text()
    assert "jaxllm_draw" in text and not SORTS.search(text) and "while(" not in text


@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_gpus_that_share_the_vocabulary_find_the_best_without_a_sort(chip):
    vocab = 131072
    text = lower(chip, full=True, rows=64, vocab=vocab, devices=2).compile().as_text()
    wide = re.compile(rf"\[\d+,({vocab}|{vocab // 2})\]")
    assert not [line for line in text.splitlines() if SORT.search(line) and wide.search(line)]


@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_a_sampler_of_a_tpu_sorts_no_logits(chip):
    """It sorts the few indices of a scatter."""
    vocab = 32768
    text = lower(chip, full=True, rows=8, vocab=vocab).compile().as_text()
    assert "TopK" in text
    assert not [line for line in text.splitlines() if SORT.search(line) and str(vocab) in line]


@pytest.mark.parametrize("chip", chip_names())
def test_samplers_take_no_more_than_the_pool_leaves_room_for(chip):
    """Penalties are counted from the history: two tables over the vocabulary, while it is counted."""
    mesh, rows, vocab = mesh_of(chip, 1), 64, 131072
    slots, table, rules, logits, packed = arguments(mesh, rows, vocab)
    place = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=replicated(mesh))
    masks, history = place((rows, mask_words(vocab))), place((4096, 32))
    fn = partial(alter_step, layout=SampleLayout(rows, rows), placement=Placement(mesh))
    with jax.set_mesh(mesh):
        lowered = jax.jit(fn).lower(logits, masks, packed, slots, joined(table, mesh), rules, history)
    most = memory.logit_arrays(platform_of(mesh)) - 2  # beside the logits as they come, and altered
    for each in (lowered, lower(chip, full=True, rows=rows, vocab=vocab)):
        assert each.compile().memory_analysis().temp_size_in_bytes < most * rows * vocab * 4


@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_a_tpu_multiplies_to_count_tokens_and_lays_out_no_one_hot(chip):
    mesh, rows, vocab = mesh_of(chip, 1), 256, 151936
    fn = partial(count_tokens, vocab=vocab, placement=Placement(mesh))
    ints = jnp.int32
    compiled = compile_on(mesh, fn, ((4096, 32), ints), ((rows, 64), ints), ((rows,), ints), ((rows,), ints))
    text = compiled.as_text()
    assert "convolution(" in text and "scatter(" not in text and not SORT.search(text)
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * rows * vocab * 4
