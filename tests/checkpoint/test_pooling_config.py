"""What model directories say of pooling, in the forms that sentence-transformers has written over the years."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.checkpoint.config import ModelSpec
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.pooling_config import read_pooling
from jaxllm.errors import ModelFormatError
from jaxllm.models import bert, qwen3
from jaxllm.models.layers import LayerSpec, PlainMLP
from tests.checkpoints import write_config

EMBED = 16
SIZES = dict(vocab=24, embed=EMBED, heads=2, kv_heads=2, head_dim=8, mlp=20, max_len=64)
OLD = "sentence_transformers.models."
NEW = "sentence_transformers.base.modules."
POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
OLD_MEAN = {
    "word_embedding_dimension": EMBED,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}


def spec(module=bert, **changes):
    cfg = module.Config(**SIZES, layers=(LayerSpec(feed_forward=PlainMLP),), **changes)
    return ModelSpec(module=module, cfg=cfg, eos_token_ids=())


def modules(path, *kinds):
    """A `modules.json` and the modules' directories; the transformer is first, in the model's own."""
    entries = []
    for i, kind in enumerate(kinds):
        where = f"{i}_{kind.rpartition('.')[2]}" if i else ""
        (path / where).mkdir(exist_ok=True)
        entries.append({"idx": i, "name": str(i), "path": where, "type": kind})
    (path / "modules.json").write_text(json.dumps(entries))


def write(path, name, content):
    (path / name).write_text(json.dumps(content))


def dense(path, width, out, *, bias=True, **changes):
    config = {"in_features": width, "out_features": out, "bias": bias} | changes
    write(path, "config.json", {"activation_function": "torch.nn.modules.linear.Identity"} | config)
    rng = np.random.default_rng(out)
    tensors = {"linear.weight": rng.normal(size=(out, width)).astype(np.float32)}
    if bias:
        tensors["linear.bias"] = rng.normal(size=out).astype(np.float32)
    save_file(tensors, path / "model.safetensors")
    return tensors


@pytest.fixture
def folder(tmp_path):
    write_config(tmp_path)
    return tmp_path


def read(folder, of=None):
    return read_pooling(open_checkpoint(folder), of or spec())


def test_old_and_new_forms(folder):
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Normalize")
    write(folder, "1_Pooling/config.json", OLD_MEAN)
    write(folder, "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": True})
    found = read(folder)
    assert (found.pooling, found.normalize, found.max_length, found.lowercase) == ("mean", True, 48, True)
    modules(folder, f"{NEW}transformer.Transformer", POOLING)
    for mode, ours in {"lasttoken": "last", "cls": "cls", "mean": "mean"}.items():
        write(folder, "1_Pooling/config.json", {"embedding_dimension": EMBED, "pooling_mode": mode})
        write(folder, "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
        found = read(folder)
        assert (found.pooling, found.normalize, found.max_length, found.lowercase) == (ours, False, 64, False)


def test_without_files_of_sentence_transformers(folder):
    found = read(folder)
    assert (found.pooling, found.normalize, found.dense, found.dim(EMBED)) == ("mean", True, (), EMBED)
    assert (found.prompts, found.default_prompt_name, found.similarity) == ({}, None, "cosine")
    assert read(folder, spec(qwen3)).pooling == read(folder, spec(qwen3, task="embed")).pooling == "last"


def test_dense_layers_then_the_cut_then_the_norm(folder):
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Dense", f"{OLD}Dense", f"{OLD}Normalize")
    write(folder, "1_Pooling/config.json", OLD_MEAN)
    one = dense(folder / "2_Dense", EMBED, 40, activation_function="torch.nn.modules.activation.Tanh")
    two = dense(folder / "3_Dense", 40, 12, bias=False)
    found = read(folder)
    assert (found.dim(EMBED), [layer.bias is None for layer in found.dense]) == (12, [False, True])
    x = np.random.default_rng(0).normal(size=(5, EMBED)).astype(np.float32)
    want = np.tanh(x @ one["linear.weight"].T + one["linear.bias"]) @ two["linear.weight"].T
    np.testing.assert_allclose(found.finish(x, normalize=False), want, atol=1e-5)
    cut = found.finish(x, dimensions=4)
    np.testing.assert_allclose(cut, want[:, :4] / np.linalg.norm(want[:, :4], axis=1, keepdims=True), atol=1e-6)
    assert cut.dtype == np.float32 and np.isfinite(found.finish(np.zeros_like(x), dimensions=2)).all()


@pytest.mark.parametrize("name", ["Identity", "Tanh", "ReLU", "Sigmoid", "SiLU", "GELU", "Softmax"])
def test_activations_are_those_of_torch(folder, name):
    torch = pytest.importorskip("torch")
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Dense")
    write(folder, "1_Pooling/config.json", OLD_MEAN)
    place = "linear" if name == "Identity" else "activation"
    dense(folder / "2_Dense", EMBED, EMBED, bias=False, activation_function=f"torch.nn.modules.{place}.{name}")
    (layer,) = read(folder).dense
    x = np.random.default_rng(0).normal(size=(3, EMBED)).astype(np.float32)
    theirs = getattr(torch.nn, name)(**({"dim": -1} if name == "Softmax" else {}))
    np.testing.assert_allclose(layer(x), theirs(torch.tensor(x @ layer.weight)).numpy(), atol=1e-6)


def test_prompts_similarity_and_matryoshka(folder):
    prompts = {"query": "query: ", "document": ""}
    given = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    write(folder, "config_sentence_transformers.json", given)
    write_config(folder, matryoshka_dimensions=[8, 4])
    found = read(folder)
    assert (found.prompts, found.default_prompt_name, found.similarity) == (prompts, "query", "dot")
    assert (found.is_matryoshka, found.matryoshka_dimensions) == (True, (4, 8))
    write_config(folder, is_matryoshka=True)
    assert (read(folder).is_matryoshka, read(folder).matryoshka_dimensions) == (True, ())
    assert read_pooling(open_checkpoint(folder), spec(), {"is_matryoshka": False}).is_matryoshka is False


@pytest.mark.parametrize(
    ("labels", "problem_type", "hf", "new", "activation"),
    [
        (1, None, {}, {}, "sigmoid"),
        (3, None, {}, {}, "softmax"),
        (1, "regression", {}, {}, "identity"),
        (3, "multi_label_classification", {}, {}, "sigmoid"),
        (1, None, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, "identity"),
        (1, None, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, "identity"),
        (3, None, {}, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_what_scores_become(folder, labels, problem_type, hf, new, activation):
    write_config(folder, **hf)
    write(folder, "config_sentence_transformers.json", new)
    names = tuple(map(str, range(labels)))
    found = read(folder, spec(task="classify", labels=names, problem_type=problem_type))
    assert (found.activation, found.pooling) == (activation, "cls")
    scores = np.asarray([[-100.0, 0.0, 100.0][:labels]], np.float32)
    got = found.activate(scores)
    want = {"identity": scores, "sigmoid": 1 / (1 + np.exp(-scores.astype(np.float64)))}
    np.testing.assert_allclose(got, want.get(activation, [[0, 0, 1]]), atol=1e-6)


def test_modules_of_a_classifier(folder):
    classifier = spec(task="classify", labels=("a",))
    modules(folder, f"{NEW}transformer.Transformer")
    assert read(folder, classifier).pooling == "cls"
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling")
    with pytest.raises(ModelFormatError, match="a classifier's is a Transformer alone"):
        read(folder, classifier)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}LSTM"], "a module 'sentence_transformers.models.LSTM'"),
        ([f"{OLD}Transformer", f"{OLD}Pooling", "evil.Dense"], "a module 'evil.Dense', which is not supported"),
        ([f"{OLD}Transformer"], "has the modules Transformer; supported are"),
        ([f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Normalize", f"{OLD}Dense"], "Normalize, Dense; supported are"),
        ([f"{OLD}Transformer", f"{OLD}Dense", f"{OLD}Pooling"], "Dense, Pooling; supported are"),
    ],
)
def test_modules_that_are_refused(folder, kinds, message):
    modules(folder, *kinds)
    with pytest.raises(ModelFormatError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        (OLD_MEAN | {"pooling_mode_cls_token": True}, "pools by .*cls_token.*mean_tokens.*supported is one of"),
        (OLD_MEAN | {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "pools by .*max_tokens"),
        ({"pooling_mode": "weightedmean"}, "pools by .*weightedmean.*supported is one of .*'lasttoken'"),
        ({"pooling_mode": ["mean", "cls"]}, "pools by"),
        ({}, "pools by"),
        (OLD_MEAN | {"include_prompt": False}, "leaves the prompt out of the mean"),
    ],
)
def test_poolings_that_are_refused(folder, pooling, message):
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling")
    write(folder, "1_Pooling/config.json", pooling)
    with pytest.raises(ModelFormatError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("width", "changes", "message"),
    [
        (EMBED + 1, {}, "takes vectors of 17 features, but gets some of 16"),
        (EMBED, {"out_features": 9}, "holds the tensors"),
        (EMBED, {"out_features": 0}, "out_features=0 must be"),
        (EMBED, {"activation_function": "os.system"}, "activation 'os.system', which is not supported"),
        (EMBED, {"activation_function": "torch.nn.modules.activation.PReLU"}, "PReLU', which is not supported"),
        (EMBED, {"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings' is not supported"),
    ],
)
def test_dense_layers_that_are_refused(folder, width, changes, message):
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Dense")
    write(folder, "1_Pooling/config.json", OLD_MEAN)
    dense(folder / "2_Dense", width, 8, **changes)
    with pytest.raises(ModelFormatError, match=message):
        read(folder)


def test_dense_layers_whose_values_are_not_finite(folder):
    modules(folder, f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Dense")
    write(folder, "1_Pooling/config.json", OLD_MEAN)
    tensors = dense(folder / "2_Dense", EMBED, 8)
    tensors["linear.bias"][3] = np.nan
    save_file(tensors, folder / "2_Dense/model.safetensors")
    with pytest.raises(ModelFormatError, match="holds values that are not finite"):
        read(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {}, "not a JSON list"),
        ("modules.json", [{"type": f"{OLD}Transformer"}], "has no type and path"),
        ("modules.json", [{"type": f"{OLD}Transformer", "path": "../other"}], "names the directory '../other'"),
        ("modules.json", [{"type": f"{OLD}Transformer", "path": ".."}], "names the directory '..'"),
        ("modules.json", [{}] * 17, "17 modules; at most 16"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length=0 must be"),
        ("sentence_bert_config.json", {"do_lower_case": 1}, "do_lower_case=1 must be true or false"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "must give each name a text"),
        ("config_sentence_transformers.json", {"prompts": dict.fromkeys(map(str, range(1001)), "")}, "1001 prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "is not in its prompts"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "cos"}, "similarity_fn_name='cos'"),
        ("config.json", {"matryoshka_dimensions": 64}, "must be a list of numbers"),
        ("config.json", {"matryoshka_dimensions": [0]}, "matryoshka_dimensions=0 must be"),
    ],
)
def test_files_are_checked(folder, name, content, message):
    write(folder, name, content)
    with pytest.raises(ModelFormatError, match=message):
        read(folder)


def test_a_model_that_is_no_directory_has_none_of_these_files(folder):
    modules(folder, f"{OLD}LSTM")
    checkpoint = open_checkpoint(folder)
    checkpoint.path = folder / "model.gguf"
    found = read_pooling(checkpoint, spec(qwen3))
    assert (found.pooling, found.normalize) == ("last", True)
