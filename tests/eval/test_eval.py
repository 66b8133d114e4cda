"""`evaluate`: perplexity, divergence and choices against numpy, transformers and sums by hand."""

import json
import math
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import processors

from jaxllm.cli.main import main
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.eval import run
from jaxllm.eval.inputs import Question
from jaxllm.eval.run import evaluate
from jaxllm.eval.scorer import Scorer
from jaxllm.models.context import StepContext
from tests import hf_models
from tests.engine.test_kv_cache_dtype import Numpy
from tests.tiny import Tiny

CONTEXT = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def letters(*, bos: bool = False) -> tokenizers.Tokenizer:
    """Each letter is a token, from 1 on; with `bos` token 0 comes before a text."""
    vocab = {"<s>": 0} | {letter: i for i, letter in enumerate(LETTERS, 1)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def text_of(length: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng(seed).choice(list(LETTERS), length))


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(letter) + 1 for letter in text]


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def scored_rows(logits, *texts: list[int], prefix: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities `[tokens, vocab]` before each token that is scored, and the tokens."""
    rows, targets = [], []
    for ids in texts:
        size = CONTEXT - len(prefix)
        for start in range(0, len(ids), size):
            chunk = [*prefix, *ids[start : start + size]]
            if len(chunk) > CONTEXT // 2:
                rows.append(log_softmax(logits(chunk))[CONTEXT // 2 - 1 : -1])
                targets += chunk[CONTEXT // 2 :]
    return np.concatenate(rows), np.asarray(targets)


@pytest.fixture(scope="module")
def models():
    """A model, and one that is a little different."""
    ours, theirs = Tiny(vocab=95), Tiny(vocab=95)
    graph, params = nnx.split(theirs.model)
    rng = np.random.default_rng(1)
    for leaf in nnx.to_flat_state(params).leaves:
        leaf.set_value(leaf.get_value() * (1 + 0.2 * rng.standard_normal(leaf.get_value().shape).astype(np.float32)))
    theirs.model = nnx.merge(graph, params)
    return ours, theirs


TEXTS = text_of(3 * CONTEXT + 11), text_of(2 * CONTEXT + 3, seed=1)


def expected(models):
    ids = [ids_of(text) for text in TEXTS]
    (q, targets), (p, _) = (scored_rows(model.logits, *ids) for model in models)
    return q, p, targets


@pytest.mark.parametrize("mesh", [None, "tensor=2"])
def test_numbers_are_those_of_numpy(models, mesh):
    """On two devices too, where the vocabulary of 95 is padded."""
    found = evaluate(
        models[0].model, texts=TEXTS, reference=models[1].model, context=CONTEXT, tokenizer=letters(), mesh=mesh
    )
    q, p, targets = expected(models)
    at = np.arange(len(targets)), targets
    kld, change = (np.exp(p) * (p - q)).sum(axis=-1), np.exp(q[at]) - np.exp(p[at])
    for scores, logprobs in ((found.model, q[at]), (found.reference, p[at])):
        assert scores.text.num_tokens == len(targets) == 3 * 8 + 3 + 2 * 8
        assert scores.text.mean_nll == pytest.approx(-logprobs.mean(), rel=1e-5)
        assert scores.text.perplexity == pytest.approx(np.exp(-logprobs.mean()), rel=1e-5)
        error = scores.text.perplexity * logprobs.std() / math.sqrt(len(targets))
        assert scores.text.perplexity_error == pytest.approx(error, rel=1e-4) and scores.choices is None
    got = found.divergence
    assert got.kld_mean == pytest.approx(kld.mean(), rel=1e-4) and got.kld_mean > 0.001
    assert got.kld_median == pytest.approx(np.median(kld), rel=1e-4)
    assert got.kld_99 == pytest.approx(np.quantile(kld, 0.99), rel=1e-4)
    assert got.kld_999 == pytest.approx(np.quantile(kld, 0.999), rel=1e-4)
    assert got.kld_max == pytest.approx(kld.max(), rel=1e-4)
    assert got.same_top == pytest.approx((q.argmax(axis=-1) == p.argmax(axis=-1)).mean()) and got.same_top < 1
    assert got.dp_mean == pytest.approx(change.mean(), rel=1e-3)
    assert got.dp_rms == pytest.approx(np.sqrt((change**2).mean()), rel=1e-4)
    assert got.log_perplexity_ratio == pytest.approx((p[at] - q[at]).mean(), rel=1e-4)


def test_a_model_does_not_differ_from_itself(models):
    model = models[0].model
    found = evaluate(model, texts=TEXTS, reference=model, context=CONTEXT, tokenizer=letters())
    assert found.model == found.reference
    got = found.divergence
    assert (got.kld_mean, got.kld_max, got.same_top, got.dp_rms, got.log_perplexity_ratio) == (0, 0, 1, 0, 0)


def test_keys_and_values_are_those_of_a_cache_in_eight_bits(models):
    """With scales of 1, beside numpy's; the reference's are its own."""
    model = models[0].model

    def rounded(ids):
        tokens = jnp.asarray([ids], jnp.int32)
        ctx = StepContext.of(tokens)
        hidden, _ = model(tokens, ctx, [Numpy(np.ones((2, 2), np.float32), "fp8") for _ in model.layers])
        return model.logits(hidden, ctx)[0]

    options = {"texts": TEXTS, "context": CONTEXT, "tokenizer": letters(), "kv_cache_dtype": "fp8"}
    found = evaluate(model, reference=model, **options)
    (q, _), (p, _) = (scored_rows(logits, *map(ids_of, TEXTS)) for logits in (rounded, models[0].logits))
    kld = (np.exp(p) * (p - q)).sum(axis=-1)
    assert found.divergence.kld_mean == pytest.approx(kld.mean(), rel=1e-3) and kld.mean() > 1e-6
    assert evaluate(model, calculate_kv_scales=True, **options).model != found.model
    with pytest.raises(ValueError, match="kv_cache_dtype='int4' is not supported; give 'int8' or 'fp8'"):
        evaluate(model, **(options | {"kv_cache_dtype": "int4"}))


def test_perplexity_is_that_of_transformers(tmp_path):
    """Each chunk begins with the token that the tokenizer puts before a text."""
    torch = pytest.importorskip("torch")
    theirs = hf_models.checkpoint(tmp_path, "Llama")

    def logits(ids):
        with torch.no_grad():
            return theirs(torch.tensor([ids])).logits[0].numpy()

    found = evaluate(tmp_path, texts=TEXTS, context=CONTEXT, tokenizer=letters(bos=True))
    rows, targets = scored_rows(logits, *map(ids_of, TEXTS), prefix=(0,))
    want = rows[np.arange(len(targets)), targets]
    assert found.model.text.num_tokens == len(targets)
    assert found.model.text.perplexity == pytest.approx(np.exp(-want.mean()), rel=1e-4)
    assert found.reference is None and found.divergence is None


QUESTIONS = [Question("the first ", ("one", "two letters and more", " three"), 1), Question("a", (" b", " cd"), 0)]


def test_choices_are_sums_by_hand(models):
    found = evaluate(models[0].model, questions=QUESTIONS, reference=models[1].model, tokenizer=letters(), context=64)
    for model, scores in zip(models, (found.model, found.reference), strict=True):
        right = normalized = 0
        for question, got in zip(QUESTIONS, scores.choices.questions, strict=True):
            sums = []
            for choice in question.choices:
                ids, start = ids_of(question.context + choice), len(question.context.rstrip())
                logprobs = log_softmax(model.logits(ids))
                sums.append(sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids))))
            np.testing.assert_allclose(got.log_likelihoods, sums, rtol=1e-5)
            each = [value / len(choice.strip()) for value, choice in zip(sums, question.choices, strict=True)]
            assert (got.answer, got.chosen) == (question.answer, int(np.argmax(sums)))
            assert got.chosen_normalized == int(np.argmax(each))
            right += got.chosen == question.answer
            normalized += got.chosen_normalized == question.answer
        assert (scores.choices.accuracy, scores.choices.accuracy_normalized) == (right / 2, normalized / 2)
        assert scores.text is None
    assert found.divergence is None


def test_the_reference_makes_room_for_the_model(tmp_path, monkeypatch):
    """Its layers are gone from the device when the model's come; each shape is compiled once."""
    hf_models.checkpoint(tmp_path, "Qwen3")
    layers = []

    class Watching(Scorer):
        def __init__(self, *args, **options):
            assert not [ref for ref in layers if ref() is not None]
            super().__init__(*args, **options)
            head = self.shape.head_indices
            layers.extend(weakref.ref(leaf) for i, leaf in enumerate(self._leaves) if i not in head)

    monkeypatch.setattr(run, "Scorer", Watching)
    found = evaluate(tmp_path, texts=TEXTS[:1], reference=tmp_path, context=CONTEXT, tokenizer=letters())
    assert layers and found.divergence.kld_max == 0


def test_what_can_not_be_evaluated_is_refused(models, tmp_path):
    model, tokenizer = models[0].model, letters()
    with pytest.raises(ValueError, match="nothing to evaluate; give texts, or questions"):
        evaluate(model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the model comes without a tokenizer; give one"):
        evaluate(model, texts=TEXTS)
    with pytest.raises(ValueError, match="context=97 is more than the 96 tokens that the model was made for; lower it"):
        evaluate(model, texts=TEXTS, tokenizer=tokenizer, context=97)
    with pytest.raises(ValueError, match=r"none of the texts has more than the 8 tokens .* lower context"):
        evaluate(model, texts=["abcdefgh"], tokenizer=tokenizer, context=CONTEXT)
    with pytest.raises(ValueError, match="vocabulary of 95 tokens and the reference one of 96, so that"):
        evaluate(model, texts=TEXTS, reference=Tiny().model, tokenizer=tokenizer, context=CONTEXT)
    with pytest.raises(ValueError, match="mesh and tensor_parallel_size=2 exclude each other"):
        evaluate(model, texts=TEXTS, tokenizer=tokenizer, mesh="tensor=2", tensor_parallel_size=2)


def test_a_damaged_model_is_refused():
    model = Tiny().model
    model.embed.weight.set_value(jnp.full(model.embed.weight.get_value().shape, jnp.nan))
    with pytest.raises(ValueError, match="tokens of the text log-probabilities that are not finite"):
        evaluate(model, texts=TEXTS, tokenizer=letters(), context=CONTEXT)


PROSE = """The engine plans a step on the host while the device computes the step before. A request waits until there is
room for it, and then its tokens are computed in chunks beside those of others. """


def test_the_command(tmp_path, capsys):
    """With the model in the package, which predicts English better than chance."""
    text, questions = tmp_path / "text.txt", tmp_path / "questions.jsonl"
    text.write_text(PROSE)
    questions.write_text(json.dumps({"context": "The end of", "choices": [" the", " zq"], "answer": 0}) + "\n\n")
    command = ["eval", "--text", str(text), "--choices", str(questions), "--context", "32"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"] == {"model": "embedded", "reference": None} and found["reference"] is None
    assert 1 < found["model"]["text"]["perplexity"] < 1000 < 4096 and found["context"] == 32
    assert found["model"]["choices"]["accuracy"] == 1.0
    assert len(found["model"]["choices"]["questions"][0]["log_likelihoods"]) == 2
    assert main(["eval", "--text", str(text), "--context", "32", "--reference", str(DEFAULT_MODEL)]) == 0
    table = capsys.readouterr().out
    assert f"perplexity            {found['model']['text']['perplexity']:.4f} ± " in table
    assert "\nKL divergence, mean   0.000000\n" in table and "\nsame most likely      100.00 %\n" in table
    questions.write_text("{}\n")
    assert main(["eval", "--choices", str(questions)]) == 2
    assert f"error: {questions}, line 1 lacks context and choices and answer; give" in capsys.readouterr().err
    assert main(["eval", "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt does not exist" in capsys.readouterr().err
    assert main(["eval"]) == 2
    assert "there is nothing to evaluate; give --text FILE, or --choices FILE" in capsys.readouterr().err
