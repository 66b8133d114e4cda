"""Every executable lowers for TPU and NVIDIA GPUs, with the references, which serve where no kernel does.

The kernels are compiled for real chips in `compile_only`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.executables import (
    admit,
    alter_step,
    install_rules,
    pool_step,
    prompt_logprobs,
    sample_full_step,
    sample_step,
    step,
)
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import model_shape
from jaxllm.engine.device.packing import PoolLayout, SampleLayout, StepLayout
from jaxllm.engine.device.slot_rows import AdmitLayout, table_shapes
from jaxllm.engine.device.state import rules_layout
from jaxllm.grammar.matcher import mask_words
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import api
from jaxllm.sharding.mesh import make_mesh

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=32)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_executables_lower(tiny, monkeypatch, platform):
    monkeypatch.setattr(api, "OP", dataclasses.replace(api.OP, preferred={}))
    monkeypatch.setattr(native, "is_built", lambda: False)  # the mesh here is the CPU's
    mesh = make_mesh(None)
    shape = model_shape(tiny.cfg, *nnx.split(tiny.model), mesh)
    state = Lowering(shape, CONFIG, mesh).state()
    place_free = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    pools, history, slots, sampling, rules, hidden, sums = map(place_free, state)
    leaves, head = place_free((list(shape.leaves), shape.head))
    logits = jax.ShapeDtypeStruct((4, tiny.cfg.vocab), jnp.float32)

    def ints(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    def lower(fn, *args):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo" in text
        return text

    tables, caches = table_shapes(CONFIG), shape.cache_layout(CONFIG, mesh)
    rows = AdmitLayout(16, 4, tuple(table.shape for table in tables))
    layout, samples = StepLayout(8, 4, 4), SampleLayout(4, 4)
    fn = partial(step, model_shape=shape, layout=layout, tables=tables, caches=caches, placement=Placement(mesh))
    text = lower(fn, leaves, pools, history, slots, hidden, ints(layout.size))
    assert "stablehlo.scatter" in text and "stablehlo.while" in text
    lower(partial(admit, layout=rows), slots, sampling, ints(16, rows.size))
    one_row = rules_layout(tiny.cfg.vocab)
    lower(partial(install_rules, layout=one_row), rules, ints(1, 1 + one_row.size))
    fn, packed = partial(sample_step, model_shape=shape, layout=samples), ints(samples.size)
    text = lower(fn, head, hidden, slots.last_token, slots.length, sampling, packed)
    assert "stablehlo.sort" not in text
    fn = partial(sample_full_step, layout=samples)
    lower(fn, slots.last_token, slots.length, sampling, rules, logits, logits, packed)
    masks = ints(4, mask_words(tiny.cfg.vocab))
    lower(partial(alter_step, layout=samples), logits, masks, packed, slots, sampling, rules, history)
    lower(partial(prompt_logprobs, model_shape=shape), head, hidden, ints(2, 4))
    pooled = PoolLayout(8, 4)
    lower(partial(pool_step, model_shape=shape, layout=pooled), [], sums, hidden, ints(pooled.size))
