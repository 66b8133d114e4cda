"""A model of each architecture, as the converter writes it, is the model that transformers saved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxllm import LLM, SamplingParams, models
from jaxllm.checkpoint.config import read_config
from jaxllm.errors import ModelFormatError
from jaxllm.interchange.save import save_hf
from jaxllm.pallas_kernels import native
from tests.checkpoints import check_same, load
from tests.gguf_files import QUANTISED, Converted
from tests.hf_models import FACTORS, LLAMA3, LONGROPE, YARN, checkpoint, logits
from tests.tiny import NoText, greedy, ids

pytest.importorskip("torch")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 192}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
MOE = {"moe_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}
CASES = {  # family, changes of the model, keys beside those that each file has
    "llama": ("Llama", {}, {}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {}),
    "llama_mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}, {}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}, YARN_KEYS),
    "mistral": ("Mistral", {"sliding_window": None}, {}),
    "mistral_window": ("Mistral", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "qwen2": ("Qwen2", {}, {"rope.dimension_count": 16}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 16}, {}),
    "gemma3": (
        "Gemma3",
        {"query_pre_attn_scalar": 16, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": 10000.0,
        },
    ),
    "mixtral": ("Mixtral", {"sliding_window": None}, {}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 32, "head_dim": 16}, {}),
    "qwen3_moe": ("Qwen3Moe", MOE, {}),
    "phi3": ("Phi3", {"sliding_window": 8}, {"rope.dimension_count": 16}),
    "phi4_mini": ("Phi3", {"partial_rotary_factor": 0.75, "sliding_window": None}, {"rope.dimension_count": 12}),
}


def converted(tmp_path, case, dtype=lambda name: "Q8_0"):
    """The directory with what a reader makes of the file, and the file."""
    family, changes, keys = CASES[case]
    model = checkpoint(tmp_path / "hf", family, seed=len(case), **(WIDE | changes))
    written = Converted(family, model, dtype)
    save_file(written.state, tmp_path / "hf/model.safetensors")
    return tmp_path / "hf", written.write(tmp_path / "model.gguf", keys)


@pytest.mark.parametrize("case", CASES)
def test_configuration_and_parameters_are_those_of_the_safetensors(tmp_path, case):
    directory, file = converted(tmp_path, case)
    ours, theirs = read_config(file, jnp.float32), read_config(directory, jnp.float32)
    assert ours.module is theirs.module or case == "mistral"  # without a window it is a Llama
    fields = dataclasses.asdict(ours.cfg), dataclasses.asdict(theirs.cfg)
    assert fields[0] == fields[1]
    check_same(load(file), load(directory))


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_of_it_is_what_transformers_has(tmp_path, case):
    transformers = pytest.importorskip("transformers")
    directory, file = converted(tmp_path, case)
    save_hf(models.load(file, "float32"), tmp_path / "out")
    tokens = np.random.default_rng(0).integers(2, 96, 24).tolist()
    each = [transformers.AutoModelForCausalLM.from_pretrained(path) for path in (directory, tmp_path / "out")]
    want, got = (logits(model, tokens) for model in each)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_greedy_tokens_are_those_of_the_safetensors(tmp_path, case):
    directory, file = converted(tmp_path, case)
    prompts = [ids(prompt)[0] for prompt in ([7], [3, 14, 15, 92, 65, 35])]
    options = dict(tokenizer=NoText(), max_num_seqs=2, max_num_batched_tokens=8, block_size=8, num_blocks=48)
    options["dtype"] = "float32"  # without it a CPU multiplies the file's blocks as they are
    tokens = []
    for model in (directory, file):
        with LLM(model, **options) as llm:
            tokens.append([out.outputs[0].token_ids for out in llm.generate(prompts, greedy(16))])
    assert tokens[0] == tokens[1] and len(tokens[0][0]) == 16


def test_greedy_tokens_of_blocks_that_stay(tmp_path):
    """Also those of the table, to which the head is tied: its codes are looked up, and multiplied."""
    directory, file = converted(tmp_path, "qwen3")
    options = dict(tokenizer=NoText(), dtype="float32", max_num_seqs=2, max_num_batched_tokens=8, num_blocks=48)
    tokens = []
    for model, kept in ((directory, None), (file, "gguf")):
        with LLM(model, quantization=kept, **options) as llm:
            tokens.append(llm.generate([ids([3, 14, 15])[0]], greedy(16))[0].outputs[0].token_ids)
            table = llm.params["embed"]
            assert set(table) == ({"codes", "scales", "head"} if kept else {"weight"})
    assert tokens[0] == tokens[1] and len(tokens[0]) == 16


@pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")
def test_a_cpu_multiplies_blocks_as_they_are(tmp_path):
    """Unless a dtype is asked for, or results that are those of other batches to the bit."""
    _, file = converted(tmp_path, "llama", lambda name: "Q8_0" if "attn_v" in name else "Q4_1")
    options = dict(tokenizer=NoText(), max_num_seqs=2, max_num_batched_tokens=8, num_blocks=48)

    def run(**more):
        with LLM(file, **options, **more) as llm:
            names = {str(key[-1].key) for key, _ in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(llm.params))}
            out = llm.generate([ids([3, 14, 15])[0]], SamplingParams(max_tokens=1, logprobs=20))[0].outputs[0]
            if "panels" in names:
                shape = llm.module.layers[0].mlp.down.panels.get_metadata("dense_shape")
                dense = {"layers": {0: {"mlp": {"down": {"weight": jnp.zeros(shape)}}}}}
                with pytest.raises(ValueError, match="can't be quantised to .*uint4.* a GGUF file with a dtype"):
                    llm.update_params(dense)
        return names, {token: each.logprob for token, each in out.logprobs[0].items()}

    names, found = run()
    assert "panels" in names
    for more in ({"dtype": "float32"}, {"batch_invariant": True}):
        dense_names, dense = run(**more)
        assert "panels" not in dense_names and "codes" not in dense_names
        both = dense.keys() & found.keys()
        assert len(both) >= 15 and max(abs(dense[token] - found[token]) for token in both) < 0.3  # by rounding


@pytest.mark.parametrize("dtype", sorted(QUANTISED))
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_types_that_the_package_writes(tmp_path, dtype, wanted):
    directory, file = converted(tmp_path, "llama_biases", lambda name: dtype)
    check_same(load(file, wanted), load(directory, wanted))


@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_mixed_types_on_a_mesh(tmp_path, case):
    kinds = {"attn_q": "Q4_0", "attn_v": "Q5_1", "ffn_down": "F32", "attn_qkv": "Q4_1", "token_embd": "F16"}
    directory, file = converted(tmp_path, case, lambda name: kinds.get(name.split(".")[-2], "Q8_0"))
    mesh = "tensor=2" if case == "llama" else "tensor=1"
    check_same(load(file, mesh=mesh), load(directory, mesh=mesh))


def test_divisors_of_llama_3_1_are_its_rope(tmp_path):
    model = checkpoint(tmp_path / "hf", "Llama", **WIDE, rope_parameters=LLAMA3)
    written = Converted("Llama", model)
    theirs = read_config(tmp_path / "hf", jnp.float32).cfg.layers[0].rope
    plain = dataclasses.replace(theirs, factor=1.0).inv_freq(16, 256)
    divisors = plain / theirs.inv_freq(16, 256)
    file = written.write(tmp_path / "model.gguf", {})
    written.tensors["rope_freqs.weight"] = (divisors.astype(np.float32), None)
    ours = read_config(written.write(file), jnp.float32).cfg
    np.testing.assert_allclose(ours.layers[0].rope.inv_freq(16, 256), theirs.inv_freq(16, 256), rtol=1e-6)
    assert ours.max_len == 256 and ours.layers[0].rope.amplitude == 1.0
    load(file)  # it is no parameter


def test_longrope_of_phi_3(tmp_path):
    changes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "hidden_size": 48}
    written = Converted("Phi3", checkpoint(tmp_path / "hf", "Phi3", **changes), _plain)
    theirs = read_config(tmp_path / "hf", jnp.float32).cfg
    for name, factors in zip(("short", "long"), FACTORS, strict=True):
        written.tensors[f"rope_factors_{name}.weight"] = (np.array(factors, np.float32), None)
    amplitude = theirs.layers[0].rope.amplitude
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": amplitude}
    ours = read_config(written.write(tmp_path / "model.gguf", keys), jnp.float32).cfg
    for length in (32, 256):
        got, want = (cfg.layers[0].rope.inv_freq(12, length) for cfg in (ours, theirs))
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert ours.max_len == theirs.max_len and ours.layers[0].rope.amplitude == pytest.approx(amplitude)
    del written.tensors["rope_factors_short.weight"]
    file = written.write(tmp_path / "model.gguf", keys)
    with pytest.raises(ModelFormatError, match="lacks the tensor rope_factors_short.weight"):
        read_config(file, jnp.float32)


def _plain(name):
    return "F32"


REFUSED = {
    "llama.expert_count": (8, "lacks the key llama.expert_used_count"),
    "llama.logit_scale": (0.5, "logit_scale=0.5 is not supported"),
    "llama.attention.causal": (False, "attention.causal=False is not supported"),
    "llama.attention.value_length": (8, "value_length=8 differs"),
    "llama.rope.scaling.type": ("magic", "rope.scaling.type='magic' is not supported"),
    "llama.rope.dimension_count": (8, "partial_rotary_factor=0.5 is not supported"),
    "llama.block_count": (0, "num_hidden_layers"),
    "llama.attention.head_count": (0, "num_attention_heads"),
    "llama.embedding_length": ("wide", "embedding_length='wide' must be an integer"),
    "llama.context_length": (None, "lacks the key llama.context_length"),
    "llama.attention.head_count_kv": ([2, 1, 2], "the same for all layers"),
    "llama.attention.layer_norm_rms_epsilon": (0.0, "rms_norm_eps"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_named(tmp_path, key):
    value, message = REFUSED[key]
    written = Converted("Llama", checkpoint(tmp_path / "hf", "Llama", **WIDE))
    changes = {key.removeprefix("llama."): value} | ({"rope.scaling.factor": 2.0} if "type" in key else {})
    file = written.write(tmp_path / "model.gguf", changes)
    with pytest.raises(ModelFormatError, match=f"model.gguf.*{message}"):
        read_config(file, jnp.float32)


def test_unknown_architectures_and_tensors_are_named(tmp_path):
    written = Converted("Llama", checkpoint(tmp_path / "hf", "Llama", **WIDE))
    written.tensors["blk.0.ffn_norm_exps.weight"] = (np.ones((4, 64), np.float32), None)
    with pytest.raises(ModelFormatError, match="'blk.0.ffn_norm_exps.weight' is unknown in a model of .*'llama'"):
        load(written.write(tmp_path / "model.gguf"))
    written.architecture = "mamba"
    with pytest.raises(
        ModelFormatError, match="architecture='mamba' is not supported; supported: gemma2.*mamba is recurrent"
    ):
        load(written.write(tmp_path / "model.gguf"))


def test_shapes_and_values_are_checked(tmp_path):
    written = Converted("Llama", checkpoint(tmp_path / "hf", "Llama", **WIDE), _plain)
    whole = dict(written.tensors)
    del written.tensors["blk.1.attn_v.weight"]
    with pytest.raises(ModelFormatError, match="not those of its metadata: missing model.layers.1.self_attn.v_proj"):
        load(written.write(tmp_path / "model.gguf"))
    written.tensors = whole | {"blk.1.attn_v.weight": (np.ones((16, 64), np.float32), None)}
    with pytest.raises(ModelFormatError, match=r"blk.1.attn_v.weight has shape \[16, 64\], but metadata implies"):
        load(written.write(tmp_path / "model.gguf"))
    written.tensors = whole | {"blk.1.attn_q.weight": (np.full((64, 64), np.inf, np.float32), None)}
    with pytest.raises(ModelFormatError, match="blk.1.attn_q.weight holds values that are not finite in float32"):
        load(written.write(tmp_path / "model.gguf"))
