"""Compiles grammars for structured outputs with llguidance, outside the engine's thread, and fills their masks."""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jaxllm.grammar.json_schema import OPTIONS, first_one_of
from jaxllm.grammar.matcher import Matcher, first_line, mask_words
from jaxllm.grammar.spec import grammar_text, library
from jaxllm.structured_outputs import StructuredOutputs

MAX_COMPILE_S = 2.0  # processor time
MAX_MASK_S = 0.1  # processor time for one of the first masks; bounds what a step waits for a grammar
_PROBED_TOKENS = 4
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,  # an ambiguous grammar's grow with the text, and a step waits for them
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
# Errors of the library: that of a pattern shows it, marks a place under it, and says what is wrong there.
_PATTERN_ERROR = re.compile(r"regex parse error:\n *(?P<pattern>.*)\n(?P<mark> *)\^[ ^]*\n(?:error: )?(?P<what>.*)")
_GRAMMAR_ERROR = re.compile(r"(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<what>.*)")
_SHOWN_CHARS = 60  # of a pattern
_CACHE_CHARS = 1 << 23  # of the cached grammars together
_CACHE_GRAMMARS = 256


class Grammar:
    """A compiled grammar: immutable, shared by requests."""

    def __init__(self, pristine: Any):
        self._pristine = pristine

    def matcher(self) -> Matcher:
        return Matcher(self._pristine.deep_copy())


class GrammarCompiler:
    """Compiles for one tokenizer and a model of `vocab` tokens, from any thread, with a cache of recent grammars.

    `eos_ids` are the end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Iterable[int]):
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, sorted(eos_ids)
        self._lock = threading.Lock()
        self._trie: Any = None
        self._executor: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()  # by text, least recently used first
        self._kept_chars = 0

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Raises ValueError with the reason if the grammar is invalid, too large, too slow, or unusable here."""
        llguidance = library()
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
        """Builds the tokenizer's trie, which may take seconds. Raises ValueError if the tokenizer is unsuitable."""
        with self._lock:
            if self._trie is None:
                self._trie = self._make_trie(library())

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
        """Writes the mask of each matcher into its row of `masks`, int32 `[rows, mask_words(vocab)]`. The rows of
        matchers with an `error` are undefined."""
        words = mask_words(self._trie.vocab_size)
        is_exact = words == masks.shape[1]
        into = masks if is_exact else np.zeros((len(matchers), words), np.int32)
        rows = [(matcher.inner, row if is_exact else i) for i, (matcher, row) in enumerate(matchers)]
        if len(rows) == 1:
            ((inner, row),) = rows
            inner.unsafe_compute_mask_ptr(into[row].ctypes.data, 4 * words)
        else:
            if self._executor is None:
                self._executor = library().LLExecutor()
            self._executor.unsafe_compute_mask_ptr(rows, into.ctypes.data, 4 * words, len(into))
        if not is_exact:
            masks[[row for _, row in matchers]] = into[:, : masks.shape[1]]
        if self._vocab % 32:
            masks[[row for _, row in matchers], -1] &= np.int32((1 << self._vocab % 32) - 1)

    def _probe(self, inner: Any) -> None:
        """Follows a few tokens, so that a slow grammar is refused here instead of slowing the engine's thread."""
        for _ in range(_PROBED_TOKENS):
            start = time.thread_time()
            bits = np.frombuffer(inner.compute_bitmask(), np.uint8)
            if inner.is_error():
                raise ValueError(f"the grammar can't be followed: {first_line(inner.get_error())}; simplify it")
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
        raise ValueError(_explain(matcher.get_error(), text))
    if (seconds := time.thread_time() - start) > MAX_COMPILE_S:
        raise ValueError(f"the grammar took {seconds:.1f} s to compile; at most {MAX_COMPILE_S:g} s are allowed")
    return matcher


def _explain(error: str, grammar: str) -> str:
    """The library's error in a line, with the place in the user's own pattern or grammar."""
    if "coerce_one_of" in error:
        schemas = (part.get("json_schema") for part in json.loads(grammar)["grammars"])
        path = next(filter(None, (first_one_of(schema) for schema in schemas if isinstance(schema, dict))), "#")
        return (
            f"the schema has a oneOf (the first at {path}) whose alternatives overlap, or may: use anyOf, or put "
            f'"{OPTIONS}": {{"coerce_one_of": true}} into the schema, with which several may match'
        )
    if (match := _PATTERN_ERROR.search(error)) is not None:
        line_start = match.start("pattern") - error.rindex("\n", 0, match.start("pattern")) - 1
        rest = match["pattern"][max(0, len(match["mark"]) - line_start) :].replace(r"\/", "/")
        place = f"at {rest[:_SHOWN_CHARS]!r}" if rest else "at its end"
        return f"the regular expression is not sound: {match['what']}, {place}"
    if (match := _GRAMMAR_ERROR.match(error)) is not None:
        return f"the grammar is not sound: line {match['line']}, column {match['column']}: {match['what'][:1000]}"
    return f"the grammar is not sound: {first_line(error)[:1000]}"
