"""Texts in chunks, and files of questions."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.eval.inputs import Question, check_same_tokens, chunks_of, encode_choices, read_questions, read_text
from jaxllm.text.foreign_tokenizer import wrap

GOOD = {"context": "a", "choices": ["b", " c"], "answer": 1}


def tokenizer_of(encode):
    return wrap(SimpleNamespace(encode=encode, decode=lambda ids: ""))


def letters(*prefix: int):
    """A token a character; `prefix` comes before a text, and 99 after it."""

    def encode(text, add_special_tokens=True):
        ids = [ord(letter) for letter in text]
        return [*prefix, *ids, 99] if add_special_tokens and prefix else ids

    return tokenizer_of(encode)


def test_chunks_do_not_overlap_and_each_has_a_prefix():
    first, second, third = chunks_of("abcdefghijklmnop", letters(1), 7)
    assert first.row.tolist() == [[1, *map(ord, "abcdef")]] and (first.first, first.num_scored) == (3, 4)
    assert second.row.tolist() == [[1, *map(ord, "ghijkl")]]
    assert third.row.tolist() == [[1, *map(ord, "mnop"), 0, 0]] and third.num_scored == 2
    assert third.row.dtype == np.int32


def test_a_chunk_without_a_token_to_score_is_left_out():
    assert len(chunks_of("abcdefghij", letters(), 6)) == 2  # the second has 4 tokens, and one of them is scored
    assert chunks_of("abcdefghij", letters(), 6)[1].num_scored == 1
    assert len(chunks_of("abcdefghi", letters(), 6)) == 1
    assert chunks_of("", letters(), 6) == []


@pytest.mark.parametrize("context", [1, True, 2**21])
def test_the_context_is_checked(context):
    with pytest.raises(ValueError, match="context="):
        chunks_of("abc", letters(), context)
    with pytest.raises(ValueError, match="context=4 is too short for the 3 tokens before each text"):
        chunks_of("abc", letters(1, 2, 3), 4)


def test_spaces_after_the_context_are_the_choices():
    question = Question("ab  ", ("c", "de"), 0)
    one, two = encode_choices(question, letters(), 8)
    assert one.token_ids == [ord(letter) for letter in "ab  c"] and one.start == two.start == 2
    assert encode_choices(question, letters(7), 8)[1] == ([7, *map(ord, "ab  de")], 3)
    assert Question("a", ("  bc", "d"), 0).lengths == [2, 1]


def test_choices_that_can_not_be_scored():
    with pytest.raises(ValueError, match="the question has 5 tokens, more than the model's 4; shorten it"):
        encode_choices(Question("abc", ("d", "de"), 0), letters(), 4)
    with pytest.raises(ValueError, match="has an empty context, and the tokenizer puts nothing before"):
        encode_choices(Question(" ", ("d", "de"), 0), letters(), 9)
    merging = tokenizer_of(lambda text: [1] * min(len(text), 2))
    with pytest.raises(ValueError, match="the choice 'c' has no token of its own after the context; let it begin with"):
        encode_choices(Question("ab", ("c", " d"), 0), merging, 9)


def test_questions_are_read(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("\ufeff" + json.dumps(GOOD) + "\r\n\n" + json.dumps(GOOD | {"answer": 0, "id": 3}))
    first, second = read_questions(file)
    assert (first.context, first.choices, first.answer) == ("a", ("b", " c"), 1)
    assert second.answer == 0 and second.place.endswith("questions.jsonl, line 3")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", r"line 2 is not JSON \(.*\); give one object a line"),
        (b'{"context": "\xff"}', r"line 2 is not UTF-8 text \(.* at byte 13\)"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b"[1]", "line 2 holds a list; give an object"),
        (b'{"context": "a"}', "line 2 lacks choices and answer; give an object with context, choices, answer"),
        (json.dumps(GOOD | {"context": 3}), "line 2: context is an? int"),
        (json.dumps(GOOD | {"choices": "bc"}), "line 2: choices is not a list of texts"),
        (json.dumps(GOOD | {"choices": ["b", 1]}), "line 2: choices is not a list of texts"),
        (json.dumps(GOOD | {"choices": ["b"]}), "line 2 has 1 choices; give at least 2"),
        (json.dumps(GOOD | {"choices": ["b", " "]}), "line 2 has an empty choice"),
        (json.dumps(GOOD | {"answer": True}), "line 2: answer is a bool"),
        (json.dumps(GOOD | {"answer": 2}), "line 2 has answer 2, but choices 0 to 1; give the index of the right one"),
        (json.dumps(GOOD | {"answer": -1}), "line 2 has answer -1, but choices 0 to 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, error):
    file = tmp_path / "questions.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ValueError, match=error):
        read_questions(file)


def test_a_file_without_questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="has no questions; give one on each line"):
        read_questions(file)


def test_a_text_is_utf8(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("schön".encode("latin-1"))
    with pytest.raises(ValueError, match=r"text.txt is not UTF-8 text \(.* at byte 3\); convert it"):
        read_text(file)


def test_models_with_other_tokens_are_not_compared():
    ours, theirs = (tokenizer_of(lambda text, n=n: [1] * len(text) + [n]) for n in (1, 2))
    check_same_tokens(["abc"], ours, ours)
    with pytest.raises(ValueError, match="different tokens of the text, from token 3 on"):
        check_same_tokens(["abc"], ours, theirs)
