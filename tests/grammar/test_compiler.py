"""Grammars without an engine: masks token by token, copies, and what is kept."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.device.logit_rules import mask_logits
from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.grammar.matcher import mask_words
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import backend

EOS = 257
FORMS = [
    StructuredOutputs(regex=r"(ab|ac)+\d{2,3}"),
    StructuredOutputs(json={"type": "array", "items": {"type": "number"}}),
    StructuredOutputs(choice=["one", "two", "three"]),
    StructuredOutputs(grammar='start: "x" | "(" start ")"'),
]


def compiler(vocab=263) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(backend(), eos_token="</s>"), vocab, [EOS])


def bits(mask: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)


@pytest.mark.parametrize("vocab", [263, 270, 300, 96, 64])
def test_masks_are_the_matchers_own(vocab):
    """Of every token at every place, in rows of any order."""
    made, rng = compiler(vocab), np.random.default_rng(0)
    matchers = [made.compile(form).matcher() for form in FORMS]
    texts = [[] for _ in matchers]
    for _ in range(12):
        rows = rng.permutation(6)[: len(matchers)]
        masks = np.full((6, mask_words(vocab)), -1, np.int32)
        living = [(m, int(row)) for m, row in zip(matchers, rows, strict=True) if not m.is_over]
        if not living:
            break
        made.fill(living, masks)
        for row in set(range(6)) - {row for _, row in living}:
            assert (masks[row] == -1).all()
        for matcher, row in living:
            allowed = bits(masks[row])
            assert not allowed[vocab:].any()
            expected = [bool(matcher.inner.validate_tokens([token])) for token in range(min(vocab, 263))]
            assert allowed[:vocab].tolist() == expected + [False] * (vocab - len(expected))
            assert matcher.may_end == bool(matcher.inner.validate_tokens([EOS]))
            choices = [token for token in np.flatnonzero(allowed) if token != EOS]
            if choices:
                text = texts[matchers.index(matcher)]
                text.append(int(rng.choice(choices)))
                matcher.follow(text)


def test_following(monkeypatch):
    text = Tokenizer(backend()).encode("abac12", add_special_tokens=False)
    grammar = compiler().compile(FORMS[0])
    at_once, by_one, copied = grammar.matcher(), grammar.matcher(), grammar.matcher()
    at_once.follow(text)
    for end in range(len(text) + 1):
        by_one.follow(text[:end])
        by_one.follow(text[:end])  # the same text again is nothing new
    for token in text:
        before, copied = copied, copied.after(token)
        assert not before.is_over
    for matcher in (at_once, by_one, copied):
        assert matcher.may_end and not matcher.is_over and matcher.error is None
        assert matcher.ends_after([*text, EOS]) and matcher.error is None
    wrong = grammar.matcher()
    assert not wrong.may_end
    wrong.follow(text[1:])
    assert wrong.is_over and "grammar" in wrong.error
    fresh = grammar.matcher()
    assert not fresh.ends_after(text), "one that went wrong harms no other"


def test_compiled_grammars_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr("jaxllm.grammar.compiler._CACHE_GRAMMARS", 3)
    made = compiler()
    first = made.compile(StructuredOutputs(regex="a{1}"))
    assert made.compile(StructuredOutputs(regex="a{1}")) is first
    for i in range(2, 5):
        made.compile(StructuredOutputs(regex=f"a{{{i}}}"))
    assert len(made._kept) == 3 and made._kept_chars == sum(map(len, made._kept))
    assert made.compile(StructuredOutputs(regex="a{1}")) is not first
    monkeypatch.setattr("jaxllm.grammar.compiler._CACHE_CHARS", 1)
    made.compile(StructuredOutputs(regex="b"))
    assert len(made._kept) == 1


def test_large_choices_and_enums():
    many = [f"value number {i}" for i in range(20_000)]
    for form in (StructuredOutputs(choice=many), StructuredOutputs(json={"enum": many})):
        matcher = compiler().compile(form).matcher()
        text = "value number 19999" if form.choice else '"value number 19999"'
        assert matcher.ends_after(Tokenizer(backend()).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("limit", ["MAX_COMPILE_S", "MAX_MASK_S"])
def test_what_takes_too_long_is_refused(monkeypatch, limit):
    monkeypatch.setattr(f"jaxllm.grammar.compiler.{limit}", -1.0)
    with pytest.raises(ValueError, match="simplify it|to compile"):
        compiler().compile(FORMS[0])


@pytest.mark.parametrize("vocab", [32, 70, 64])
def test_masks_on_the_device(vocab):
    rng = np.random.default_rng(1)
    masks = rng.integers(-(2**31), 2**31, (3, mask_words(vocab)), dtype=np.int32)
    logits = rng.normal(size=(3, vocab)).astype(np.float32)
    logits[0, 5] = np.nan
    expected = np.where(np.stack([bits(row)[:vocab] for row in masks]), logits, -np.inf)
    np.testing.assert_array_equal(np.asarray(mask_logits(jnp.asarray(logits), jnp.asarray(masks))), expected)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "("}, "the regular expression is not sound: unclosed group, at '('"),
        ({"regex": "ab(cd[0-9]+"}, "the regular expression is not sound: unclosed group, at '(cd[0-9]+'"),
        ({"regex": "a/b\n [c/d"}, "the regular expression is not sound: unclosed character class, at '[c/d'"),
        (
            {"regex": "x" * 90 + "(" + "y" * 90},
            f"the regular expression is not sound: unclosed group, at '({'y' * 59}'",
        ),
        ({"regex": "(?P<n>a)(?P<n>b)"}, "the regular expression is not sound: duplicate capture group name, at 'n>a)"),
        ({"json": {"type": "string", "pattern": "a)"}}, "the regular expression is not sound: unopened group, at ')'"),
        ({"json": {"type": "nope"}}, "the grammar is not sound: Invalid type: nope"),
        ({"grammar": 'start: "a"\nfoo: ('}, "the grammar is not sound: line 2, column 7: Expected token ')'"),
    ],
    ids=str,
)
def test_errors_are_a_line_with_the_place_in_the_users_text(form, message):
    with pytest.raises(ValueError) as error:
        compiler().compile(StructuredOutputs(**form))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
