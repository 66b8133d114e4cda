"""What counts as a prompt, and what is said of what does not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompts import Prompt, parse_each, parse_prompt, parse_prompts, with_salt


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        (1, 2),
        np.array([1, 2]),
        jnp.array([1, 2]),
        list(np.array([1, 2])),
        {"prompt_token_ids": np.array([1, 2])},
    ],
)
def test_ids_of_other_libraries(ids):
    text, found, salt = parse_prompt(ids, None)
    assert (text, list(map(int, found)), salt) == (None, [1, 2], None)
    (prompt,) = parse_prompts(ids, None)
    assert list(map(int, prompt.token_ids)) == [1, 2]


def test_a_batch_of_ids():
    assert parse_prompts(np.array([[1, 2], [3, 4]]), None) == [Prompt(None, [1, 2]), Prompt(None, [3, 4])]
    assert parse_prompts([np.array([1, 2]), [3]], None) == [Prompt(None, [1, 2]), Prompt(None, [3])]


def test_what_asks_for_nothing_is_accepted():
    prompt = {
        "prompt_token_ids": [1],
        "prompt": "a",
        "multi_modal_data": None,
        "mm_processor_kwargs": {},
        "type": "token",
    }
    assert parse_prompt(prompt, None) == Prompt("a", [1])


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([{"role": "user", "content": "hi"}], r"conversations go to llm.chat\(\["),
        (b"hi", r"prompts is bytes: decode them first, with .decode\(\)"),
        ([b"hi"], r"a prompt is bytes: decode them first"),
        (3, "prompts is an int; expected a string, a dict or a list of them"),
        (None, "prompts is None; expected"),
        ([1.5], "a prompt is a float; expected"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids is a str; expected a list of integers"),
        ({"prompt_token_ids": np.array([[1]])}, "prompt_token_ids is a ndarray; expected a list of integers"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "only text is served: there are no images"),
        ({"prompt_embeds": [1.0]}, "prompts are text or token ids"),
        ({"promt": "a"}, r"a prompt dict has the key 'prompt' or 'prompt_token_ids', not \['promt'\]"),
        ({"cache_salt": "a"}, "a prompt dict has the key 'prompt'"),
    ],
)
def test_what_is_no_prompt_says_why(prompts, said):
    with pytest.raises(ValueError, match=said):
        parse_prompts(prompts, None)


def test_a_prompts_salt_is_that_of_its_request():
    params = SamplingParams(max_tokens=2)
    assert with_salt(params, None) is params
    assert with_salt(params, "a") == SamplingParams(max_tokens=2, cache_salt="a") and params.cache_salt is None


def test_priorities_of_other_libraries():
    assert parse_each("priority", np.int64(1), int, 2) == parse_each("priority", [1, np.int32(1)], int, 2) == [1, 1]
