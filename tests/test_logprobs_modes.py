"""The distributions that log-probabilities are of, against numpy in float64."""

import numpy as np
import pytest

from jaxllm import SamplingParams
from tests.tiny import Tiny, ids, make_llm, prompts_of

PROMPT = prompts_of((6,), seed=31)[0]
WAYS = {
    "temperature": {"temperature": 0.5},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "bias": {"temperature": 2.0, "logit_bias": {3: 4.0, 5: -100.0}, "top_p": 0.95},
    "allowed": {"temperature": 1.2, "allowed_token_ids": [1, 2, 3, 4, 9]},
    "greedy": {"temperature": 0.0, "logit_bias": {3: 4.0}, "top_k": 3},
}


def distribution(raw: np.ndarray, params: SamplingParams, mode: str) -> np.ndarray:
    """Log-probabilities, of the model's own `raw` ones."""
    x = raw.astype(np.float64)
    if mode == "raw":
        return x
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    x = log_softmax(x / (params.temperature or 1.0))
    if mode == "processed" or params.temperature == 0:
        return x
    if params.min_p:
        x = log_softmax(np.where(x >= x.max() + np.log(params.min_p), x, -np.inf))
    if params.top_k > 0:
        x = log_softmax(np.where(x >= np.sort(x)[-params.top_k], x, -np.inf))
    if params.top_p < 1:
        order = np.argsort(-x)
        kept = np.searchsorted(np.cumsum(np.exp(x[order])), params.top_p) + 1
        x = log_softmax(np.where(x >= x[order[kept - 1]], x, -np.inf))
    return x


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.fixture(scope="module")
def llm(tiny):
    with make_llm(tiny.model) as llm:
        yield llm


def ask(llm, tiny: Tiny, mode: str | None, **more):
    params = SamplingParams(max_tokens=6, seed=7, ignore_eos=True, logprobs=20, logprobs_mode=mode, **more)
    (output,) = llm.generate(ids(PROMPT), params, use_tqdm=False)
    completion = output.outputs[0]
    tokens = PROMPT + completion.token_ids
    logits = np.asarray(tiny.logits(tokens), np.float64)[len(PROMPT) - 1 : -1]
    return params, completion, [log_softmax(row) for row in logits]


@pytest.mark.parametrize("mode", ["raw", "processed", "sampled"])
@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_of_what_was_asked_for(llm, tiny, way, mode):
    params, completion, raw = ask(llm, tiny, mode, **WAYS[way])
    for token, found, own in zip(completion.token_ids, completion.logprobs, raw, strict=True):
        want = distribution(own, params, mode)
        assert np.isfinite(want[token])
        for other, logprob in found.items():
            assert logprob.logprob == pytest.approx(max(want[other], -9999.0), abs=2e-5)
        best = sorted(found.values(), key=lambda each: each.rank)[:20]
        np.testing.assert_allclose(
            [each.logprob for each in best], np.maximum(np.sort(want)[::-1][:20], -9999.0), atol=2e-5
        )
        if mode == "sampled" and params.temperature:
            assert np.exp([each.logprob for each in found.values()]).sum() < 1.0001


def test_requests_with_other_modes_run_side_by_side(llm, tiny):
    alone = [ask(llm, tiny, mode, temperature=0.6, top_p=0.8)[1] for mode in ("raw", "processed", "sampled")]
    each = [
        SamplingParams(
            max_tokens=6, seed=7, ignore_eos=True, logprobs=20, logprobs_mode=mode, temperature=0.6, top_p=0.8
        )
        for mode in ("raw", "processed", "sampled")
    ]
    together = llm.generate(ids(*[PROMPT] * 3), each, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 1
    for one, output in zip(alone, together, strict=True):
        assert output.outputs[0].cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-5)


def test_the_engines_default(tiny):
    with make_llm(tiny.model, logprobs_mode="processed_logprobs") as llm:  # vLLM's name
        params, completion, raw = ask(llm, tiny, None, temperature=0.5, top_k=4)
        sampled = [distribution(own, params, "sampled")[t] for t, own in zip(completion.token_ids, raw, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(sampled), abs=1e-4)
        assert ask(llm, tiny, "raw", temperature=0.5)[1].cumulative_logprob != completion.cumulative_logprob
        (best,) = llm.generate(ids(PROMPT), SamplingParams(best_of=3, max_tokens=4, temperature=1.0), use_tqdm=False)
        assert best.outputs[0].token_ids, "it ranks by the model's own"


def test_what_is_refused(tiny):
    with pytest.raises(ValueError, match="logprobs_mode='cooked' must be one of raw, processed, sampled"):
        SamplingParams(logprobs_mode="cooked")
    for ranks in ({"best_of": 3}, {"beam_width": 2, "temperature": 0.0}):
        with pytest.raises(ValueError, match="rank completions by the model's own"):
            SamplingParams(logprobs_mode="sampled", **ranks)
    with pytest.raises(ValueError, match="logprobs_mode='raw_logits' must be one of"):
        make_llm(tiny.model, logprobs_mode="raw_logits")
