"""Options of `python -m jaxllm.generate`: one for each sampling parameter, JSON, and chat."""

import argparse
import dataclasses
import json

import pytest

from jaxllm.cli import generate
from jaxllm.cli.jsonl.requests import NOT_SAMPLING
from jaxllm.cli.jsonl.results import output_fields
from jaxllm.cli.sampling_options import add_sampling_arguments, sampling_fields, with_defaults
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import SamplingParams
from tests.fake_llm import install, output


def parse(*arguments: str) -> dict:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_arguments(parser)
    return sampling_fields(parser.parse_args(arguments))


def test_every_sampling_parameter_has_an_option():
    given = parse(
        "--n",
        "2",
        "--best-of",
        "3",
        "--beam-width",
        "4",
        "--length-penalty",
        "0.5",
        "--early-stopping",
        "never",
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--presence-penalty",
        "1",
        "--frequency-penalty",
        "-1",
        "--repetition-penalty",
        "1.5",
        "--seed",
        "7",
        "--max-tokens",
        "9",
        "--min-tokens",
        "2",
        "--logprobs",
        "3",
        "--prompt-logprobs",
        "0",
        "--truncate-prompt-tokens",
        "9",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "4",
        "--bad-words",
        "c d",
        "--allowed-token-ids",
        "5",
        "--allowed-token-ids",
        "6",
        "--logprob-token-ids",
        "7",
        "--logprob-token-ids",
        "8",
        "--logprob-token-ids",
        "9",
        "--logit-bias",
        "5=-1.5",
        "--logit-bias",
        "6=2",
        "--ignore-eos",
        "--include-stop-str-in-output",
        "--skip-reading-prefix-cache",
        "--no-skip-special-tokens",
        "--no-spaces-between-special-tokens",
        "--no-detokenize",
        "--structured-outputs",
        '{"regex": "a+"}',
    )
    of_engine = {"logprobs_mode"}  # an option of the engine's, which is that of requests that bring none
    fields = {field.name for field in dataclasses.fields(SamplingParams) if field.init}
    assert set(given) == fields - NOT_SAMPLING - of_engine
    assert given.pop("structured_outputs") == {"regex": "a+"}
    assert given == {
        "truncate_prompt_tokens": 9,
        "n": 2,
        "best_of": 3,
        "beam_width": 4,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 0,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "bad_words": ["c d"],
        "allowed_token_ids": [5, 6],
        "logprob_token_ids": [7, 8, 9],
        "logit_bias": {5: -1.5, 6: 2.0},
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_reading_prefix_cache": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "detokenize": False,
    }
    together = given.keys() - {"stop", "beam_width", "length_penalty", "early_stopping"}  # others exclude them
    assert SamplingParams(**{name: given[name] for name in together}).num_samples == 3


def test_options_left_out_say_nothing():
    assert parse() == {}
    assert with_defaults({}) == {"temperature": 0.8, "max_tokens": 128}
    assert with_defaults(parse("--temperature", "0", "--max-tokens", "3")) == {"temperature": 0, "max_tokens": 3}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("never", "never")])
def test_beams_have_no_temperature_unless_it_is_given(text, value):
    given = parse("--beam-width", "4", "--early-stopping", text)
    assert with_defaults(given) == {"beam_width": 4, "early_stopping": value, "temperature": 0.0, "max_tokens": 128}
    assert with_defaults(given | {"temperature": 0.8})["temperature"] == 0.8
    assert with_defaults(given | {"beam_width": None})["temperature"] == 0.8
    assert SamplingParams(**with_defaults(given)).beam_width == 4


@pytest.mark.parametrize("text", ["1", "True", ""])
def test_when_beams_end_is_one_of_three(text):
    with pytest.raises(argparse.ArgumentError, match=r"invalid choice: .* \(choose from .?true.?, .?false.?, .?never"):
        parse("--beam-width", "4", "--early-stopping", text)


@pytest.mark.parametrize("text", ["5", "a=1", "5=b", "=", "5=1=2"])
def test_a_bias_is_a_token_and_a_number(text):
    with pytest.raises(argparse.ArgumentError, match="is not a token id and a number, as in 198=-5"):
        parse("--logit-bias", text)


def test_a_bad_value_is_one_line(llm, capsys):
    assert generate.main(["p", "--presence-penalty", "3"]) == 2
    assert capsys.readouterr().err == "error: presence_penalty=3.0 must be a finite number in [-2, 2]\n"


@pytest.fixture
def llm(monkeypatch):
    return install(monkeypatch)


def test_json_is_an_object_for_each_prompt_in_order(llm, monkeypatch, capsys):
    done = [(i, output(text, finished=True)) for i, text in ((1, "B"), (0, "A"), (2, "\x1b"))]
    monkeypatch.setattr(llm, "script", [(0, output("")), *done])
    assert generate.main(["a", "b", "c", "--json", "--token-ids", "--quiet"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["index"], r["prompt"], r["outputs"][0]["text"]) for r in records] == [
        (0, "a", "A"),
        (1, "b", "B"),
        (2, "c", "\x1b"),
    ]
    assert records[0]["outputs"][0]["token_ids"] == [65] and records[0]["error"] is None


def test_an_interrupt_keeps_what_finished_out_of_turn(llm, monkeypatch, capsys):
    monkeypatch.setattr(llm, "script", [(2, output("C", finished=True)), (0, output("x")), KeyboardInterrupt()])
    assert generate.main(["a", "b", "c", "--json", "--quiet"]) == 130
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["index"], record["outputs"][0]["text"]) == (2, "C")


def test_logprobs_in_json():
    done = output("ab", finished=True)
    logprobs = [{97: Logprob(-0.5, 1, "a"), 5: Logprob(-9999.0, None, None)}, {98: Logprob(-1.0, 2, "b")}]
    done.outputs[0].logprobs, done.outputs[0].cumulative_logprob = logprobs, -1.5
    done.prompt_token_ids, done.prompt_logprobs = [3, 4], [None, {4: Logprob(-2.0, 1, "x")}]
    fields = json.loads(json.dumps(output_fields(done, token_ids=False), allow_nan=False))
    assert fields["prompt_logprobs"] == [None, {"4": {"logprob": -2.0, "rank": 1, "decoded_token": "x"}}]
    assert fields["prompt_token_ids"] == [3, 4]
    completion = fields["outputs"][0]
    assert (completion["token_ids"], completion["cumulative_logprob"]) == ([97, 98], -1.5)
    assert list(completion["logprobs"][0]) == ["97", "5"], "the token taken comes first"
    assert completion["logprobs"][1] == {"98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}}


def test_chat_in_the_terminal(llm, monkeypatch, capsys):
    monkeypatch.setattr(llm, "script", [(0, output("Hello", finished=True))])
    assert generate.main(["Hi", "--chat", "--system", "S", "--chat-template", "vicuna", "--quiet"]) == 0
    assert capsys.readouterr().out == "Hi\nHello\n"
    (prompt,) = llm.made.prompts
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert prompt == {"prompt": f"{messages}{ {'chat_template': 'vicuna'} }", "prompt_token_ids": [1, 2]}
    assert generate.main(["unspeakable", "--chat"]) == 2
    assert capsys.readouterr() == ("", "error: the chat template refuses the conversation\n")
    for option in ("--system", "--chat-template"):
        assert generate.main(["Hi", option, "x"]) == 2
        assert f"{option} is for conversations; add --chat" in capsys.readouterr().err
