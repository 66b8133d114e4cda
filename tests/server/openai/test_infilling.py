"""`suffix` of /v1/completions: prompts in each family's order, with the tokens that the tokenizer really has."""

import pytest
import tokenizers
from tokenizers import models, normalizers

from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.http.errors import APIError
from jaxllm.server.openai.infilling import FORMATS
from jaxllm.server.openai.prepare import completion_jobs
from jaxllm.server.openai.schemas import CompletionRequest
from jaxllm.server.served_model import ServedModel
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import backend
from tests.fake_server import CONFIG, running


def made(marks) -> Tokenizer:
    inner = backend()
    inner.add_special_tokens(list(marks))
    return Tokenizer(inner, eos_token="</s>")


def spaced(marks) -> Tokenizer:
    """Puts a space before each text, as SentencePiece does."""
    inner = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate("▁abc☺")}, []))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens(list(marks))
    return Tokenizer(inner)


def jobs(tokenizer, **fields):
    request = CompletionRequest(**{"model": "m", "prompt": "a", "suffix": "b"} | fields)
    return completion_jobs(ServedModel(("m",), tokenizer), EngineInfo(CONFIG, 300), request)


def texts(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.prefix)
def test_the_order_of_each_family(known):
    marks = [known.prefix, known.suffix, *filter(None, [known.middle]), *known.ends]
    tokenizer = made(marks)
    (job,) = jobs(tokenizer, prompt="def f():", suffix="\nf()")
    parts = [f"{known.prefix}def f():", f"{known.suffix}\nf()"]
    whole = "".join(reversed(parts) if known.is_suffix_first else parts) + (known.middle or "")
    assert texts(tokenizer, job.token_ids) == f"<s>{whole}"
    assert job.params.stop_token_ids == [tokenizer.token_id(end) for end in known.ends]
    (job,) = jobs(tokenizer, prompt="def f():", suffix="\nf()", add_special_tokens=False, stop_token_ids=[7])
    assert texts(tokenizer, job.token_ids) == whole and job.params.stop_token_ids[0] == 7


def test_the_suffix_begins_without_a_space_of_the_tokenizers():
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>"]
    tokenizer = spaced(marks)
    (job,) = jobs(tokenizer, prompt="a", suffix="b c")
    pieces = ["▁<PRE>", "▁", "a", "▁<SUF>", "b", "▁", "c", "▁<MID>"]
    assert [tokenizer.convert_ids_to_tokens(token) for token in job.token_ids] == pieces


def test_several_prompts_have_the_same_suffix():
    tokenizer = made(FORMATS[0][:3])
    found = jobs(tokenizer, prompt=["a", "c"])
    assert [texts(tokenizer, job.token_ids)[3:] for job in found] == [
        f"<|fim_prefix|>{prefix}<|fim_suffix|>b<|fim_middle|>" for prefix in "ac"
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": []}, "suffix"),
        ({"echo": True}, "echo"),
        ({"suffix": "x" * 9000}, "suffix"),
    ],
    ids=["ids", "none", "echo", "long"],
)
def test_what_does_not_fit_is_refused(fields, param):
    with pytest.raises(APIError) as error:
        jobs(made(FORMATS[0][:3]), **fields)
    assert error.value.status == 400 and error.value.param == param


def test_a_model_that_can_not_says_so():
    with running() as web:
        answer = web.complete(suffix="x")
        assert answer.status == 400 and answer.error["param"] == "suffix"
        assert "<|fim_prefix|>" in answer.error["message"]
        assert web.complete(suffix="").status == 200, "an empty one is none"
    with pytest.raises(APIError):
        jobs(made(["<|fim_prefix|>", "<|fim_suffix|>"]))  # one of the three is missing
