"""The engine's beams are those of transformers' `generate`, over the same random checkpoint: tokens and scores."""

import random

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.hf_models import checkpoint
from tests.tiny import clean, ids

VOCAB, EOS = 48, (1, 2)
PROMPT_LENS = (1, 2, 4, 7, 20, 40)  # a step takes 16 tokens


class Numbers:
    """A tokenizer whose text is the ids."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """transformers' model, and the directory that it is in."""
    torch = pytest.importorskip("torch")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    path = tmp_path_factory.mktemp("beams")
    yield checkpoint(path, "Llama", seed=3, vocab_size=VOCAB, eos_token_id=list(EOS), num_hidden_layers=2), path
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def llm(theirs):
    options = dict(max_num_seqs=8, max_num_batched_tokens=16, block_size=4, num_blocks=96)
    with LLM(theirs[1], tokenizer=Numbers(), **options) as llm:
        yield llm


def search(model, prompt, params: SamplingParams, bad_words) -> list[tuple[list[int], float]]:
    """What transformers finds: tokens and score of each sequence."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    allowed = params.allowed_token_ids
    eos = params.stop_token_ids + ([] if params.ignore_eos else list(EOS))
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            pad_token_id=0,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            length_penalty=params.length_penalty,
            do_sample=False,
            early_stopping=params.early_stopping,
            repetition_penalty=params.repetition_penalty,
            eos_token_id=eos or None,
            bad_words_ids=bad_words or None,
            prefix_allowed_tokens_fn=None if allowed is None else lambda batch, tokens: allowed,
            return_dict_in_generate=True,
            output_scores=True,
            custom_generate=transformers.GenerationMixin._beam_search if params.beam_width == 1 else None,
        )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    found = [row[len(prompt) :][:n] for row, n in zip(out.sequences.tolist(), lengths, strict=True)]
    return list(zip(found, out.sequences_scores.tolist(), strict=True))


def score(model, prompt, tokens, length_penalty: float) -> float:
    """Of any continuation, computed in one go."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1], dim=-1)
    return float(rows[range(len(tokens)), tokens].double().sum()) / len(tokens) ** length_penalty


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * (1 + abs(b))


def assert_same(model, prompt, params, out, want, *, altered: bool) -> None:
    """The same sequences in one order; another one only if its score is as good as equal. The engine's are the model's
    log-probabilities, so that scores can be compared where nothing is altered."""
    assert out.error is None and len(out.outputs) == len(want)
    for completion, (tokens, expected) in zip(out.outputs, want, strict=True):
        if altered:
            assert completion.token_ids == tokens
            continue
        found = completion.cumulative_logprob / len(completion.token_ids) ** params.length_penalty
        assert close(found, expected)
        if completion.token_ids != tokens:
            assert close(score(model, prompt, completion.token_ids, params.length_penalty), expected)


def compare(llm, model, cases) -> list:
    """All cases at once here, one after the other there. A case is (prompt, params, bad words as ids)."""
    outs = llm.generate(ids(*(prompt for prompt, *_ in cases)), [params for _, params, _ in cases])
    for (prompt, params, bad_words), out in zip(cases, outs, strict=True):
        altered = bool(bad_words or params.allowed_token_ids or params.repetition_penalty != 1)
        assert_same(model, prompt, params, out, search(model, prompt, params, bad_words), altered=altered)
    while llm.engine.has_work():
        assert llm.engine.step() == []  # the step after the last end
    clean(llm)
    return outs


def make_prompt(rng: random.Random) -> list[int]:
    """Without the padding token, whose embedding is zero: all logits after it alone are equal."""
    return [rng.randrange(1, VOCAB) for _ in range(rng.choice(PROMPT_LENS))]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("num_stops", [0, 1, 2, 16])
def test_equals_transformers(llm, theirs, num_stops, early_stopping):
    rng, cases = random.Random(f"{num_stops}{early_stopping}"), []
    for width in (1, 2, 3, 4, 5, 6):
        for length_penalty in rng.sample([-1.0, 0.0, 1.0, 2.0], 2):
            fields = {"ignore_eos": True, "stop_token_ids": rng.sample(range(VOCAB), num_stops)}
            if num_stops == 2 and rng.random() < 0.5:
                fields = {}  # the model's own two
            max_tokens = rng.randint(1, 14)
            params = SamplingParams(
                beam_width=width,
                n=rng.randint(1, width),
                length_penalty=length_penalty,
                max_tokens=max_tokens,
                early_stopping=early_stopping,
                min_tokens=rng.choice([0, 0, 0, max_tokens // 2]),
                **fields,
            )
            cases.append((make_prompt(rng), params, []))
    outs = compare(llm, theirs[0], cases)
    ended = [c.finish_reason for out in outs for c in out.outputs]
    assert ended.count("length") > 0
    if num_stops != 1:  # one id alone is not often met
        assert (ended.count("stop") > 0) == (num_stops > 0)


@pytest.mark.parametrize("what", ["repetition_penalty", "bad_words", "allowed_token_ids"])
def test_equals_transformers_where_scores_are_altered(llm, theirs, what):
    rng, cases = random.Random(what), []
    for width in (1, 2, 3, 4, 6):
        for stops in ([], rng.sample(range(VOCAB), 3)):
            prompt, bad_words, fields = make_prompt(rng), [], {}
            if what == "repetition_penalty":
                fields[what] = rng.choice([0.7, 1.3, 2.0])
            elif what == "allowed_token_ids":
                fields[what] = sorted(rng.sample(range(VOCAB), 9))  # transformers makes up beams if they are too few
            else:
                bad_words = [rng.sample(range(VOCAB), rng.choice([1, 2, 2, 3])) for _ in range(90)]
                # There, prefixes are found in the prompt too, and an end of sequence is no bad word.
                bad_words = [w for w in bad_words if w not in [[i] for i in stops] and w[:1] != prompt[-1:]]
                fields[what] = [" ".join(map(str, word)) for word in bad_words]
            params = SamplingParams(
                beam_width=width, n=width, max_tokens=10, ignore_eos=True, stop_token_ids=stops, **fields
            )
            cases.append((prompt, params, bad_words))
    compare(llm, theirs[0], cases)


def test_a_shared_beginning_changes_nothing(llm, theirs):
    """The second search finds the first one's blocks in the prefix cache."""
    prompt = list(np.random.default_rng(0).integers(1, VOCAB, 21).tolist())
    params = SamplingParams(beam_width=4, n=4, max_tokens=8)
    for more in ([], [5], [5, 6, 7, 8]):
        (out,) = llm.generate(ids(prompt + more), params)
        assert (out.num_cached_tokens > 0) == bool(more)
        want = search(theirs[0], prompt + more, params, [])
        assert_same(theirs[0], prompt + more, params, out, want, altered=False)
    while llm.engine.has_work():
        assert llm.engine.step() == []
    clean(llm)
