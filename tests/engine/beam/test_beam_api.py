"""What users say of beams and of `best_of`, and what they get: parameters, outputs, the command, lines of a batch."""

import json
import types

import pytest

import jaxllm
from jaxllm import LLM, BeamSearchOutput
from jaxllm import BeamSearchParams as CheckedBeamSearchParams
from jaxllm.cli import generate
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.sampling_params import MAX_BEAM_WIDTH
from jaxllm.text.foreign_tokenizer import wrap
from tests.engine.test_step_contract import Letters
from tests.fake_llm import Folder, install, output
from tests.plain_search import beam_search, cumulative_logprob
from tests.test_sampling_params import as_users_have_it, plain

SamplingParams, BeamSearchParams = plain.SamplingParams, plain.BeamSearchParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of=2 is less than n=3; raise it, or lower n"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 with temperature=0 would choose among equal samples"),
        ({"best_of": 4, "beam_width": 4}, "best_of=4 and beam_width=4 exclude each other"),
        ({"n": 3, "beam_width": 2}, "n=3 is more than beam_width=2; lower it, or raise beam_width"),
        ({"length_penalty": 0.5}, "length_penalty=0.5 is for beam search; give beam_width, or leave it out"),
        ({"length_penalty": 0.0}, "length_penalty=0.0 is for beam search"),
        ({"early_stopping": True}, "early_stopping=True is for beam search"),
        ({"early_stopping": "never"}, "early_stopping='never' is for beam search"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature=0.7 has no effect with beam_width=2"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p=0.9 has no effect with beam_width=2"),
        ({"beam_width": 2, "top_k": 5}, "top_k=5 has no effect with beam_width=2"),
        ({"beam_width": 2, "min_p": 0.1}, "nothing at random; leave min_p out, or beam_width"),
    ],
)
def test_what_does_not_go_together(fields, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [None, 0, 1, "True", "Never", [], 1.0])
@pytest.mark.parametrize("beams", [{}, {"beam_width": 2}])
def test_early_stopping_is_one_of_three(value, beams):
    with pytest.raises(ValueError, match="must be True, False or 'never'") as error:
        SamplingParams(early_stopping=value, **beams)
    assert f"early_stopping={value!r} " in str(error.value)


def test_beams_go_with_all_that_shapes_or_ends_a_text():
    fields = dict(
        n=2,
        beam_width=2,
        length_penalty=-1,
        early_stopping="never",
        temperature=0,
        top_p=1,
        top_k=-1,
        logprobs=3,
        prompt_logprobs=0,
        stop=["x"],
        stop_token_ids=[1],
        min_tokens=2,
        allowed_token_ids=[3],
        logit_bias={4: 1.0},
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        bad_words=["y"],
        max_tokens=None,
    )
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields
    assert SamplingParams(beam_width=MAX_BEAM_WIDTH, temperature=1.0).n == 1


def test_samples_to_rank_need_log_probabilities_that_the_user_does_not_see():
    ranked = SamplingParams(n=2, best_of=3)
    assert (ranked.num_samples, ranked.tracks_logprobs, ranked.wants_logprobs) == (3, True, False)
    for fields in ({"n": 3}, {"n": 3, "best_of": 3}, {"n": 3, "best_of": 3, "temperature": 0}):
        params = SamplingParams(**fields)
        assert (params.num_samples, params.tracks_logprobs, params.needs_full_sampler) == (3, False, False)
    shown = SamplingParams(logprobs=0)
    assert shown.tracks_logprobs and shown.wants_logprobs
    assert not SamplingParams(beam_width=3).wants_logprobs


def test_beam_search_params_are_sampling_params():
    assert BeamSearchParams(4, 64).sampling_params == SamplingParams(
        n=4, beam_width=4, max_tokens=64, temperature=0.0, logprobs=8
    )
    given = BeamSearchParams(
        beam_width=32,
        max_tokens=None,
        ignore_eos=True,
        temperature=0,
        length_penalty=0.6,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        allowed_token_ids=[5, 6, 5],
        early_stopping=True,
    )
    assert given.sampling_params == SamplingParams(
        n=32,
        beam_width=32,
        max_tokens=None,
        ignore_eos=True,
        temperature=0.0,
        length_penalty=0.6,
        logprobs=20,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        allowed_token_ids=[5, 6],
        early_stopping=True,
    )
    assert BeamSearchParams(2, 8, True, 0.0, 2.0, True).length_penalty == 2.0, "in vLLM's order"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, f"beam_width=0 must be an integer in [1, {MAX_BEAM_WIDTH}]"),
        ({"beam_width": 33}, "beam_width=33 must be an integer in [1, 32]"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer in [1, "),
        ({"temperature": 0.5}, "temperature=0.5 has no effect, as beam search draws nothing at random; leave it out"),
        ({"temperature": False}, "temperature=False has no effect"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number in [-10, 10]"),
        ({"early_stopping": 1}, "early_stopping=1 must be True, False or 'never'"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ],
)
def test_bad_beam_search_params(fields, message):
    with pytest.raises(ValueError) as error:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))
    assert message in str(error.value)


class Found(LLM):
    """Has completed every prompt already."""

    def __init__(self, outputs, tokenizer):
        self._engine, self.outputs = types.SimpleNamespace(tokenizer=tokenizer), outputs

    def generate(self, prompts, sampling_params=None, **options):
        self.asked = prompts, sampling_params, options
        return self.outputs


def found(*completions, prompt="ab", error=None):
    return RequestOutput(
        request_id="0", prompt=prompt, prompt_token_ids=[65, 66], outputs=list(completions), finished=True, error=error
    )


LOGPROBS = [{67: Logprob(-1.0, 1, "c")}, {0: Logprob(-2.0, 2, " "), 67: Logprob(-0.5, 1, "c")}]
BEST = CompletionOutput(
    index=0,
    text="c",
    token_ids=[67, 0],
    cumulative_logprob=-3.0,
    logprobs=LOGPROBS,
    finish_reason="stop",
    stop_reason=0,
)
SECOND = CompletionOutput(
    index=1, text="d", token_ids=[68], cumulative_logprob=-2.5, logprobs=LOGPROBS[:1], finish_reason="length"
)


def test_sequences_hold_the_prompt_and_come_best_first():
    llm, params = Found([found(BEST, SECOND)], Letters()), CheckedBeamSearchParams(2, 8, length_penalty=2.0)
    (out,) = llm.beam_search("ab", params)
    assert llm.asked == ("ab", params.sampling_params, {"use_tqdm": False})
    best, second = out.sequences
    assert (best.tokens, best.text, best.logprobs) == ([65, 66, 67, 0], "abc", LOGPROBS)
    assert (best.cum_logprob, best.score, best.finish_reason, best.stop_reason) == (-3.0, -3.0 / 4, "stop", 0)
    assert (second.tokens, second.text, second.cum_logprob, second.score) == ([65, 66, 68], "abd", -2.5, -2.5)
    assert (second.finish_reason, second.stop_reason, out.error) == ("length", None, None)
    assert BEST.token_ids == [67, 0], "the request's own output is left as it was"


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "text"), [(None, Letters(), "abc"), (None, None, None), ("ab", None, None)]
)
def test_the_text_of_a_prompt_of_token_ids(prompt, tokenizer, text):
    (out,) = Found([found(BEST, prompt=prompt)], tokenizer).beam_search([[65, 66]], CheckedBeamSearchParams(1, 8))
    assert out.sequences[0].text == text and out.sequences[0].tokens == [65, 66, 67, 0]


def test_a_prompt_that_fails_leaves_the_others():
    llm = Found([found(prompt=None, error="no token is left"), found(SECOND)], Letters())
    bad, good = llm.beam_search(["x", "ab"], CheckedBeamSearchParams(1, 8))
    assert bad == BeamSearchOutput(sequences=[], error="no token is left")
    assert [sequence.text for sequence in good.sequences] == ["abd"]


def test_sampling_params_are_not_for_beam_search():
    with pytest.raises(ValueError, match="params is a SamplingParams; expected BeamSearchParams"):
        as_users_have_it(jaxllm.llm).LLM.beam_search(Found([], None), "ab", jaxllm.SamplingParams(beam_width=2))


def test_beams_of_the_engine(llm, tiny, monkeypatch):
    """Prompts of two kinds; what each sequence says fits together."""
    monkeypatch.setattr(llm.engine.intake, "tokenizer", wrap(Letters()))
    prompts = ["Why?", {"prompt_token_ids": [5, 6, 7, 8, 9]}]
    params = CheckedBeamSearchParams(3, 7, length_penalty=2.0, allowed_token_ids=list(range(2, 90)))
    for prompt, out in zip([[55, 72, 89, 31], [5, 6, 7, 8, 9]], llm.beam_search(prompts, params), strict=True):
        found = beam_search(tiny, prompt, params.sampling_params)
        assert [sequence.tokens for sequence in out.sequences] == [prompt + tokens for tokens, *_ in found]
        for sequence, (tokens, score, _) in zip(out.sequences, found, strict=True):
            assert sequence.text == Letters().decode(sequence.tokens)
            assert sequence.cum_logprob == pytest.approx(cumulative_logprob(tiny, prompt, tokens), abs=1e-3)
            assert pytest.approx(score, abs=1e-3) == sequence.score == sequence.cum_logprob / 7**2
            assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
            for token, logprobs in zip(tokens, sequence.logprobs, strict=True):
                assert next(iter(logprobs)) == token and 6 <= len(logprobs) <= 7
                assert logprobs[token].decoded_token == Letters().decode([token])


def test_beams_that_can_not_run_are_refused_at_the_door(llm):
    with pytest.raises(ValueError, match="beam_width=9 is more than the 8 sequences that may run at once"):
        llm.beam_search([[1, 2], [3]], CheckedBeamSearchParams(9, 4))
    assert not llm.engine.has_work()


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch)


def test_beams_in_the_terminal(fake, monkeypatch, capsys):
    monkeypatch.setattr(fake, "script", [(0, output("x", "y", finished=True))])
    options = ["--beam-width", "3", "--n", "2", "--length-penalty", "0.5", "--early-stopping", "true", "--quiet"]
    assert generate.main(["a", *options]) == 0
    assert capsys.readouterr().out == ("--- prompt 1/1, sample 1/2 ---\nax\n--- prompt 1/1, sample 2/2 ---\nay\n")
    assert fake.made.params == jaxllm.SamplingParams(
        n=2, beam_width=3, length_penalty=0.5, early_stopping=True, temperature=0.0, max_tokens=128
    )


def test_a_temperature_given_with_beams_is_refused(fake, capsys):
    assert generate.main(["a", "--beam-width", "3", "--temperature", "0.5"]) == 2
    assert "error: temperature=0.5 has no effect with beam_width=3" in capsys.readouterr().err


DRAWN = {"temperature": 0.5, "min_p": 0.4, "repetition_penalty": 1.25}  # as the embedded model recommends


def test_lines_of_a_batch_with_and_without_beams(fake, tmp_path):
    folder = Folder(tmp_path)
    folder.write("a", {"prompt": "b", "beam_width": 2, "early_stopping": "never"}, {"prompt": "c", "best_of": 3})
    assert folder.run("--quiet") == 0
    assert fake.made.params == {
        "a": jaxllm.SamplingParams(**DRAWN, max_tokens=128),
        "b": jaxllm.SamplingParams(beam_width=2, early_stopping="never", temperature=0.0, max_tokens=128),
        "c": jaxllm.SamplingParams(best_of=3, **DRAWN, max_tokens=128),
    }


def test_beams_for_all_lines_but_one(fake, tmp_path, capsys):
    folder = Folder(tmp_path)
    folder.write("a", {"prompt": "b", "beam_width": None, "n": 1}, {"prompt": "c", "beam_width": 4})
    assert folder.run("--beam-width", "3", "--n", "2", "--quiet") == 0
    found = {text: (p.n, p.beam_width, p.temperature) for text, p in fake.made.params.items()}
    assert found == {"a": (2, 3, 0.0), "b": (1, None, DRAWN["temperature"]), "c": (2, 4, 0.0)}
    folder.write({"prompt": "a", "beam_width": 3})
    folder.output.unlink()
    assert folder.run("--temperature", "0.7") == 2
    assert "line 1: temperature=0.7 has no effect with beam_width=3" in capsys.readouterr().err


def test_json_has_what_a_completion_was_ranked_by(fake, monkeypatch, capsys):
    done = output("x", finished=True)
    done.outputs[0].cumulative_logprob = -1.5
    monkeypatch.setattr(fake, "script", [(0, done)])
    assert generate.main(["a", "--best-of", "3", "--json", "--quiet"]) == 0
    (completion,) = json.loads(capsys.readouterr().out)["outputs"]
    assert completion["cumulative_logprob"] == -1.5 and "logprobs" not in completion
