"""What int8, fp8 and int4 weights cost SmolLM2, by the quantisers and their codes' values alone, without kernels."""

import math
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.checkpoint.quantized.quantize import form_of, quantize
from jaxllm.engine.build import choose_mesh
from jaxllm.engine.model_source import model_source
from jaxllm.eval.run import evaluate
from jaxllm.models.linear import Linear
from tests.real.smollm2 import SMOLLM2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:6000]
RECORDED = {"int8": (0.00354, 0.9707), "fp8": (0.0236, 0.9297), "int4": (0.468, 0.6387)}  # mean KLD, same most likely


def rounded_model(file, name):
    """The model with the products' weights rounded to the form `name`, and held dense; the head is the embeddings'."""
    source, mesh = model_source(file, "float32", "cpu", None), choose_mesh(None, None)
    graph, state = nnx.split(source.model)
    model = nnx.merge(graph, source.place(state, mesh))
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Linear):
            weight = node.weight.get_value()
            inputs = math.prod(weight.shape[: len(node.shape.inputs)])
            form = form_of(name, inputs)
            stored = quantize(weight.reshape(inputs, -1).T, form)
            codes, scales = stored.codes.astype(jnp.float32), stored.scales.astype(jnp.float32)
            dense = codes * jnp.repeat(scales.reshape(len(scales), -1), form.group or inputs, axis=1)
            node.weight.set_value(dense.T.reshape(weight.shape))
    return model, source.tokenizer


@pytest.mark.parametrize("name", RECORDED)
def test_accuracy_is_no_worse_than_recorded(real, name):
    file = real(SMOLLM2)
    model, tokenizer = rounded_model(file, name)
    found = evaluate(model, reference=file, tokenizer=tokenizer, texts=[TEXT])
    kld, same_top = RECORDED[name]
    assert 0.5 * kld < found.divergence.kld_mean <= 1.1 * kld
    assert 1 - found.divergence.same_top <= 1.1 * (1 - same_top)
