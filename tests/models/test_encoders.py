"""Models that embed or classify texts, against transformers: hidden states and scores of whole prompts, with caches
that keep nothing, and with paged ones in one step of several rows."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import tokenizers.models
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint.config import read_config, read_spec
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.errors import ModelFormatError
from jaxllm.models import bert, modernbert, qwen3, roberta, transformer
from jaxllm.models.cache import Dense, Paged
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, PlainMLP, Rope
from jaxllm.models.registry import model_for
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape
from jaxllm.sharding.mesh import make_mesh
from tests.hf_models import GEMMA, SIZES
from tests.seldom import all_but

VOCAB, LENGTHS, BLOCK, TOKENS = 160, (1, 37, 5, 37), 16, 96  # TOKENS: of a step, padding included
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
ROBERTA = ENCODER | {"pad_token_id": 1, "type_vocab_size": 1}
MODERN = ENCODER | {"local_attention": 12, "sep_token_id": 3, "cls_token_id": 2, "bos_token_id": 2, "eos_token_id": 3}
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
DECODER = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
BOTH_SIDES = DECODER | GEMMA | {"use_bidirectional_attention": True, "sliding_window": 13, "sliding_window_pattern": 3}
BOTH_SIDES |= {"final_logit_softcapping": None}
MODELS = {
    "bert": ("BertModel", ENCODER),
    "bert_tanh": ("BertModel", ENCODER | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "roberta": ("RobertaModel", ROBERTA),
    "xlm_roberta": ("XLMRobertaModel", ROBERTA),
    "bert_masked_lm": ("BertForMaskedLM", ENCODER),
    "roberta_masked_lm": ("RobertaForMaskedLM", ROBERTA),
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert_masked_lm": ("ModernBertForMaskedLM", MODERN | BIASES),
    "embedding_gemma": ("Gemma3TextModel", BOTH_SIDES),
    "qwen3": ("Qwen3Model", DECODER),
    "mistral": ("MistralModel", DECODER | {"sliding_window": 8}),
    "llama": ("LlamaModel", DECODER),
}
CLASSIFIERS = {
    "bert": ("BertForSequenceClassification", ENCODER, 3),
    "roberta": ("RobertaForSequenceClassification", ROBERTA, 1),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", ROBERTA, 2),
    "modernbert": ("ModernBertForSequenceClassification", MODERN, 3),
    "modernbert_mean": ("ModernBertForSequenceClassification", MODERN | BIASES | {"classifier_pooling": "mean"}, 1),
    "qwen3": ("Qwen3ForSequenceClassification", DECODER, 1),
    "llama": ("LlamaForSequenceClassification", DECODER, 4),
}


def save(path, name, sizes, **fields):
    """A random model of transformers, saved as it does, with a tokenizer's special tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(len(name))
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes, **fields)).eval()
    with torch.no_grad():
        for what, weight in model.named_parameters():
            if "norm" in what.lower() or what.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return model


def load(path, mesh=None, **options):
    spec = read_spec(open_checkpoint(path), jnp.float32, **options)
    graph = nnx.graphdef(transformer.abstract(spec.module.Model, spec.cfg))
    return nnx.merge(graph, load_params(open_checkpoint(path), spec, abstract_params(spec), make_mesh(mesh)))


def rows(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]


def paged_hidden(model, prompts, placement=None):
    """Final hidden states of each prompt, all in one step whose pool and padding are poisoned."""
    cfg, placement = model.cfg, placement or Placement.default()
    lens = [len(prompt) for prompt in prompts]
    blocks = [-(-n // BLOCK) for n in lens]
    tables = np.full((len(lens) + 1, max(blocks)), 10**6)
    at = iter(np.random.default_rng(1).permutation(sum(blocks) + 2))
    for table, count in zip(tables, blocks, strict=False):
        table[:count] = [next(at) for _ in range(count)]
    num_ones = next((i for i, n in enumerate(lens) if n > 1), len(lens))
    ints = tables, np.cumsum([0, *lens, 0]), [*lens, 77], [num_ones, len(lens)]
    batch = PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))
    pad = TOKENS - sum(lens)
    tokens = jnp.asarray(np.concatenate([*prompts, np.zeros(pad)]), jnp.int32)
    positions = jnp.asarray(np.concatenate([*map(np.arange, lens), np.zeros(pad)]), jnp.int32)
    index = jnp.asarray(np.concatenate([np.repeat(np.arange(len(lens)), lens), np.zeros(pad)]), jnp.int32)
    ctx = StepContext(positions, index, placement=placement)
    pool = jnp.full(kv_shape(sum(blocks) + 2, BLOCK, cfg.kv_heads, cfg.head_dim, platform="cpu"), jnp.nan)
    graph, params = nnx.split(model)

    def forward(params, tokens, ctx, batch):
        caches = [Paged(pool, batch, placement)] * cfg.num_layers
        return nnx.merge(graph, params)(tokens, ctx, caches)[0]

    hidden = np.asarray(_jit(forward)(params, tokens, ctx, batch))
    return np.split(hidden[: sum(lens)], np.cumsum(lens)[:-1])


def dense_hidden(model, prompts):
    graph, params = nnx.split(model)

    def forward(params, tokens):
        model = nnx.merge(graph, params)
        return model(tokens, StepContext.of(tokens), [Dense()] * model.cfg.num_layers)[0]

    return np.asarray(_jit(forward)(params, jnp.asarray(prompts, jnp.int32)))


_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def close(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", all_but(("bert", "modernbert", "xlm_roberta", "embedding_gemma"), MODELS))
def test_hidden_states_are_those_of_transformers(tmp_path, case):
    torch, (name, sizes) = pytest.importorskip("torch"), MODELS[case]
    theirs = save(tmp_path, name, sizes)
    theirs = getattr(theirs, theirs.base_model_prefix) if "MaskedLM" in name else theirs
    model, prompts = load(tmp_path), rows()
    assert model.cfg.task == "embed" and not hasattr(model, "lm_head")
    with torch.no_grad():
        want = [theirs(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]
    for got, expected in zip(paged_hidden(model, prompts), want, strict=True):
        close(got, expected)
    same = [i for i, n in enumerate(LENGTHS) if n == 37]
    close(dense_hidden(model, [prompts[i] for i in same]), np.stack([want[i] for i in same]))


def with_pairs(prompts, sizes):
    """As a tokenizer joins texts, of `prompts` as pairs: with separators, and types where the model has them."""
    bos, sep = (0, 2) if sizes["pad_token_id"] == 1 else (2, 3)
    between = [sep, sep] if sizes["pad_token_id"] == 1 else [sep]
    first = [4, 5, 6]
    ids = [[bos, *first, *between, *prompt[: 37 - 8], sep] for prompt in prompts]
    types = [[0] * (len(first) + 2) + [1] * (len(one) - len(first) - 2) for one in ids]
    return ids, types if sizes.get("type_vocab_size", 2) == 2 and "local_attention" not in sizes else None


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_scores_are_those_of_transformers(tmp_path, case):
    torch, (name, sizes, num_labels) = pytest.importorskip("torch"), CLASSIFIERS[case]
    theirs = save(tmp_path, name, sizes, num_labels=num_labels)
    options = {"overrides": {"sep_token_id": 3}} if case == "bert" else {}  # there is no tokenizer
    model, prompts, types = load(tmp_path, **options), rows(), None
    assert model.cfg.labels == tuple(f"LABEL_{i}" for i in range(num_labels))
    if "kv_heads" not in sizes and "num_key_value_heads" not in sizes:
        prompts, types = with_pairs(prompts, sizes)
    given = [{"token_type_ids": torch.tensor([one])} for one in types] if types else [{}] * len(prompts)
    with torch.no_grad():
        want = [theirs(torch.tensor([p]), **more).logits[0].numpy() for p, more in zip(prompts, given, strict=True)]
    pools = {"last": lambda x: x[-1], "cls": lambda x: x[0], "mean": lambda x: x.mean(axis=0)}
    pooled = np.stack([pools[model.cfg.pooling](hidden) for hidden in paged_hidden(model, prompts)])
    scores = model.head(jnp.asarray(pooled), StepContext.of(jnp.zeros(1, jnp.int32)))
    assert scores.dtype == jnp.float32 and scores.shape == (len(prompts), num_labels)
    close(scores, np.stack(want))


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_scores_by_two_of_its_tokens(tmp_path, tied):
    """As Qwen3-Reranker does."""
    torch = pytest.importorskip("torch")
    theirs = save(tmp_path, "Qwen3ForCausalLM", DECODER | {"tie_word_embeddings": tied})
    vocab = {"no": 7, "yes": 9} | {f"t{i}": i for i in range(VOCAB) if i not in (7, 9)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(tmp_path / "tokenizer.json"))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    model, prompts = load(tmp_path, overrides=overrides), rows()
    assert (model.cfg.label_tokens, model.cfg.labels, model.cfg.pooling) == ((7, 9), ("LABEL_0",), "last")
    with torch.no_grad():
        logits = np.stack([theirs(torch.tensor([prompt])).logits[0, -1].numpy() for prompt in prompts])
    pooled = np.stack([hidden[-1] for hidden in paged_hidden(model, prompts)])
    scores = model.head(jnp.asarray(pooled), StepContext.of(jnp.zeros(1, jnp.int32)))
    close(scores, logits[:, 9:10] - logits[:, 7:8])
    for given in (["no", "maybe"], ["no"], "no"):
        with pytest.raises(ModelFormatError, match="must be two tokens of the tokenizer"):
            load(tmp_path, overrides=overrides | {"classifier_from_token": given})
    with pytest.raises(ModelFormatError, match="classifier_from_token is for language models"):
        load(tmp_path, overrides=overrides | {"architectures": ["RobertaForSequenceClassification"]})


def test_kinds_of_attention_agree(tmp_path):
    """The reference and what the engine takes on a CPU, with windows to both sides."""
    save(tmp_path, "ModernBertModel", MODERN)
    model, prompts = load(tmp_path), rows(3)
    for got, want in zip(paged_hidden(model, prompts), paged_hidden(model, prompts, Placement()), strict=True):
        close(got, want)


@pytest.mark.parametrize("case", ["bert", "modernbert"])
def test_two_devices_say_what_one_says(tmp_path, case):
    name, sizes = MODELS[case]
    save(tmp_path, name, sizes)
    prompts, split = rows(4), load(tmp_path, "tensor=2")
    assert len(split.layers[0].attn.qkv.weight[...].sharding.device_set) == 2
    both = paged_hidden(split, prompts, Placement(make_mesh("tensor=2")))
    for got, want in zip(both, paged_hidden(load(tmp_path), prompts), strict=True):
        close(got, want)


def test_blocks_of_both_sided_layers_are_kept_whole():
    assert {spec.window for of_layer in tiny(modernbert).cache_specs() for spec in of_layer} == {None}


def test_token_types_begin_after_the_first_separator_of_each_text():
    tokens = jnp.asarray([2, 9, 3, 8, 3, 2, 3, 3, 2, 8, 2, 3, 3, 7, 0, 0], jnp.int32)
    positions = jnp.asarray([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0], jnp.int32)
    want = [0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0]
    assert bert.token_types(tokens, positions, 3).tolist() == want
    batch = jnp.asarray([[2, 9, 3, 8], [2, 3, 8, 3]], jnp.int32)
    assert bert.token_types(batch, StepContext.of(batch).positions, 3).tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


SMALL = dict(vocab=32, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=24, max_len=40)
PLAIN = (LayerSpec(feed_forward=PlainMLP),) * 2
SPECS = tuple(modernbert.EncoderSpec(window=4, rope=Rope(theta=1e4), normalises_input=i > 0) for i in range(2))
CONFIGS = {
    bert: bert.Config(**SMALL, layers=PLAIN),
    roberta: roberta.Config(**SMALL, layers=PLAIN, position_offset=2, token_types=1),
    modernbert: modernbert.Config(**SMALL, layers=SPECS),
}


def tiny(module, **changes):
    cfg = dataclasses.replace(CONFIGS[module], **changes)
    assert model_for(cfg) is module.Model
    return transformer.abstract(module.Model, cfg)


@pytest.mark.parametrize("module", CONFIGS, ids=lambda module: module.__name__)
def test_dtypes(module):
    separator = {"sep_token_id": 3} if module is bert else {}
    graph, params = nnx.split(tiny(module, dtype=jnp.bfloat16, task="classify", labels=("no", "yes"), **separator))

    def forward(params, tokens, pool):
        model, ctx, rows = nnx.merge(graph, params), StepContext.of(tokens), jnp.zeros(2, jnp.int32)
        assert not hasattr(model, "logits")
        batch = PagedBatch(jnp.zeros((2, 3), jnp.int32), jnp.zeros(3, jnp.int32), rows, rows)
        return model(tokens, ctx, [Paged(pool, batch)] * 2)[0], model.head(jnp.zeros((3, 16)), ctx)

    pool = jax.ShapeDtypeStruct(kv_shape(6, 4, 2, 8, platform="cpu"), jnp.bfloat16)
    hidden, scores = jax.eval_shape(forward, params, jax.ShapeDtypeStruct((6,), jnp.int32), pool)
    assert (hidden.dtype, scores.dtype, scores.shape) == (jnp.bfloat16, jnp.float32, (3, 2))


def test_a_decoder_of_another_task_has_no_logits():
    cfg = qwen3.Config(**SMALL, layers=(LayerSpec(rope=Rope(theta=1e4)),), task="embed")
    model = transformer.abstract(qwen3.Model, cfg)
    with pytest.raises(ValueError, match="task is 'embed': it has no head"):
        model.logits(jnp.zeros((1, 16)), StepContext.of(jnp.zeros(1, jnp.int32)))


def test_configurations_that_do_not_go_together():
    fields = SMALL | {"layers": (LayerSpec(rope=Rope(theta=1e4)),)}
    for changes, message in (
        ({"causal": False}, "can't generate; give task='embed'"),
        ({"task": "score"}, "task='score' is unknown"),
        ({"task": "classify"}, "classify needs some"),
        ({"labels": ("a",)}, "others take none"),
    ):
        with pytest.raises(ValueError, match=message):
            qwen3.Config(**fields, **changes)


def edit(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_model_saved_without_its_head_may_be_named_after_one(tmp_path):
    """As Qwen3-Embedding is: tied embeddings, tensors without prefix."""
    save(tmp_path, "Qwen3Model", DECODER)
    edit(tmp_path, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    assert load(tmp_path).cfg.task == "generate"
    assert load(tmp_path, task="embed").cfg.task == "embed"
    edit(tmp_path, is_causal=False)
    model = load(tmp_path)
    assert (model.cfg.task, model.cfg.causal) == ("embed", False)


def test_a_classifier_may_embed_and_nothing_else(tmp_path):
    save(tmp_path, "LlamaForSequenceClassification", DECODER, id2label={0: "bad", 1: "good"})
    assert load(tmp_path).cfg.labels == ("bad", "good")
    model = load(tmp_path, task="embed")
    assert model.cfg.labels == () and not hasattr(model, "score")
    with pytest.raises(ModelFormatError, match="task='generate' is not what Llama.* is for 'classify' or 'embed'"):
        load(tmp_path, task="generate")


def test_bert_needs_to_know_what_separates_texts(tmp_path):
    save(tmp_path, "BertForSequenceClassification", ENCODER)
    with pytest.raises(ModelFormatError, match="tokenizer.json is missing"):
        read_config(tmp_path, jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supported"),
        ({"type_vocab_size": 0}, "type_vocab_size=0 must be an integer"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps='x'"),
        ({"sep_token_id": -1}, "sep_token_id=-1 must be"),
        ({"id2label": {"0": "a", "2": "b"}}, "must give each number from 0 to 1 a string"),
        ({"id2label": []}, "id2label holds"),
        ({"problem_type": "guess"}, "problem_type='guess' is unknown"),
        ({"num_labels": 0, "id2label": None}, "num_labels=0 must be in"),
        ({"pad_token_id": True}, "pad_token_id=True"),
    ],
)
def test_what_a_config_says_is_checked(tmp_path, changes, message):
    hf = ENCODER | {"architectures": ["BertForSequenceClassification"], "sep_token_id": 3} | changes
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ModelFormatError, match=message):
        read_config(tmp_path, jnp.float32)


def test_tensors_that_a_head_lacks_are_missed(tmp_path):
    save(tmp_path, "XLMRobertaForSequenceClassification", ROBERTA)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["classifier.out_proj.bias"]
    save_file(tensors | {"roberta.odd": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match="missing classifier.out_proj.bias, unexpected roberta.odd"):
        load(tmp_path)
