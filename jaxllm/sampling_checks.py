"""The checks of `SamplingParams`' fields, which bring numbers into their usual form. All raise `ValueError`."""

from typing import Any, Literal, get_args

from jaxllm.argument_checks import check_float, check_int, check_words

MAX_N = 128
MAX_STOPS = 32
LogprobsMode = Literal["raw", "processed", "sampled"]  # each further on the way to the draw
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 32
# The next five are fixed widths of the device's tables.
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
BAD_WORD_LEN = 8  # tokens of a bad word
MAX_SALT_LEN = 256  # characters

_NEUTRAL = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}  # what beam search accepts


def check_numbers(params: Any) -> None:
    check_int("n", params.n, 1, MAX_N)
    check_float("temperature", params.temperature, 0.0, 2.0)
    check_int("top_k", params.top_k, -1, 2**31 - 1)
    check_float("top_p", params.top_p, 0.0, 1.0)
    check_float("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        check_int("seed", params.seed, -(2**63), 2**64 - 1)
        params.seed = None if params.seed == -1 else params.seed
    if params.max_tokens is not None:
        check_int("max_tokens", params.max_tokens, 1, 2**31 - 1)
    check_int("min_tokens", params.min_tokens, 0, 2**31 - 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}; lower one or raise the other"
        )
    params.stream_interval = 1 if params.stream_interval is None else params.stream_interval
    check_int("stream_interval", params.stream_interval, 1, 2**31 - 1)
    if params.truncate_prompt_tokens not in (None, -1):
        check_int("truncate_prompt_tokens", params.truncate_prompt_tokens, 1, 2**31 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is True:
            setattr(params, name, 1)
        elif count is not None:
            check_int(name, count, 0, MAX_LOGPROBS)


def check_penalties(params: Any) -> None:
    check_float("presence_penalty", params.presence_penalty, -2.0, 2.0)
    check_float("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    check_float("repetition_penalty", params.repetition_penalty, 1e-3, 1e3)


def check_best_of(params: Any) -> None:
    if params.best_of is None:
        return
    check_int("best_of", params.best_of, 1, MAX_N)
    if params.best_of < params.n:
        raise ValueError(f"best_of={params.best_of} is less than n={params.n}; raise it, or lower n")
    if params.beam_width is not None:
        raise ValueError(
            f"best_of={params.best_of} and beam_width={params.beam_width!r} exclude each other: beam search draws no "
            "samples; leave one of them out"
        )
    if params.best_of > params.n and params.temperature == 0:
        raise ValueError(
            f"best_of={params.best_of} with temperature=0 would choose among equal samples; raise temperature, leave "
            "best_of out, or search with beam_width"
        )


def check_logprobs_mode(params: Any) -> None:
    if params.logprobs_mode not in (None, *LOGPROBS_MODES):
        raise ValueError(
            f"logprobs_mode={params.logprobs_mode!r:.100} must be one of {', '.join(LOGPROBS_MODES)}, or None"
        )
    if params.logprobs_mode in (None, "raw"):
        return
    if params.beam_width is not None or (params.best_of or 0) > params.n:
        raise ValueError(
            f"logprobs_mode={params.logprobs_mode!r} is for samples that are returned as they are drawn: best_of and "
            "beam_width rank completions by the model's own log-probabilities; leave one of them out"
        )


def check_beams(params: Any) -> None:
    check_float("length_penalty", params.length_penalty, -10.0, 10.0)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise ValueError(f"early_stopping={params.early_stopping!r} must be True, False or 'never'")
    if params.beam_width is None:
        for name, default in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(params, name)) != default:
                raise ValueError(f"{name}={value!r} is for beam search; give beam_width, or leave it out")
        return
    check_int("beam_width", params.beam_width, 1, MAX_BEAM_WIDTH)
    if params.n > params.beam_width:
        raise ValueError(f"n={params.n} is more than beam_width={params.beam_width}; lower it, or raise beam_width")
    for name, allowed in _NEUTRAL.items():
        if (value := getattr(params, name)) not in allowed:
            raise ValueError(
                f"{name}={value!r} has no effect with beam_width={params.beam_width}, as beam search draws nothing "
                f"at random; leave {name} out, or beam_width"
            )


def check_stops(params: Any, given: Any) -> None:
    check_words("stop", given, params.stops, MAX_STOPS)
    if params.stops and not params.detokenize:
        raise ValueError("stop strings need detokenize=True; use stop_token_ids instead")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids has {len(params.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )


def check_words_and_ids(params: Any) -> None:
    check_words("bad_words", params.bad_words, params.bad_words, MAX_BAD_WORDS)
    if params.allowed_token_ids == []:
        raise ValueError("allowed_token_ids is empty, so that no token could be generated; give some, or None")
    ids = params.logprob_token_ids
    if ids is not None and not 1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS:
        raise ValueError(f"logprob_token_ids has {len(ids)} ids; give 1 to {MAX_LOGPROB_TOKEN_IDS}")
    if ids is not None and params.logprobs not in (None, len(ids)):
        raise ValueError(
            f"logprobs={params.logprobs} and {len(ids)} logprob_token_ids exclude each other; leave logprobs out"
        )
