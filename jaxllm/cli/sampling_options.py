"""The commands' sampling options: tables that define the arguments, their help, and the fields that they set."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxllm.cli.parser import json_object
from jaxllm.sampling_params import SamplingParams

DEFAULTS = {"temperature": 0.8, "max_tokens": 128}  # better suited to a terminal than the library's
_NUMBERS = (
    ("n", int, "completions of each prompt"),
    ("best_of", int, "sample this many and show the --n with the highest log-probability per token"),
    ("temperature", float, "randomness; 0 takes the most likely token"),
    ("top_k", int, "sample from this many most likely tokens; 0: all"),
    ("top_p", float, "sample from the most likely tokens whose probabilities add up to this"),
    ("min_p", float, "exclude tokens less likely than this fraction of the most likely one"),
    ("presence_penalty", float, "makes tokens that are in the output less likely; -2 to 2"),
    ("frequency_penalty", float, "likewise, for each occurrence in the output; -2 to 2"),
    ("repetition_penalty", float, "above 1, makes tokens of prompt and output less likely"),
    ("seed", int, "reproduces the same text"),
    ("max_tokens", int, "maximum number of tokens to generate"),
    ("min_tokens", int, "minimum number of tokens before an end"),
    ("logprobs", int, "log-probabilities of each token and of this many most likely ones; 0 to 20, for JSON"),
    ("prompt_logprobs", int, "likewise, of the prompt's tokens"),
    ("truncate_prompt_tokens", int, "keep this many of the prompt's last tokens; -1: as many as there is room for"),
)
_BEAMS = (
    ("beam_width", int, "search with this many beams, 1 to 32, and show the --n best completions"),
    ("length_penalty", float, "above 0 favours long completions, below 0 short ones; -10 to 10"),
)
ONE_ANSWER = ("n", "best_of", "beam_width", "logprobs", "prompt_logprobs", "logprob_token_ids")  # not of one text
_EARLY_STOPPING = {"true": True, "false": False, "never": "never"}
_LISTS = (  # each may be given more than once
    ("stop", str, "TEXT", "end before this text"),
    ("stop_token_ids", int, "ID", "end at this token"),
    ("bad_words", str, "TEXT", "never generate this text"),
    ("allowed_token_ids", int, "ID", "generate only these tokens"),
    ("logprob_token_ids", int, "ID", "log-probability of this token at each step, for JSON"),
)
_FLAGS = (
    ("ignore_eos", "continue after the end of sequence"),
    ("include_stop_str_in_output", "keep the stop text, or the stop token's text, at the end"),
    ("skip_reading_prefix_cache", "compute the whole prompt"),
)
_NEGATIONS = (  # of fields that are true by default
    ("skip_special_tokens", "show special tokens"),
    ("spaces_between_special_tokens", "put no spaces between special tokens, for slow tokenizers"),
    ("detokenize", "return token ids only, for JSON"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds the options; those not given are None. `defaults` are the command's own, for its help."""
    add = parser.add_argument_group("sampling").add_argument
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | DEFAULTS | defaults
    _add_numbers(add, _NUMBERS, fields)
    for name, kind, metavar, text in _LISTS:
        add(_option(name), type=kind, action="append", metavar=metavar, help=f"{text}; may be given more than once")
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=X",
        help="add X, -100 to 100, to the token's logit; may be given more than once",
    )
    add(
        "--structured-outputs",
        type=json_object,
        metavar="JSON",
        help="the format of the text: json (a schema), regex, choice, grammar or json_object, as in "
        """'{"choice": ["yes", "no"]}'""",
    )
    for name, text in _FLAGS:
        add(_option(name), action="store_const", const=True, help=text)
    for name, text in _NEGATIONS:
        add(_option(f"no_{name}"), action="store_const", const=False, dest=name, help=text)
    add = parser.add_argument_group(
        "beam search",
        "Searches for the most likely completions, without --temperature, and shows them when all have finished.",
    ).add_argument
    _add_numbers(add, _BEAMS, fields)
    add(
        "--early-stopping",
        choices=tuple(_EARLY_STOPPING),
        metavar="WHEN",
        help="end when as many completions as the beam width have finished (true), or when a better one is unlikely "
        "(false) or impossible (never) (default: false)",
    )


def _add_numbers(add: Callable, table: tuple, fields: Mapping[str, Any]) -> None:
    for name, kind, text in table:
        note = "" if fields[name] is None else f" (default: {fields[name]})"
        add(_option(name), type=kind, metavar="N" if kind is int else "X", help=text + note)


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` given on the command line."""
    tables = (_NUMBERS, _BEAMS, _LISTS, _FLAGS, _NEGATIONS)
    given = {row[0]: getattr(arguments, row[0]) for table in tables for row in table}
    given["early_stopping"] = _EARLY_STOPPING.get(arguments.early_stopping)
    given["structured_outputs"] = arguments.structured_outputs
    if arguments.logit_bias is not None:
        given["logit_bias"] = dict(arguments.logit_bias)
    return {name: value for name, value in given.items() if value is not None}


def check_one_answer(fields: Mapping[str, Any], what: str) -> None:
    """Raises `ValueError` for fields that ask for more than one text as it grows."""
    for name in ONE_ANSWER:
        if name in fields:
            raise ValueError(
                f"--{name.replace('_', '-')} is not for {what}; use jaxllm generate, with --chat for a chat"
            )


def parse_field(name: str, value: str, *, forbidden: Sequence[str] = ()) -> dict[str, Any]:
    """Parses one numeric field of `SamplingParams`; empty text gives the default. Raises `ValueError`."""
    kinds = {row[0]: row[1] for row in _NUMBERS if row[0] not in forbidden}
    if name not in kinds:
        raise ValueError(f"{name!r} is not a parameter to set; there are {', '.join(kinds)}")
    if not value:
        defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | DEFAULTS
        return {name: defaults[name]}
    try:
        return {name: kinds[name](value)}
    except ValueError as error:
        kind = "an integer" if kinds[name] is int else "a number"
        raise ValueError(f"{name}={value!r} must be {kind}") from error


def with_defaults(fields: Mapping[str, Any], recommended: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """`fields` of `SamplingParams` with the commands' defaults, and between them what the model recommends; beam search
    draws nothing, and has temperature 0."""
    is_search = fields.get("beam_width") is not None
    return {**DEFAULTS, **({"temperature": 0.0} if is_search else recommended), **fields}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, as in 198=-5") from None
