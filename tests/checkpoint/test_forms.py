"""The forms that a configuration alone gives a model: its true bytes, and random weights of them."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.aot.prepare import find_model
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.forms import give_forms
from jaxllm.checkpoint.placement import named
from jaxllm.engine.dummy import STD
from jaxllm.engine.model_source import Reading, model_source
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.linear import Joined, Linear
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.models.quantized_embedding import QuantizedEmbedding
from jaxllm.pallas_kernels.quantized_matmul import stored_bytes
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoint.quantized.make import compressed, method
from tests.checkpoints import FUSED, write_config

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 27}
MLX = {"quantization": {"group_size": 32, "bits": 4}}
AWQ = method("awq", bits=4, group_size=32, zero_point=True)
W4A16 = {"num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = method("fp8", weight_block_size=[32, 32], modules_to_not_convert=["lm_head"])
PARTLY = compressed("pack-quantized", ignore=["lm_head", "re:.*down_proj", "model.layers.0.self_attn.q_proj"], **W4A16)
CONFIGS = {
    "awq": (AWQ, {}),
    "awq, fused": (AWQ, FUSED),
    "mlx": (MLX, {}),
    "mlx, tied": (MLX, {"tie_word_embeddings": True}),
    "fp8": (FP8, {}),
    "partly": (PARTLY, {}),
    "gptq, act-order": (method("gptq", bits=4, group_size=32, desc_act=True, sym=True), {}),
    "modelopt": (method("modelopt", quant_algo="NVFP4", group_size=16, exclude_modules=["lm_head"]), {}),
}


def abstract(folder, wanted=None):
    spec = read_config(folder, jnp.bfloat16)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    give_forms(open_checkpoint(folder), spec, model, wanted)
    return model


def form(product):
    return product.form if isinstance(product, QuantizedLinear | QuantizedEmbedding) else None


def test_what_lists_exclude_is_dense(tmp_path):
    write_config(tmp_path, **SIZES, **PARTLY)
    first, second = abstract(tmp_path).layers
    assert form(first.mlp.gate_up).codes == "int4" and type(first.mlp.down) is Linear
    assert isinstance(first.attn.qkv, Joined) and [form(part) is None for part in first.attn.qkv.parts] == [True, False]
    assert form(second.attn.qkv).group == 32


@pytest.mark.parametrize(("case", "codes"), [("awq", None), ("mlx", "uint4"), ("fp8", None)])
def test_tables_and_heads_are_as_the_formats_writers_leave_them(tmp_path, case, codes):
    config, changes = CONFIGS[case]
    write_config(tmp_path, **SIZES, **config, **changes)
    model = abstract(tmp_path)
    assert [form(one) and form(one).codes for one in (model.embed, model.lm_head)] == [codes, codes]
    assert all(form(layer.mlp.down) is not None for layer in model.layers)


def test_what_the_configuration_does_not_tell(tmp_path):
    write_config(tmp_path, **SIZES, **method("modelopt", quant_algo="MIXED_PRECISION"))
    with pytest.raises(ModelFormatError, match="does not say how .*o_proj is quantised; give the directory"):
        abstract(tmp_path)


def dense(product):
    """The weight of a product or table, whose inputs may be in an order of their own."""
    if isinstance(product, QuantizedEmbedding):
        return product.rows(jnp.arange(product.codes.shape[0]))
    return product._held.dense(len(product.shape.inputs))


@pytest.mark.parametrize(("case", "mesh"), [*((case, None) for case in CONFIGS), ("mlx, tied", "tensor=2")])
def test_random_weights_are_of_the_form_and_of_a_models_size(tmp_path, case, mesh):
    config, changes = CONFIGS[case]
    write_config(tmp_path, **SIZES, **config, **changes)
    reading = Reading(load_format="dummy", skip_tokenizer_init=True)
    source = model_source(tmp_path, "float32", "cpu", None, reading)
    grid = make_mesh(mesh)
    source.expand(grid)
    graph, state = nnx.split(source.model)
    placed = source.place(state, grid)
    for name, variable in named(placed).items():
        want = named(state)[name].get_value()
        assert (variable.get_value().shape, variable.get_value().dtype) == (want.shape, want.dtype), name
    model = nnx.merge(graph, placed)
    products = [node for _, node in nnx.iter_graph(model) if form(node) is not None]
    assert products
    for product in products:
        values = np.asarray(dense(product), np.float32)
        assert np.isfinite(values).all() and 0.5 * STD < values.std() < 2 * STD
        assert abs(values.mean()) < 0.1 * STD


def test_random_weights_are_served(tmp_path):
    write_config(tmp_path, **SIZES, **MLX, tie_word_embeddings=True)
    sizes = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 8, "block_size": 8}
    with LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [3, 1, 4]}, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(ValueError, match=r"parameter embed.weight is dense, and the model's table is quantised"):
            llm.update_params(transformer_params(tmp_path))


def transformer_params(folder):
    spec = read_config(folder, jnp.float32)
    return nnx.state(spec.module.Model(spec.cfg, rngs=nnx.Rngs(0)), nnx.Param)


def test_bytes_of_a_well_known_model(tmp_path):
    """Llama-3.1-8B in AWQ's form: codes of four bits, scales and offsets of groups of 128; the rest stays."""
    config = json.loads((find_model("llama-3.1-8b") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | method("awq", bits=4, group_size=128)))
    leaves = jax.tree.leaves(nnx.state(abstract(tmp_path), nnx.Param))
    total = sum(stored_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    products = 32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    rest = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    assert total == products // 2 + products // 128 * (2 + 4) + 2 * rest
    assert math.isclose(total / 1e9, 5.93, rel_tol=0.01)
