"""Quantised models through `LLM`: asked for, converted, and from objects."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.placement import named
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.convert.directory import convert
from jaxllm.engine.device.memory import leaf_bytes
from jaxllm.engine.model_source import Reading, model_source
from jaxllm.errors import ModelFormatError
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.pallas_kernels import native
from jaxllm.sharding.mesh import make_mesh
from tests import hf_models
from tests.checkpoint.quantized import make
from tests.checkpoints import check_same, rewrite, write_checkpoint, write_config

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
ENGINE = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 8, "block_size": 8}
PROMPT = {"prompt_token_ids": [3, 1, 4, 1, 5]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def source(model, quantization, **options):
    return model_source(model, "float32", "cpu", None, Reading(skip_tokenizer_init=True, quantization=quantization))


def params(folder, quantization=None):
    found = source(folder, quantization)
    graph, state = nnx.split(found.model)
    return found.place(state, make_mesh(None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("dense"), **SIZES)
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    return folder


WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(24)}, "unk_token": "w0"}}


@pytest.mark.parametrize(("dtype", "held"), [("float32", jnp.int4), ("auto", jnp.uint8)])
def test_new_parameters_are_quantised_too(folder, dtype, held):
    """Also where a CPU has them in panels, as no dtype is asked for."""
    if dtype == "auto" and not native.is_built():
        pytest.skip("not built: python -m jaxllm.pallas_kernels.native.build")
    with LLM(folder, quantization="int4", skip_tokenizer_init=True, dtype=dtype, **ENGINE) as llm:
        (before,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert len(before.outputs[0].token_ids) == 8
        given = llm.params
        kinds = {str(path[-1].key): leaf.dtype for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(given))}
        assert kinds["panels" if dtype == "auto" else "codes"] == held
        llm.update_params(params(folder))
        check_same(llm.params, given)
        doubled = jax.tree.map(lambda x: -2 * x, nnx.to_pure_dict(params(folder)))
        llm.update_params(doubled)
        (after,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert after.outputs[0].token_ids != before.outputs[0].token_ids
        llm.update_params(given)
        (again,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_converted_checkpoint_holds_the_same_codes(folder, tmp_path, name):
    """But for int4's groups, which are of one size in a file; where that is all inputs, each output has a scale."""
    convert(folder, tmp_path / "out", quantization=name)
    converted, asked = params(tmp_path / "out"), params(folder, name)
    if name != "int4":
        check_same(converted, asked)
        return
    scales = [named(tree)["layers.0.mlp.down.scales"].get_value() for tree in (converted, asked)]
    assert [x.shape for x in scales] == [(2, 1, 64), (1, 1, 64)]
    codes = [named(tree)["layers.0.attn.qkv.codes"].get_value() for tree in (converted, asked)]
    by_output, by_group = (np.asarray(x).astype(np.int8) for x in codes)
    same = by_output == np.moveaxis(by_group[0], 0, -1)
    assert same.mean() > 0.9, "sums of squares in another order may prefer a scale that is nearly as good"


BIASES = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("Llama", BIASES, "int4"),
        ("Llama", {"intermediate_size": 88}, "int8"),
        ("Phi3", {}, "int4"),
        ("Gemma3", {}, "fp8"),
    ],
)
def test_what_is_converted_is_the_same_in_transformers(family, changes, name, tmp_path):
    """Each weight to the bit; of int4, whose scales are bfloat16, rounded to that as compressed-tensors does."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    before = hf_models.checkpoint(tmp_path / "in", family, **changes).state_dict()
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(WORDS))
    convert(tmp_path / "in", tmp_path / "out", quantization=name)
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=dense, dtype="float32"
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    modules, _ = scheme_of(checkpoint, checkpoint.config()).modules(checkpoint.tensors())
    assert len(modules) == (4 if family == "Phi3" else 7) * model.config.num_hidden_layers
    theirs = {key: value.float().numpy() for key, value in model.state_dict().items()}
    for key, module in modules.items():
        ours = make.dense(module.read())
        ours = ours.astype(make.BF16).astype(np.float32) if name == "int4" else ours
        np.testing.assert_array_equal(theirs.pop(f"{key}.weight"), ours)
    for key, value in theirs.items():
        np.testing.assert_array_equal(value, before[key].float().numpy())


def test_what_is_converted_once_is_not_again(folder, tmp_path):
    convert(folder, tmp_path / "once", quantization="int8")
    with pytest.raises(ModelFormatError, match="quantization_config: the weights are quantised already"):
        convert(tmp_path / "once", tmp_path / "twice", quantization="int8")
    assert not (tmp_path / "twice").exists()
    with pytest.raises(ValueError, match="quantised by compressed-tensors already; leave it out"):
        source(tmp_path / "once", "int4")


def test_true_bytes_are_counted(folder):
    sizes = {}
    for name in (None, "int8", "int4"):
        found = source(folder, name)
        state = nnx.split(found.model)[1]
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for x in jax.tree.leaves(state)]
        sizes[name] = leaf_bytes(leaves)
    values = 2 * (64 * 256 + 128 * 64 + 3 * 64 * 128)  # of the products of two layers
    scales = 2 * (256 + 64 + 2 * 128 + 64)
    assert sizes[None] - sizes["int8"] == 4 * values - (values + 4 * scales)
    assert sizes["int8"] - sizes["int4"] > values // 2 - 2 * scales


def test_wrong_wishes(folder, tiny):
    with pytest.raises(ValueError, match="quantization='int3' is unknown; choose one of int8, int4, fp8"):
        source(folder, "int3")
    with pytest.raises(ValueError, match="record notes neither .* quantization"):
        LLM(folder, quantization="int8", record="x.bin")


def test_a_module_of_the_callers(tiny):
    with LLM(tiny.model, quantization="int8", **ENGINE) as llm:
        assert len(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
        assert not any(isinstance(node, QuantizedLinear) for _, node in nnx.iter_graph(tiny.model))
    with pytest.raises(ValueError, match="is for products of .*Linear in the model's layers, and Plain has none"):
        LLM(Plain(tiny.cfg), quantization="int8", **ENGINE)


class Plain(nnx.Module):
    """Without a product that can be quantised."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.weight = nnx.Param(jnp.zeros((cfg.vocab, cfg.embed)), axes=("vocab", "embed"))

    def __call__(self, tokens, ctx, caches):
        keys = jnp.zeros((len(tokens), self.cfg.kv_heads, self.cfg.head_dim))
        queries = jnp.zeros((len(tokens), self.cfg.heads, self.cfg.head_dim))
        caches = [cache.attend(queries, keys, keys, scale=1.0)[1] for cache in caches]
        return self.weight[...][tokens], caches

    def logits(self, hidden, ctx):
        return jnp.einsum("td,vd->tv", hidden, self.weight[...], preferred_element_type=jnp.float32)


def test_a_model_of_transformers_in_memory():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    ids = torch.tensor([PROMPT["prompt_token_ids"]])
    want = model.float().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    with LLM(model, skip_tokenizer_init=True, **ENGINE) as llm:
        got = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert list(got)[: len(want)] == want
    with pytest.raises(ValueError, match="a LlamaForCausalLM has no tokenizer; pass tokenizer="):
        LLM(model, **ENGINE)
    with pytest.raises(ModelFormatError, match="<GPT2LMHeadModel>.*GPT2"):
        LLM(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2)), **ENGINE)


@pytest.mark.parametrize(("tied", "mesh"), [(True, None), (False, "tensor=2")])
def test_a_directory_of_mlx_whose_table_is_quantised(tmp_path, tied, mesh):
    """Its tokens are those of the model with the weights that its codes stand for."""
    write_checkpoint(tmp_path, **SIZES, vocab_size=27, tie_word_embeddings=tied)
    rng, tensors, dense = np.random.default_rng(5), {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and not (tied and module == "lm_head"):
            made = make.mlx(rng, 4, *tensor.shape, group=32)
            tensors |= {f"{module}.{kind}": value for kind, value in made.tensors.items()}
            dense[name] = made.weight
        elif tensor.ndim == 1:
            tensors[name] = dense[name] = tensor
    rewrite(tmp_path, dense)
    options = {"skip_tokenizer_init": True, "dtype": "float32", **ENGINE}
    want = tokens_of(tmp_path, **options)
    make.write(tmp_path / "model.safetensors", tensors)
    write_config(tmp_path, **SIZES, vocab_size=27, tie_word_embeddings=tied, quantization={"group_size": 32, "bits": 4})
    assert tokens_of(tmp_path, mesh=mesh, **options) == want


def tokens_of(model, **options):
    with LLM(model, **options) as llm:
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids)
