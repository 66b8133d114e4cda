"""Models whose tokens see those after them, from directories as sentence-transformers writes them, on the whole engine:
against transformers, text by text."""

import json

import numpy as np
import pytest
import tokenizers

from jaxllm import LLM, PoolingParams
from tests.models.test_encoders import ENCODER, MODERN, ROBERTA, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_blocks=48)
TEXTS = ["a", "b c d e", "x y z " * 15, "q " * 62, "m n o p q r s t u v w x y z", "a"]


def write_tokenizer(path) -> None:
    """Letters, with what stands before a text, after it, and after a second one."""
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{letter: i for i, letter in enumerate(LETTERS, 4)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))


def write_modules(path, mode: str, *, normalize: bool = True) -> None:
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *[("Normalize", "2_Normalize")] * normalize]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": at} for kind, at in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def hidden_states(model, ids) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    ("name", "sizes", "mode"), [("BertModel", ENCODER, "mean_tokens"), ("ModernBertModel", MODERN, "cls_token")]
)
def test_embeddings_of_texts_side_by_side(tmp_path, name, sizes, mode):
    model = save(tmp_path, name, sizes)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, mode)
    with LLM(tmp_path, **SIZES) as llm:
        assert llm.engine.config.whole_prompts and not llm.engine.config.enable_prefix_caching
        outputs = llm.embed(TEXTS * 3, use_tqdm=False)
        for text, output in zip(TEXTS * 3, outputs, strict=True):
            states = hidden_states(model, llm.tokenizer.encode(text))
            wanted = states.mean(0) if mode == "mean_tokens" else states[0]
            np.testing.assert_allclose(output.outputs.data, wanted / np.linalg.norm(wanted), atol=2e-5)
            assert output.num_cached_tokens == 0
        llm.engine.scheduler.check()
        stats = llm.stats()
        assert (stats.blocks_used, stats.blocks_cached, stats.num_preemptions) == (0, 0, 0)
        with pytest.raises(ValueError, match="65 tokens"):
            llm.embed("a " * 63)
        with pytest.raises(ValueError, match="generates no text"):
            llm.generate("a")


def test_pairs_are_scored_together(tmp_path):
    """A cross-encoder reads both texts at once: the second one's tokens are of the second type."""
    model = save(tmp_path, "BertForSequenceClassification", ENCODER | {"sep_token_id": 3}, num_labels=1)
    write_tokenizer(tmp_path)
    documents = ["a b", "c d e f " * 20, "z"]
    with LLM(tmp_path, **SIZES) as llm:
        outputs = llm.score("q u e r y", documents, use_tqdm=False)
        raw = llm.score("q", "z", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        ids = [llm.tokenizer.encode_pair("q u e r y", document, 64) for document in documents]
        ids.append(llm.tokenizer.encode_pair("q", "z", 64))
    assert max(map(len, ids)) == 64, "the long one is cut"
    logits = [pair_logit(model, one) for one in ids]
    np.testing.assert_allclose(
        [output.outputs.score for output in outputs], 1 / (1 + np.exp(-np.asarray(logits[:3]))), atol=2e-5
    )
    np.testing.assert_allclose(raw[0].outputs.score, logits[3], rtol=1e-4, atol=2e-5)


def pair_logit(model, ids) -> float:
    first = ids.index(3)
    types = [int(i > first) for i in range(len(ids))]
    with torch.inference_mode():
        return float(model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0])


def test_classes_have_names_and_probabilities(tmp_path):
    names = {0: "bad", 1: "fair", 2: "good"}
    model = save(tmp_path, "RobertaForSequenceClassification", ROBERTA, num_labels=3, id2label=names)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, **SIZES) as llm:
        assert llm.engine.intake.pooler.labels == ("bad", "fair", "good")
        outputs = llm.classify(TEXTS[:3], use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=False):
            with torch.inference_mode():
                logits = model(torch.tensor([llm.tokenizer.encode(text)])).logits[0]
            np.testing.assert_allclose(output.outputs.probs, logits.softmax(-1).numpy(), atol=2e-5)


def test_a_step_holds_a_prompt_or_the_engine_says_so(tmp_path):
    save(tmp_path, "BertModel", ENCODER)
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="computed in one step"):
        LLM(tmp_path, **SIZES | {"max_num_batched_tokens": 32})
