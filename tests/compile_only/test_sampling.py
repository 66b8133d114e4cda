"""The samplers compiled for GPUs that are not there: one graph, nothing sorted, and no copy of the logits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxllm.aot import thunks
from jaxllm.engine.device.executables import sample_full_step, sample_step
from jaxllm.engine.device.state import empty_penalties, empty_slots
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.sharding.rules import replicated, sharding
from tests.compile_only.targets import chip_names, mesh_of

pytestmark = pytest.mark.timeout(900)

SORT = re.compile(r"\bsort\(")
SORTS = re.compile(r"\bsort\(|\btopk\(|TopK")


def lower(chip: str, *, full: bool, rows: int, vocab: int, devices: int = 1) -> jax.stages.Lowered:
    mesh = mesh_of(chip, devices)

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh))

    slots, table = jax.eval_shape(partial(empty_slots, rows, 8))
    extras = jax.eval_shape(partial(empty_penalties, rows, vocab))
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32, sharding=sharding((None, "vocab"), mesh))
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    before = slots.last_token, *([extras] if full else []), slots.length, table
    arguments = *jax.tree.map(place, before), *[logits] * (1 + full), place(ints)  # before and after a grammar's masks
    fn = partial(sample_full_step if full else sample_step, placement=Placement(mesh))
    with jax.set_mesh(mesh):
        return jax.jit(fn, donate_argnums=(0, 1) if full else 0).lower(*arguments)


@pytest.mark.parametrize(("full", "rows", "vocab"), [(False, 64, 131072), (True, 256, 151936)])
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_a_sampler_is_one_graph_that_sorts_nothing(chip, full, rows, vocab, tmp_path):
    compiled, listed = thunks.compile_and_list(lower(chip, full=full, rows=rows, vocab=vocab), tmp_path)
    text = compiled.as_text()
    assert "jaxllm_draw" in text and ("jaxllm_best" in text) == full
    assert not SORTS.search(text) and "while(" not in text
    assert (listed.command_buffers, sum(listed.outer.values())) == (1, 1), listed
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
