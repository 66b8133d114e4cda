"""all-MiniLM-L6-v2, as sentence-transformers' files describe it, against transformers in float32."""

import numpy as np
import pytest

from jaxllm import LLM
from tests.real.hard_text import TEXTS

pytestmark = pytest.mark.slow

MOST_LEN = 256  # its sentence_bert_config.json


@pytest.fixture(scope="module")
def llm(real):
    with LLM(real("minilm")) as llm:
        yield llm


def embed(llm, texts) -> np.ndarray:
    return np.stack([output.outputs.data for output in llm.embed(texts)])


def test_embeddings_are_those_of_transformers(llm, real):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(real("minilm"))
    model = transformers.AutoModel.from_pretrained(real("minilm")).eval()
    texts = ["The cat sat on the mat.", "A DOG runs", "Zürich 東京 naïve ½", *(text[:300] for text in TEXTS)]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert 32 < batch["input_ids"].shape[1] <= MOST_LEN
    with torch.inference_mode():
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    means = (hidden * mask).sum(1) / mask.sum(1)
    want = torch.nn.functional.normalize(means).numpy()
    np.testing.assert_allclose(embed(llm, texts), want, atol=2e-6, rtol=0)


def test_the_nearest_text_answers_the_question(llm):
    documents = [
        "Paris is the capital and the largest city of France.",
        "The planets circle the sun in ellipses.",
        "Bread is baked from flour, water and yeast.",
    ]
    questions = ["What do I need to bake a loaf?", "Which city does the French government sit in?", "astronomy"]
    scores = embed(llm, questions) @ embed(llm, documents).T
    assert scores.argmax(1).tolist() == [2, 0, 1]
    assert [output.outputs.score for output in llm.score(questions[0], documents)] == pytest.approx(scores[0], abs=1e-5)


def test_longer_texts_are_refused_or_cut(llm):
    assert llm.engine.config.max_model_len == MOST_LEN
    with pytest.raises(ValueError, match="has 402 tokens, but max_model_len=256; .* truncate_prompt_tokens=-1"):
        llm.embed("cat " * 400)
