"""What is evaluated: texts in chunks, and questions with choices, as token ids. No jax."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxllm.argument_checks import a_type, check_int
from jaxllm.text.tokenizer import Tokenizer

_FIELDS = ("context", "choices", "answer")
_MAX_LINE_BYTES = 2**26


@dataclass(frozen=True)
class Question:
    """A text, ways to continue it, as they are appended to it, and the index of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int
    place: str = "the question"  # what errors call it

    def __post_init__(self) -> None:
        if len(self.choices) < 2:
            raise ValueError(f"{self.place} has {len(self.choices)} choices; give at least 2")
        for choice in self.choices:
            if not choice.strip():
                raise ValueError(f"{self.place} has an empty choice; give each some text")
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(
                f"{self.place} has answer {self.answer}, but choices 0 to {len(self.choices) - 1}; give the index of "
                "the right one, from 0"
            )

    @property
    def lengths(self) -> list[int]:
        """Of the choices in characters, without the white space before them, which only separates them."""
        return [len(choice.lstrip()) for choice in self.choices]


class TextChunk(NamedTuple):
    """Tokens that are read together, of which those from `first` on are scored, and as many of these as there are; the
    rest is padding."""

    row: Int32[np.ndarray, "1 context"]
    first: int
    num_scored: int


class EncodedChoice(NamedTuple):
    """A context and one of its choices, whose tokens begin at `start`."""

    token_ids: list[int]
    start: int


def read_questions(file: Path) -> list[Question]:
    """A JSONL file: each line that is not blank is {"context": str, "choices": [str, ...], "answer": index}.
    `ValueError` with the number of a line that is not."""
    questions = []
    with file.open("rb") as stream:
        for number, raw in enumerate(iter(lambda: stream.readline(_MAX_LINE_BYTES), b""), 1):
            if raw.strip():
                questions.append(_question(raw, f"{file}, line {number}"))
    if not questions:
        raise ValueError(
            f"{file} has no questions; give one on each line, as {json.dumps(dict.fromkeys(_FIELDS, '...'))}"
        )
    return questions


def _question(raw: bytes, place: str) -> Question:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place} is not UTF-8 text ({error.reason} at byte {error.start}); convert the file"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}); give one object a line") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} holds {a_type(value)}; give an object with {', '.join(_FIELDS)}")
    if missing := [name for name in _FIELDS if name not in value]:
        raise ValueError(f"{place} lacks {' and '.join(missing)}; give an object with {', '.join(_FIELDS)}")
    context, choices, answer = (value[name] for name in _FIELDS)
    if not isinstance(context, str):
        raise ValueError(f"{place}: context is {a_type(context)}; give a text")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"{place}: choices is not a list of texts; give one")
    if type(answer) is not int:
        raise ValueError(f"{place}: answer is {a_type(answer)}; give the index of the right choice, from 0")
    return Question(context, tuple(choices), answer, place)


def read_text(file: Path) -> str:
    """A file of UTF-8 text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error


def chunks_of(text: str, tokenizer: Tokenizer, context: int) -> list[TextChunk]:
    """`text` in chunks of `context` tokens, without overlap, of which the second half is scored. Each begins with the
    tokens that the tokenizer puts before a text. A last chunk without a token in its second half is left out."""
    check_int("context", context, 2, 2**20)
    prefix, first, chunks = _prefix(tokenizer), context // 2, []
    if len(prefix) > first:
        raise ValueError(f"context={context} is too short for the {len(prefix)} tokens before each text; give more")
    ids = tokenizer.encode(text, add_special_tokens=False)
    size = context - len(prefix)
    for start in range(0, len(ids), size):
        tokens = prefix + ids[start : start + size]
        if len(tokens) > first:
            row = np.zeros((1, context), np.int32)
            row[0, : len(tokens)] = tokens
            chunks.append(TextChunk(row, first, len(tokens) - first))
    return chunks


def encode_choices(question: Question, tokenizer: Tokenizer, max_len: int) -> list[EncodedChoice]:
    """Each choice after its context, tokenised together: spaces at the end of the context are the choices'. (As
    lm-evaluation-harness does it.) `ValueError` for what has more than `max_len` tokens, or nothing before a choice."""
    prefix = _prefix(tokenizer)
    context = question.context.rstrip()
    spaces = question.context[len(context) :]
    start = len(prefix) + len(tokenizer.encode(context, add_special_tokens=False))
    if start == 0:
        raise ValueError(
            f"{question.place} has an empty context, and the tokenizer puts nothing before a text, so that the first "
            "token has no probability; give a context"
        )
    encoded = []
    for choice in question.choices:
        ids = prefix + tokenizer.encode(context + spaces + choice, add_special_tokens=False)
        if len(ids) > max_len:
            raise ValueError(f"{question.place} has {len(ids)} tokens, more than the model's {max_len}; shorten it")
        if len(ids) <= start:
            raise ValueError(
                f"{question.place}: the choice {choice!r:.100} has no token of its own after the context; let it begin "
                "with a space"
            )
        encoded.append(EncodedChoice(ids, start))
    return encoded


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens that a tokenizer puts before a text: often one, or none."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def check_same_tokens(texts: Sequence[str], model: Tokenizer, reference: Tokenizer) -> None:
    """`ValueError` unless two tokenizers make the same tokens of the texts."""
    for text in texts:
        ours, theirs = (tokenizer.encode(text) for tokenizer in (model, reference))
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            raise ValueError(
                f"the model and the reference make different tokens of the text, from token {at} on, so that their "
                "distributions can't be compared; give a reference with the same tokenizer"
            )
