"""Grammars for structured outputs: compiled with llguidance away from the engine's thread, then followed token by
token. A mask says which tokens may come next, one bit each, in words of 32."""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jaxllm.engine.device.packing import mask_words
from jaxllm.structured_outputs import StructuredOutputs

MAX_COMPILE_S = 2.0  # of a processor
MAX_MASK_S = 0.1  # of a processor, for one of the first masks: no step waits longer for a grammar
_PROBED_TOKENS = 4
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
_MAX_GBNF_CHARS = 1 << 16
_CACHE_CHARS = 1 << 23  # of the grammars that are kept compiled
_CACHE_GRAMMARS = 256
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"  # without a bound a model may go on with it for ever


class Matcher:
    """Where one text is in its grammar."""

    def __init__(self, pristine: Any):
        self._pristine = pristine
        self.restart()

    def restart(self) -> None:
        """Goes back to the beginning."""
        self.inner, self._num_followed = self._pristine.deep_copy(), 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes the text's tokens, those that it has not seen."""
        if len(token_ids) > self._num_followed:
            new, self._num_followed = token_ids[self._num_followed :], len(token_ids)
            self.inner.consume_tokens(list(new))

    def after(self, token: int) -> "Matcher":
        """A copy that is one token further."""
        copy = object.__new__(Matcher)
        copy._pristine, copy.inner, copy._num_followed = self._pristine, self.inner.deep_copy(), self._num_followed + 1
        copy.inner.consume_token(token)
        return copy

    @property
    def error(self) -> str | None:
        if not self.inner.is_error():
            return None
        return f"its grammar can't be followed any further: {_first_line(self.inner.get_error())}"

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but an end, or nothing can be said any more (`error`)."""
        return self.inner.is_stopped()

    def ends_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the text is over with these tokens."""
        self.follow(token_ids)
        return self.is_over

    @property
    def may_end(self) -> bool:
        return self.inner.is_accepting()


class Grammar:
    """A compiled grammar; nobody changes it, so that requests share it."""

    def __init__(self, pristine: Any):
        self._pristine = pristine

    def matcher(self) -> Matcher:
        return Matcher(self._pristine)


class GrammarCompiler:
    """Compiles for one tokenizer and a model of `vocab` tokens, from any thread, and keeps what was used last.

    `eos_ids` end a text.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Iterable[int]):
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, sorted(eos_ids)
        self._lock = threading.Lock()
        self._trie: Any = None
        self._executor: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()  # by their text
        self._kept_chars = 0

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """ValueError with the reason if the grammar is unsound, too large or too slow, or can't be followed here."""
        llguidance = _library()
        text = grammar_text(wanted)
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        self.warm_up()
        pristine = _compile(llguidance, self._trie, text)
        self._probe(pristine.deep_copy())
        grammar = Grammar(pristine)
        with self._lock:
            self._keep(text, grammar)
        return grammar

    def warm_up(self) -> None:
        """Prepares for the tokenizer, which takes up to seconds. ValueError if that can't be."""
        with self._lock:
            if self._trie is None:
                self._trie = self._make_trie(_library())

    def _keep(self, text: str, grammar: Grammar) -> None:
        if text not in self._kept:
            self._kept[text] = grammar
            self._kept_chars += len(text)
        while len(self._kept) > _CACHE_GRAMMARS or len(self._kept) > 1 and self._kept_chars > _CACHE_CHARS:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_chars -= len(oldest)

    def _make_trie(self, llguidance: ModuleType) -> Any:
        source = None if self._tokenizer is None else self._tokenizer.json
        if source is None:
            raise ValueError(
                "structured outputs need a fast tokenizer (a tokenizer.json), and the engine has "
                f"{'none' if self._tokenizer is None else 'another kind'}; pass tokenizer=..."
            )
        size = self._tokenizer.vocab_size
        eos_ids = [token for token in self._eos_ids if token < size]
        try:
            return llguidance.LLTokenizer(source, n_vocab=max(size, self._vocab) or None, eos_token=eos_ids or None)
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"structured outputs don't work with this tokenizer: {error}") from error

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: np.ndarray) -> None:
        """Writes the mask of each matcher into its row of `masks`, int32 `[rows, mask_words(vocab)]`. Rows of matchers
        with an `error` are left to no use."""
        words = mask_words(self._trie.vocab_size)
        is_exact = words == masks.shape[1]
        into = masks if is_exact else np.zeros((len(matchers), words), np.int32)
        rows = [(matcher.inner, row if is_exact else i) for i, (matcher, row) in enumerate(matchers)]
        if len(rows) == 1:
            ((inner, row),) = rows
            inner.unsafe_compute_mask_ptr(into[row].ctypes.data, 4 * words)
        else:
            if self._executor is None:
                self._executor = _library().LLExecutor()
            self._executor.unsafe_compute_mask_ptr(rows, into.ctypes.data, 4 * words, len(into))
        if not is_exact:
            masks[[row for _, row in matchers]] = into[:, : masks.shape[1]]
        if self._vocab % 32:
            masks[[row for _, row in matchers], -1] &= np.int32((1 << self._vocab % 32) - 1)

    def _probe(self, inner: Any) -> None:
        """Takes a few tokens: what makes a grammar slow shows here, not in the engine's thread."""
        for _ in range(_PROBED_TOKENS):
            start = time.thread_time()
            bits = np.frombuffer(inner.compute_bitmask(), np.uint8)
            if inner.is_error():
                raise ValueError(f"the grammar can't be followed: {_first_line(inner.get_error())}; simplify it")
            taken = bits.nonzero()[0]
            if len(taken):
                byte = int(taken[len(taken) // 2])
                inner.consume_token(8 * byte + int(bits[byte]).bit_length() - 1)
            if (seconds := time.thread_time() - start) > MAX_MASK_S:
                raise ValueError(f"the grammar is too complex: {seconds:.2f} s for one token; simplify it")
            if not len(taken) or inner.is_stopped():
                return


def _compile(llguidance: ModuleType, trie: Any, text: str) -> Any:
    start = time.thread_time()
    limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
    matcher = llguidance.LLMatcher(trie, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"the grammar is not sound: {matcher.get_error().strip()[:1000]}")
    if (seconds := time.thread_time() - start) > MAX_COMPILE_S:
        raise ValueError(f"the grammar took {seconds:.1f} s to compile; at most {MAX_COMPILE_S:g} s are allowed")
    return matcher


def grammar_text(wanted: StructuredOutputs) -> str:
    """In llguidance's own form, JSON. Whether it is sound shows when it is compiled; ValueError for what can't even be
    written down."""
    matcher = _library().LLMatcher
    if wanted.regex is not None:
        return matcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return matcher.grammar_from_regex("|".join(map(re.escape, dict.fromkeys(wanted.choice))))
    if wanted.grammar is not None:
        return _of_grammar(wanted.grammar)
    options = {"whitespace_flexible": False}
    if not wanted.disable_any_whitespace:
        options = {"whitespace_pattern": wanted.whitespace_pattern or _WHITESPACE}
    try:
        return matcher.grammar_from_json_schema(wanted.json or '{"type": "object"}', overrides=options)
    except ValueError as error:
        raise ValueError(f"structured_outputs.json is not a JSON schema: {error}") from error


def _of_grammar(source: str) -> str:
    if source.lstrip().startswith("{"):
        try:
            known = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.grammar begins like JSON, and is none: {error}") from error
        if not isinstance(known, dict) or set(known) != {"grammars"}:
            raise ValueError('structured_outputs.grammar in JSON must be {"grammars": [...]}, as llguidance has it')
        return json.dumps(known)
    if "::=" in source:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if len(source) > _MAX_GBNF_CHARS:
            raise ValueError(
                f"structured_outputs.grammar has {len(source)} characters of GBNF, of which {_MAX_GBNF_CHARS} are "
                "allowed; write it in Lark"
            )
        try:
            source = gbnf_to_lark(source)
        except Exception as error:  # noqa: BLE001 - the converter raises several
            raise ValueError(f"structured_outputs.grammar is not sound GBNF: {error}") from error
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("structured outputs need the package llguidance; pip install llguidance") from error
    return llguidance


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:200]
