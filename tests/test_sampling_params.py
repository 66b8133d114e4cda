"""Every invalid value is a ValueError that names the field, the value and what is allowed."""

import dataclasses
import importlib.util
import math
from importlib.machinery import SourceFileLoader

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import sampling_params
from jaxllm.sampling_params import MAX_N, MAX_STOP_TOKEN_IDS, MAX_STOPS


def as_users_have_it(module):
    """`module` without the type checks that the tests add to it: they would refuse a wrong type first."""
    loader = SourceFileLoader(module.__name__, module.__file__)
    plain = importlib.util.module_from_spec(importlib.util.spec_from_loader(module.__name__, loader))
    loader.exec_module(plain)
    return plain


SamplingParams = as_users_have_it(sampling_params).SamplingParams
INT32_MAX = 2**31 - 1
INTS = {  # field: lowest, highest
    "n": (1, MAX_N),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
}
FLOATS = {"temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1)}
BOOLS = ("ignore_eos", "skip_special_tokens", "detokenize")
REQUIRED = {"n", "top_k", "min_tokens"} | FLOATS.keys()  # the other numbers may be None


def refused(field, value):
    """The message of the error that `field=value` gives."""
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    return str(error.value)


@pytest.mark.parametrize("field", INTS)
def test_integer_out_of_range(field):
    low, high = INTS[field]
    for value in (low - 1, high + 1, -(10**400)):
        assert f"{field}={value} must be an integer in [{low}, {high}]" in refused(field, value)


@pytest.mark.parametrize("field", FLOATS)
def test_number_out_of_range(field):
    low, high = FLOATS[field]
    for value in (-1e-9, low - 1, high + 0.001, math.inf, -math.inf, math.nan, 10**400):
        assert f"{field}={value} must be a finite number in [{low}, {high}]" in refused(field, value)


@pytest.mark.parametrize("field", [*INTS, *FLOATS])
@pytest.mark.parametrize("value", ["1", True, [1], 1j, b"1"])
def test_number_of_another_type(field, value):
    low, high = (INTS | FLOATS)[field]
    message = refused(field, value)
    assert f"{field}={value!r} must be" in message and f"[{low}, {high}]" in message


@pytest.mark.parametrize("field", INTS)
def test_integers_are_not_rounded(field):
    assert f"{field}=1.0 must be an integer" in refused(field, 1.0)


@pytest.mark.parametrize("field", sorted(REQUIRED))
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


@pytest.mark.parametrize("value", ["", [""], ["a", ""], ["a", 5], [None], b"a", 5, 0, False])
def test_stop_must_be_non_empty_strings(value):
    assert f"stop={value!r} must" in refused("stop", value)


def test_too_many_stop_strings():
    stops = [str(i) for i in range(MAX_STOPS + 1)]
    message = refused("stop", stops)
    assert f"stop has {MAX_STOPS + 1} strings" in message and f"at most {MAX_STOPS}" in message
    assert len(SamplingParams(stop=stops[1:]).stops) == MAX_STOPS


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize("token", [-1, INT32_MAX + 1, "1", 1.5, None, True, [1]])
def test_stop_token_id_out_of_range(token):
    assert f"stop_token_ids={token!r} must be an integer in [0, {INT32_MAX}]" in refused("stop_token_ids", [7, token])


@pytest.mark.parametrize("value", [0, 5, False, "", 1.5])
def test_stop_token_ids_must_be_a_list(value):
    assert f"stop_token_ids={value!r} must" in refused("stop_token_ids", value)


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
    optional={field: st.integers(low, high) for field, (low, high) in INTS.items() if "tokens" not in field}
    | {field: st.floats(low, high) | st.integers(low, high) for field, (low, high) in FLOATS.items()}
    | {field: st.booleans() for field in BOOLS[:2]}
    | {
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
        if field != "stop_token_ids":
            assert getattr(params, field) == value
    stop = fields.get("stop")
    assert params.stops == ((stop,) if isinstance(stop, str) else tuple(stop or ()))
    assert params.stop_token_ids == list(dict.fromkeys(fields.get("stop_token_ids") or ()))
    assert dataclasses.replace(params) == params


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
