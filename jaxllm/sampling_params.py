"""How a request's tokens are chosen and when it ends. Validated once, here, for every entrance."""

import enum
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.argument_checks import as_bias, as_ids, as_list, check_int
from jaxllm.from_vllm.request_arguments import OTHER_SAMPLING_FIELDS, SAMPLING_FIELDS
from jaxllm.from_vllm.rules import check_names
from jaxllm.keyword_fields import KeywordFields
from jaxllm.sampling_checks import BAD_WORD_LEN as BAD_WORD_LEN
from jaxllm.sampling_checks import MAX_BAD_WORDS as MAX_BAD_WORDS
from jaxllm.sampling_checks import (
    MAX_BEAM_WIDTH,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_LEN,
    LogprobsMode,
    check_beams,
    check_best_of,
    check_logprobs_mode,
    check_numbers,
    check_penalties,
    check_stops,
    check_words_and_ids,
)
from jaxllm.sampling_checks import MAX_LOGPROB_TOKEN_IDS as MAX_LOGPROB_TOKEN_IDS
from jaxllm.sampling_checks import MAX_N as MAX_N
from jaxllm.sampling_checks import MAX_STOP_TOKEN_IDS as MAX_STOP_TOKEN_IDS
from jaxllm.sampling_checks import MAX_STOPS as MAX_STOPS
from jaxllm.structured_outputs import StructuredOutputs, as_structured_outputs

DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what models recommend
StructuredOutputsParams = StructuredOutputs  # its name in vLLM

_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)


class RequestOutputKind(enum.Enum):
    """What each output of a stream contains. `LLM.generate` always returns the whole."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # everything, once, at the end


@dataclass(kw_only=True)
class SamplingParams(KeywordFields):
    """Sampling parameters, with vLLM's names and defaults. Raises `ValueError` naming field, value and range, and
    `TypeError` for a name that is no field.

    Fields may be changed: they are checked again when a request is made with them, which keeps a copy of its own.

    The logits go through `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias` and the penalties, then
    temperature, min-p, top-k and top-p; tokens tied with the last kept one are kept too. Log-probabilities are the
    model's own, before all of these ("raw"), those after all up to the temperature, of the whole vocabulary
    ("processed"), or those that the token was drawn by ("sampled"), where what min-p, top-k and top-p leave out has
    none. Greedy tokens have those of temperature 1, without what comes after it. Those of a prompt are raw.

    With `best_of` above `n`, and with `beam_width`, the completions are returned best first and once, when all have
    finished, whatever `output_kind` is. Beam search follows `transformers`: a completion's score is the sum of its
    tokens' log-probabilities (with bias, masks and penalties), divided by their number (with the end of sequence,
    without the prompt) to the power of `length_penalty`.
    """

    n: int = 1  # completions, 1 .. 128
    best_of: int | None = None  # n .. 128 samples, of which the n with the highest log-probability per token return
    beam_width: int | None = None  # 1 .. 32: beam search that returns the n best; None: no beam search
    length_penalty: float = 1.0  # -10 .. 10, for beams; above 0 favours long completions, below 0 short ones
    # The search ends when beam_width completions have finished (True), or when a better one is unlikely (False) or
    # impossible ("never").
    early_stopping: bool | Literal["never"] = False
    presence_penalty: float = 0.0  # -2 .. 2, once for each token in the output
    frequency_penalty: float = 0.0  # -2 .. 2, for each occurrence in the output
    repetition_penalty: float = 1.0  # above 0; divides positive logits of tokens in prompt or output
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 0 .. 1; 0 keeps the most likely token
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # 0 .. 1, relative to the most likely token
    seed: int | None = None  # reproduces the text whatever runs beside it; None or -1: the engine chooses
    stop: str | list[str] | None = None  # strings that end the text
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the model's context
    truncate_prompt_tokens: int | None = (
        None  # keep this many of the prompt's last tokens; -1: as many as there is room
    )
    min_tokens: int = 0  # no end of sequence, stop token or stop string earlier
    logprobs: int | None = None  # of the sampled token and of this many of the most likely, 0 .. 20
    prompt_logprobs: int | None = None  # likewise, of each token of the prompt
    logprob_token_ids: list[int] | None = None  # log-probabilities of these tokens at each step
    # Of which distribution they are; see above. None: what `LLM(logprobs_mode=...)` says, "raw" if nothing.
    logprobs_mode: LogprobsMode | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # for slow tokenizers; fast ones put none
    include_stop_str_in_output: bool = False  # keep the stop string or the stop token's text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = 1  # tokens between two outputs of a stream, after the first
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = (
        None  # of up to 1024 token ids -> -100 .. 100, added to its logit
    )
    allowed_token_ids: list[int] | None = None  # only these are generated
    bad_words: list[str] | None = None  # strings that are not generated
    # False and None read it, unless prompt_logprobs are wanted: cached blocks have none.
    skip_reading_prefix_cache: bool | None = None
    cache_salt: str | None = None  # only prompts with the same salt share cached blocks
    # The format that the text must have, also with `ignore_eos`; or a dict of its fields.
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    stops: tuple[str, ...] = field(init=False, repr=False, default=())

    _foreign, _elsewhere = SAMPLING_FIELDS, OTHER_SAMPLING_FIELDS

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, *args, **given):
            self._set_fields(args, given)

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """With the defaults for what is None."""
        defaults = cls._defaults()
        fields: dict[str, Any] = {n: defaults.get(n) if value is None else value for n, value in given.items()}
        return cls(**fields)

    def __post_init__(self) -> None:
        check_numbers(self)
        check_penalties(self)
        check_best_of(self)
        check_logprobs_mode(self)
        check_beams(self)
        stop = self.stop
        self.stop = [stop] if isinstance(stop, str) else as_list("stop", stop)
        self.stops = tuple(self.stop)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            setattr(self, name, as_ids(name, getattr(self, name)))
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = as_list("bad_words", self.bad_words)
        self.logit_bias = as_bias(self.logit_bias, MAX_LOGIT_BIAS)
        check_stops(self, stop)
        check_words_and_ids(self)
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "skip_reading_prefix_cache" and value is None):
                raise ValueError(f"{name}={value!r} must be True or False")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LEN):
            raise ValueError(f"cache_salt={salt!r:.100} must be a string of 1 to {MAX_SALT_LEN} characters")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        self.structured_outputs = as_structured_outputs(self.structured_outputs)
        self._keep()

    @property
    def needs_full_sampler(self) -> bool:
        """Whether sampling needs logits processors (penalties, bias, masks) or log-probabilities."""
        chooses = self.beam_width is not None or self.structured_outputs is not None
        return self.min_tokens > 0 or self.tracks_logprobs or self.alters_logits or chooses

    @property
    def wants_logprobs(self) -> bool:
        """Whether outputs have log-probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def tracks_logprobs(self) -> bool:
        """Whether the engine needs the sampled tokens' log-probabilities: to return them, or to rank samples."""
        return self.wants_logprobs or self.num_samples > self.n

    @property
    def num_samples(self) -> int:
        """Completions to sample; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_top_logprobs(self) -> int:
        """How many of the most likely tokens are reported at each step."""
        return 0 if self.logprob_token_ids is not None else self.logprobs or 0

    @property
    def penalizes(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def alters_logits(self) -> bool:
        return self.penalizes or bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None

    @property
    def reads_history(self) -> bool:
        """Whether its logits depend on tokens that came long before."""
        return self.penalizes or bool(self.bad_words)

    @property
    def has_rules(self) -> bool:
        """Whether the device needs to know more than numbers: tokens that are biased, allowed, forbidden or watched."""
        names_tokens = self.allowed_token_ids is not None or self.logprob_token_ids is not None
        return names_tokens or bool(self.logit_bias or self.bad_words)


@dataclass
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, with vLLM's names and defaults and the meaning that `SamplingParams` gives
    them. Raises `ValueError` like it; what is changed afterwards is checked when a search is made with it.

    Scores follow `transformers`. vLLM divides by the length of prompt and output, without the end of sequence, so that
    with long prompts a `length_penalty` other than 0 weighs more here.
    """

    beam_width: int  # 1 .. 32, and as many completions
    max_tokens: int | None  # None: up to the model's context
    ignore_eos: bool = False
    temperature: float = 0.0  # nothing is drawn at random, so it must be 0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    _: KW_ONLY
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    early_stopping: bool | Literal["never"] = False
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __new__(cls, *args: Any, **given: Any) -> "BeamSearchParams":
        check_names(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.sampling_params  # noqa: B018 - checks them

    def clone(self) -> "BeamSearchParams":
        return replace(self)

    @property
    def sampling_params(self) -> SamplingParams:
        """The same parameters for `generate`, with the log-probabilities that `BeamSearchOutput` reports."""
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise ValueError(
                f"temperature={self.temperature!r} has no effect, as beam search draws nothing at random; leave it out"
            )
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=0.0,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
            logprobs=min(MAX_LOGPROBS, 2 * self.beam_width),
            structured_outputs=self.structured_outputs,
        )


def drawing_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that say how to draw, where they have other values than the defaults."""
    usual, given = SamplingParams(), {name: getattr(params, name) for name in DRAWING}
    return {name: value for name, value in given.items() if value != getattr(usual, name)}


def __getattr__(name: str) -> Any:
    from jaxllm.from_vllm.names import missing

    raise missing(__name__, name, [known for known in globals() if not known.startswith("_")])
