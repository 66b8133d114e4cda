"""Builds one grammar, in llguidance's dialect of Lark, from several."""

import json
import re
from typing import Any

from jaxllm.grammar.spec import grammar_text
from jaxllm.server.http.errors import refusing
from jaxllm.server.openai.parsing import harmony
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"
GAP = r"/\n{1,4}/"


class GrammarBuilder:
    """`tokenizer` tells which marks are special tokens: text in a grammar never is one."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []
        self._num_names = 0

    def add(self, wanted: StructuredOutputs) -> str:
        """Adds a grammar; returns the name by which rules refer to it."""
        with refusing(None):
            first, *others = json.loads(grammar_text(wanted))["grammars"]
        name = wanted.grammar and first.get("name") or f"part{len(self._others)}"  # it may refer to itself by name
        self._others += [first | {"name": name}, *others]
        return f"@{name}"

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def fresh(self) -> str:
        """A name that no rule has."""
        self._num_names += 1
        return f"r{self._num_names}"

    def mark(self, text: str) -> str:
        """A mark: the special token of this text if there is one."""
        token = self.special(text)
        return literal(text) if token is None else f"<[{token}]>"

    def special(self, text: str) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.special_id(text)

    def until(self, mark: str) -> str:
        """Any text up to `mark`, and that."""
        name = self.fresh()
        if self.special(mark) is not None:
            return f"{self.rule(name.upper(), ANY_TEXT)} {self.mark(mark)}"
        escaped = re.escape(mark).replace("/", r"\/").replace("\n", "n")
        self.rule(f"{name}[lazy]", rf"/(.|\n)*{escaped}/")
        return name

    def answer(self, wanted: StructuredOutputs, thoughts: str | None) -> str:
        """An answer in the format `wanted`, without the reasoning before it."""
        if thoughts != "openai_gptoss":
            return self.add(wanted)
        return f'{self.mark(harmony.CHANNEL)} "final" {self.mark(harmony.MESSAGE)} {self.add(wanted)}'

    def after_thoughts(self, start: str, marks: tuple[str, str], *, is_open: bool) -> str:
        """`start` after reasoning between `marks` that the prompt has begun (`is_open`) or that may come first."""
        self.rule("answer", start)
        thoughts = f"{self.until(marks[1])} {GAP}? answer"
        return thoughts if is_open else f"{self.mark(marks[0])} {thoughts} | answer"

    def after_analysis(self, start: str) -> str:
        """`start` after messages of reasoning, in gpt-oss's format."""
        self.rule("answer", start)
        head = f'{self.mark(harmony.CHANNEL)} "analysis" {self.mark(harmony.MESSAGE)}'
        following = f"{self.mark(harmony.START)} {literal(harmony.ROLE)}"
        self.rule("thoughts", f"{head} {self.until(harmony.END)} {following}")
        return "thoughts* answer"

    def text(self, start: str) -> str:
        source = "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"
        return json.dumps({"grammars": [{"lark_grammar": source}, *self._others]})


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
