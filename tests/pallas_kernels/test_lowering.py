"""Every executable lowers for TPU and NVIDIA GPUs, with the references, which serve where no kernel does.

The kernels are compiled for real chips in `compile_only`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.engine.build import model_shape
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.executables import Lowering, admit, prompt_logprobs, sample_full_step, sample_step, step
from jaxllm.engine.device.packing import AdmitLayout, StepLayout
from jaxllm.engine.device.sampler import mask_logits
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
    leaves, pools, slots, sampling, extras, hidden = map(place_free, (list(shape.leaves), *state))
    logits = jax.ShapeDtypeStruct((4, tiny.cfg.vocab), jnp.float32)

    def ints(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    def lower(fn, *args):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo" in text
        return text

    layout, rows = StepLayout(8, 4, 4), AdmitLayout(16, 4, CONFIG.blocks_per_seq)
    fn = partial(step, model_shape=shape, layout=layout, placement=Placement(mesh))
    text = lower(fn, leaves, pools, slots, hidden, ints(layout.size))
    assert "stablehlo.scatter" in text and "stablehlo.while" in text
    lower(partial(admit, layout=rows), slots, sampling, ints(16, rows.size))
    text = lower(sample_step, slots.last_token, slots.length, sampling, logits, ints(4))
    assert "stablehlo.sort" not in text
    lower(sample_full_step, slots.last_token, extras, slots.length, sampling, logits, logits, ints(4))
    lower(mask_logits, logits, ints(4, mask_words(tiny.cfg.vocab)))
    lower(partial(prompt_logprobs, model_shape=shape), leaves, hidden, ints(2, 4))
