"""How a request's tokens are chosen and when it ends. Validated once, here, for every entrance."""

import enum
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from jaxllm.argument_checks import as_bias, as_ids, as_list, check_float, check_int, check_words
from jaxllm.structured_outputs import StructuredOutputs, as_structured_outputs

MAX_N = 128
MAX_STOPS = 32
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 32
# The next five are fixed widths of the device's tables.
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what models recommend
BAD_WORD_LEN = 8  # tokens of a bad word
MAX_SALT_LEN = 256  # characters

_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)
_NEUTRAL = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}  # what beam search accepts


class RequestOutputKind(enum.Enum):
    """What each output of a stream contains. `LLM.generate` always returns the whole."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # everything, once, at the end


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names and defaults. Raises `ValueError` naming field, value and range.

    The logits go through `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias` and the penalties, then
    temperature, min-p, top-k and top-p; tokens tied with the last kept one are kept too. Log-probabilities are the
    model's own, before all of these.

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
    min_tokens: int = 0  # no end of sequence, stop token or stop string earlier
    logprobs: int | None = None  # of the sampled token and of this many of the most likely, 0 .. 20
    prompt_logprobs: int | None = None  # likewise, of each token of the prompt
    logprob_token_ids: list[int] | None = None  # log-probabilities of these tokens at each step
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # for slow tokenizers; fast ones put none
    include_stop_str_in_output: bool = False  # keep the stop string or the stop token's text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int = 1  # tokens between two outputs of a stream, after the first
    logit_bias: Mapping[int | str, float] | None = None  # of up to 1024 token ids -> -100 .. 100, added to its logit
    allowed_token_ids: list[int] | None = None  # only these are generated
    bad_words: list[str] | None = None  # strings that are not generated
    # False and None read it, unless prompt_logprobs are wanted: cached blocks have none.
    skip_reading_prefix_cache: bool | None = None
    cache_salt: str | None = None  # only prompts with the same salt share cached blocks
    # The format that the text must have, also with `ignore_eos`; or a dict of its fields.
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    stops: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_penalties()
        self._check_best_of()
        self._check_beams()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._set("stops", tuple(as_list("stop", stop)))
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            self._set(name, as_ids(name, getattr(self, name)))
        self._set("stop_token_ids", self.stop_token_ids or [])
        self._set("bad_words", as_list("bad_words", self.bad_words))
        self._set("logit_bias", as_bias(self.logit_bias, MAX_LOGIT_BIAS))
        self._check_stops()
        self._check_words_and_ids()
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "skip_reading_prefix_cache" and value is None):
                raise ValueError(f"{name}={value!r} must be True or False")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LEN):
            raise ValueError(f"cache_salt={salt!r:.100} must be a string of 1 to {MAX_SALT_LEN} characters")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        self._set("structured_outputs", as_structured_outputs(self.structured_outputs))

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

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, 2.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("top_p", self.top_p, 0.0, 1.0)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
            self._set("seed", None if self.seed == -1 else self.seed)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower one or raise the other"
            )
        check_int("stream_interval", self.stream_interval, 1, 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_penalties(self) -> None:
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        check_int("best_of", self.best_of, 1, MAX_N)
        if self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of} is less than n={self.n}; raise it, or lower n")
        if self.beam_width is not None:
            raise ValueError(
                f"best_of={self.best_of} and beam_width={self.beam_width!r} exclude each other: beam search draws no "
                "samples; leave one of them out"
            )
        if self.best_of > self.n and self.temperature == 0:
            raise ValueError(
                f"best_of={self.best_of} with temperature=0 would choose among equal samples; raise temperature, leave "
                "best_of out, or search with beam_width"
            )

    def _check_beams(self) -> None:
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={self.early_stopping!r} must be True, False or 'never'")
        if self.beam_width is None:
            for name, default in (("length_penalty", 1), ("early_stopping", False)):
                if (value := getattr(self, name)) != default:
                    raise ValueError(f"{name}={value!r} is for beam search; give beam_width, or leave it out")
            return
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n > self.beam_width:
            raise ValueError(f"n={self.n} is more than beam_width={self.beam_width}; lower it, or raise beam_width")
        for name, allowed in _NEUTRAL.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(
                    f"{name}={value!r} has no effect with beam_width={self.beam_width}, as beam search draws nothing "
                    f"at random; leave {name} out, or beam_width"
                )

    def _check_stops(self) -> None:
        check_words("stop", self.stop, self.stops, MAX_STOPS)
        if self.stops and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids instead")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )

    def _check_words_and_ids(self) -> None:
        check_words("bad_words", self.bad_words, self.bad_words, MAX_BAD_WORDS)
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty, so that no token could be generated; give some, or None")
        ids = self.logprob_token_ids
        if ids is not None and not 1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(f"logprob_token_ids has {len(ids)} ids; give 1 to {MAX_LOGPROB_TOKEN_IDS}")
        if ids is not None and self.logprobs not in (None, len(ids)):
            raise ValueError(
                f"logprobs={self.logprobs} and {len(ids)} logprob_token_ids exclude each other; leave logprobs out"
            )


@dataclass(frozen=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, with vLLM's names and defaults and the meaning that `SamplingParams` gives
    them. Raises `ValueError` like it.

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

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise ValueError(
                f"temperature={self.temperature!r} has no effect, as beam search draws nothing at random; leave it out"
            )
        self.sampling_params  # noqa: B018 - checks the rest

    @property
    def sampling_params(self) -> SamplingParams:
        """The same parameters for `generate`, with the log-probabilities that `BeamSearchOutput` reports."""
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
