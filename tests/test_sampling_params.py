"""Every invalid value is a ValueError that names the field, the value and what is allowed."""

import copy
import dataclasses
import importlib.util
import math
import re
from importlib.machinery import SourceFileLoader

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import sampling_params
from jaxllm.from_vllm.request_arguments import SAMPLING_FIELDS
from jaxllm.from_vllm.rules import Only
from jaxllm.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)


def as_users_have_it(module):
    """`module` without the type checks that the tests add to it: they would refuse a wrong type first."""
    loader = SourceFileLoader(module.__name__, module.__file__)
    plain = importlib.util.module_from_spec(importlib.util.spec_from_loader(module.__name__, loader))
    loader.exec_module(plain)
    return plain


plain = as_users_have_it(sampling_params)
SamplingParams, RequestOutputKind = plain.SamplingParams, plain.RequestOutputKind
INT32_MAX = 2**31 - 1
INTS = {  # field: lowest, highest
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "beam_width": (1, MAX_BEAM_WIDTH),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "stream_interval": (1, INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
FLOATS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.001, 1000),
    "length_penalty": (-10, 10),
}
BOOLS = (
    "ignore_eos",
    "skip_special_tokens",
    "detokenize",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
SEARCH = {"best_of", "beam_width", "length_penalty"}  # not with everything: see test_beam_api.py
REQUIRED = {"n", "top_k", "min_tokens", "stream_interval"} | FLOATS.keys()  # the other numbers may be None


def refused(field, value):
    """The message of the error that `field=value` gives."""
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    return str(error.value)


@pytest.mark.parametrize("field", INTS)
def test_integer_out_of_range(field):
    low, high = INTS[field]
    for value in (low - 1, high + 1, -(10**400)):
        assert f"{field}={value!r:.100} must be an integer in [{low}, {high}]" in refused(field, value)


@pytest.mark.parametrize("field", FLOATS)
def test_number_out_of_range(field):
    low, high = FLOATS[field]
    for value in (low - 1e-9, low - 1, high + 0.001, math.inf, -math.inf, math.nan, 10**400):
        assert f"{field}={value!r:.100} must be a finite number in [{low}, {high}]" in refused(field, value)


@pytest.mark.parametrize("field", [*INTS, *FLOATS])
@pytest.mark.parametrize("value", ["1", True, [1], 1j, b"1"])
def test_number_of_another_type(field, value):
    if value is True and field in ("logprobs", "prompt_logprobs"):
        assert getattr(SamplingParams(**{field: True}), field) == 1  # as vLLM has it
        return
    low, high = (INTS | FLOATS)[field]
    message = refused(field, value)
    assert f"{field}={value!r} must be" in message and f"[{low}, {high}]" in message


@pytest.mark.parametrize("field", INTS)
def test_integers_are_not_rounded(field):
    assert f"{field}=1.0 must be an integer" in refused(field, 1.0)


@pytest.mark.parametrize("field", sorted(set(REQUIRED) - {"stream_interval"}))
def test_none_where_a_number_is_needed(field):
    assert f"{field}=None must be" in refused(field, None)


@pytest.mark.parametrize("field", BOOLS)
@pytest.mark.parametrize("value", [None, 0, 1, "false", []])
def test_flags_are_true_or_false(field, value):
    assert f"{field}={value!r} must be True or False" in refused(field, value)


def test_min_tokens_above_max_tokens():
    with pytest.raises(ValueError, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize("value", ["", [""], ["a", ""], ["a", 5], [None], b"a", 5, 0, False])
def test_stop_and_bad_words_must_be_non_empty_strings(field, value):
    assert f"{field}={value!r} must" in refused(field, value)


@pytest.mark.parametrize("value", [None, 0, "DELTA"])
def test_output_kind_is_one_of_the_three(value):
    assert f"output_kind={value!r} must be a RequestOutputKind" in refused("output_kind", value)


@pytest.mark.parametrize("value", [0, "no"])
def test_skip_reading_prefix_cache_may_be_none(value):
    assert f"skip_reading_prefix_cache={value!r} must be True or False" in refused("skip_reading_prefix_cache", value)
    assert SamplingParams(skip_reading_prefix_cache=None).skip_reading_prefix_cache is None


@pytest.mark.parametrize("value", ["", "x" * 257, 5, b"x"])
def test_a_salt_is_a_short_string(value):
    assert "cache_salt=" in refused("cache_salt", value)
    assert SamplingParams(cache_salt="x" * 256).cache_salt == "x" * 256


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize("value", [[1], 3, "1", True])
def test_logit_bias_must_be_a_dict(value):
    assert f"logit_bias={value!r} must be a dict" in refused("logit_bias", value)


@pytest.mark.parametrize("key", [-1, "a", "-3", 1.0, None, True, INT32_MAX + 1])
def test_logit_bias_of_no_token(key):
    assert f"logit_bias key={key!r} must be an integer in [0, {INT32_MAX}]" in refused("logit_bias", {key: 1.0})


@pytest.mark.parametrize("value", [-100.5, 101, math.nan, math.inf, "1", None])
def test_logit_bias_out_of_range(value):
    assert f"logit_bias[7]={value!r} must be a finite number in [-100, 100]" in refused("logit_bias", {7: value})


def test_logit_bias_as_json_has_it():
    assert SamplingParams(logit_bias={"7": 1, 8: -100.0}).logit_bias == {7: 1.0, 8: -100.0}


def test_allowed_token_ids_allow_something():
    assert "allowed_token_ids is empty" in refused("allowed_token_ids", [])
    assert SamplingParams(allowed_token_ids=[3, 5, 3]).allowed_token_ids == [3, 5]


def test_logprob_token_ids_instead_of_logprobs():
    too_many = list(range(MAX_LOGPROB_TOKEN_IDS + 1))
    assert f"has {len(too_many)} ids; give 1 to {MAX_LOGPROB_TOKEN_IDS}" in refused("logprob_token_ids", too_many)
    assert "has 0 ids" in refused("logprob_token_ids", [])
    with pytest.raises(ValueError, match="logprobs=3 and 2 logprob_token_ids exclude each other"):
        SamplingParams(logprobs=3, logprob_token_ids=[1, 2])
    assert SamplingParams(logprobs=2, logprob_token_ids=[1, 2]).num_top_logprobs == 0
    assert SamplingParams(logprobs=2).num_top_logprobs == 2


def test_who_needs_the_full_sampler():
    for fields in ({}, {"top_k": 5, "seed": 3, "stop": "x", "prompt_logprobs": 3, "n": 2}, {"n": 2, "best_of": 2}):
        assert not SamplingParams(**fields).needs_full_sampler
    for fields in (
        {"min_tokens": 1},
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 0.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"best_of": 2},
        {"beam_width": 1},
    ):
        assert SamplingParams(**fields).needs_full_sampler


@pytest.mark.parametrize(("field", "most"), [("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)])
def test_too_many_strings(field, most):
    words = [str(i) for i in range(most + 1)]
    message = refused(field, words)
    assert f"{field} has {most + 1} strings" in message and f"at most {most}" in message
    assert getattr(SamplingParams(**{field: words[1:]}), field) == words[1:]


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


ID_LISTS = pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])


@ID_LISTS
@pytest.mark.parametrize("token", [-1, INT32_MAX + 1, "1", 1.5, None, True, [1]])
def test_token_id_out_of_range(field, token):
    assert f"{field}={token!r} must be an integer in [0, {INT32_MAX}]" in refused(field, [7, token])


@ID_LISTS
@pytest.mark.parametrize("value", [0, 5, False, "", 1.5])
def test_token_ids_must_be_a_list(field, value):
    assert f"{field}={value!r} must" in refused(field, value)


def test_too_many_stop_token_ids():
    message = refused("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS + 1)))
    assert f"stop_token_ids has {MAX_STOP_TOKEN_IDS + 1} ids" in message
    assert f"at most {MAX_STOP_TOKEN_IDS}" in message


def test_unknown_names_and_positions_are_errors():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)
    with pytest.raises(TypeError):
        SamplingParams(1)


valid = st.fixed_dictionaries(
    {},
    optional={name: st.integers(*INTS[name]) for name in INTS if name not in SEARCH | {"seed"} and "tokens" not in name}
    | {
        name: st.floats(low, high) | st.integers(math.ceil(low), high)
        for name, (low, high) in FLOATS.items()
        if name not in SEARCH
    }
    | {field: st.booleans() for field in BOOLS[:2]}
    | {
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "logit_bias": st.dictionaries(st.integers(0, INT32_MAX), st.floats(-100, 100)),
        "allowed_token_ids": st.none() | st.lists(st.integers(0, INT32_MAX), min_size=1, unique=True),
        "bad_words": st.lists(st.text(min_size=1), max_size=MAX_BAD_WORDS),
        "output_kind": st.sampled_from(RequestOutputKind),
        "max_tokens": st.none() | st.integers(16, INT32_MAX),
        "min_tokens": st.integers(0, 16),
        "stop": st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=MAX_STOPS),
        "stop_token_ids": st.none() | st.lists(st.integers(0, INT32_MAX), max_size=MAX_STOP_TOKEN_IDS),
    },
)


@settings(max_examples=50, deadline=None)
@given(fields=valid)
def test_valid_values_are_kept(fields):
    params = SamplingParams(**fields)
    for field, value in fields.items():
        if field not in ("stop", "stop_token_ids"):
            assert getattr(params, field) == value
    stop = fields.get("stop")
    assert params.stops == ((stop,) if isinstance(stop, str) else tuple(stop or ()))
    assert params.stop == list(params.stops)
    assert params.stop_token_ids == list(dict.fromkeys(fields.get("stop_token_ids") or ()))
    assert dataclasses.replace(params) == params


def test_changes_are_checked_when_a_request_is_made():
    params = SamplingParams(max_tokens=2)
    params.min_tokens = 4  # more than max_tokens, for now
    params.max_tokens = 8
    assert params.snapshot() == SamplingParams(min_tokens=4, max_tokens=8)
    params.temperature = 5
    with pytest.raises(ValueError, match=r"temperature=5 must be a finite number in \[0, 2\]"):
        params.snapshot()
    params.temperature, params.temprature = 1.0, 0.5
    with pytest.raises(TypeError, match="has no argument 'temprature'; did you mean temperature"):
        params.snapshot()


def test_a_request_keeps_what_it_was_made_with():
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 1.0})
    kept = params.snapshot()
    params.stop.append("b")
    params.stop_token_ids.append(2)
    params.logit_bias[2] = 1.0
    params.temperature = 0.0
    assert kept == SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 1.0}) and kept.snapshot() is kept
    new = params.snapshot()
    assert (new.stops, new.stop_token_ids, new.logit_bias) == (("a", "b"), [1, 2], {1: 1.0, 2: 1.0})


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "2"])
def test_truncation_keeps_some_tokens(value):
    with pytest.raises(ValueError, match="truncate_prompt_tokens=.* must be an integer"):
        SamplingParams(truncate_prompt_tokens=value)


def test_clones_share_nothing_that_changes():
    params = SamplingParams(bad_words=["a"], allowed_token_ids=[1])
    clone = params.clone()
    clone.bad_words.append("b")
    clone.n = 2
    assert params == SamplingParams(bad_words=["a"], allowed_token_ids=[1])
    assert clone.snapshot() == SamplingParams(bad_words=["a", "b"], allowed_token_ids=[1], n=2)
    assert copy.deepcopy(params) == copy.copy(params) == params


@pytest.mark.parametrize("kind", [np.int64, np.uint8, jnp.int32])
def test_numbers_of_other_libraries(kind):
    params = SamplingParams(max_tokens=kind(3), temperature=np.float32(0.5), stop_token_ids=np.arange(2), top_p=kind(1))
    assert params == SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=[0, 1], top_p=1)
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert SamplingParams(allowed_token_ids=[kind(5)], logit_bias={np.int64(1): kind(2)}).logit_bias == {1: 2.0}


@pytest.mark.parametrize("value", [np.True_, np.float32(1.5), np.arange(2), "3", object()])
def test_what_is_no_integer(value):
    with pytest.raises(ValueError, match="max_tokens=.* must be an integer"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        *(
            ("max_new_tokens", "give max_tokens"),
            ("num_beams", "give beam_width"),
            ("do_sample", "unless temperature=0"),
        ),
        *(("guided_json", "StructuredOutputsParams(json=...)"), ("tempreature", "did you mean temperature?")),
    ],
)
def test_names_of_other_libraries_say_what_is_meant(field, meant):
    with pytest.raises(TypeError, match=re.escape(meant)):
        SamplingParams(**{field: 1})


def test_fields_of_vllm_that_are_none_of_ours():
    neutral = SamplingParams(logits_processors=[], extra_args=None, thinking_token_budget=-1, guided_decoding=None)
    assert neutral == SamplingParams() == SamplingParams.from_optional(temperature=None, stop=None, n=None)
    for field, rule in SAMPLING_FIELDS.items():
        if isinstance(rule, Only):
            with pytest.raises(ValueError, match=f"{field}=.* is not supported: "):
                SamplingParams(**{field: object()})


def test_other_parameters_suggest_names_too():
    with pytest.raises(TypeError, match="BeamSearchParams has no argument 'beam_with'; did you mean beam_width"):
        plain.BeamSearchParams(beam_with=2, max_tokens=4)
    with pytest.raises(TypeError, match="StructuredOutputs has no argument 'jsn'; did you mean json"):
        plain.StructuredOutputsParams(jsn={})
    with pytest.raises(ValueError, match="structural_tag is not supported: the whole text has one format"):
        plain.StructuredOutputsParams(structural_tag="{}")
    params = plain.BeamSearchParams(2, 4)
    params.beam_width = 40
    with pytest.raises(ValueError, match="beam_width=40 must be"):
        params.clone()
