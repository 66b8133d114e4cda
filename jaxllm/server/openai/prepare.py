"""Converts requests to prompt ids and `SamplingParams`, checked against the model, for every route. The functions are
synchronous and run in threads, because templates and tokenizers take time."""

import dataclasses
import hashlib
from typing import NamedTuple

from jaxllm.engine.intake import check_request
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.http.errors import APIError, invalid, refusing, too_long, unsupported
from jaxllm.server.openai.infilling import infilling_ids, infilling_tokens
from jaxllm.server.openai.response_format import ResponseFormat, response_format_of
from jaxllm.server.openai.schemas import MAX_LOGPROB_ENTRIES, MAX_PROMPTS, MAX_SEQUENCES, CompletionRequest, Sampling
from jaxllm.server.served_model import ServedModel

_PASSED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
    "cache_salt",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "prompt_logprobs",
    "logprob_token_ids",
)
_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams)) | {"logprobs"}
_UNARY_INTERVAL = 16  # tokens between two updates of an answer that is not streamed
_MOST_CHARS_PER_TOKEN = 32  # on average; no real text has longer tokens


class GenerationJob(NamedTuple):
    """One prompt for the engine."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None  # to echo
    unchecked: ResponseFormat | None = None  # its format, unless that is known to be sound
    num_logprobs: int = 0  # that its answer may have at most, where they are counted

    def salted(self, tenant: bytes) -> "GenerationJob":
        """The same job in a part of the prefix cache that only this tenant uses, because cache hits are measurable and
        would reveal other tenants' prompts."""
        salt = salt_of(tenant, self.params.cache_salt)
        return self._replace(params=dataclasses.replace(self.params, cache_salt=salt))


def salt_of(tenant: bytes, own: str | None) -> str:
    """Of the part of the prefix cache that the requests of one tenant use that have `own` as their salt."""
    text = (own or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(tenant + text).hexdigest()  # unambiguous, since the digest has a fixed length


def count_prompts(request: CompletionRequest) -> int:
    """The number of prompts, from the request alone, so that it is known before any work is done."""
    prompt = request.prompt
    count = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    count_samples(count, request)
    return count


def count_samples(count: int, request: Sampling) -> None:
    """Raises `APIError` if `count` prompts with this many samples are too much for one request."""
    samples = max(request.n or 1, request.best_of or 0, request.beam_width or 0)
    if count > MAX_PROMPTS or count * samples > MAX_SEQUENCES:
        raise invalid(
            f"{count} prompts with {samples} samples each are more than a request may have ({MAX_PROMPTS} prompts, "
            f"{MAX_SEQUENCES} samples in all); split it",
            "prompt" if count > 1 else "n",
        )


def with_logprobs_counted(info: EngineInfo, jobs: list[GenerationJob], request: Sampling) -> list[GenerationJob]:
    """The jobs, with the log-probabilities that their answer may have: it is in memory as a whole. One text alone has
    no more than its context holds, and is not counted. Raises `APIError` for too many."""
    drawn = max(request.n or 1, request.best_of or 0, request.beam_width or 0)
    if len(jobs) == drawn == 1:
        return jobs
    counted = [job._replace(num_logprobs=_num_logprobs(info, job, request.n or 1, drawn)) for job in jobs]
    entries = sum(job.num_logprobs for job in counted)
    if entries > MAX_LOGPROB_ENTRIES:
        raise invalid(
            f"this answer may have {entries} log-probabilities, more than {MAX_LOGPROB_ENTRIES}; ask for fewer of a "
            "token, for fewer tokens or samples, or send several requests",
            "logprobs",
        )
    return counted


def _num_logprobs(info: EngineInfo, job: GenerationJob, shown: int, drawn: int) -> int:
    params, length = job.params, len(job.token_ids)
    count = 0 if params.prompt_logprobs is None else shown * length * (params.prompt_logprobs + 1)
    if params.logprobs is not None or params.logprob_token_ids is not None:
        most = info.config.max_model_len - length
        num_tokens = most if params.max_tokens is None else min(most, params.max_tokens)
        count += drawn * num_tokens * (max(params.logprobs or 0, len(params.logprob_token_ids or ())) + 1)
    return count


def completion_jobs(model: ServedModel, info: EngineInfo, request: CompletionRequest) -> list[GenerationJob]:
    """A job for each prompt. Raises `APIError`."""
    wants_scores = request.echo and request.logprobs is not None
    if request.logprob_token_ids is not None and request.logprobs is None:
        raise invalid("logprob_token_ids needs logprobs", "logprob_token_ids")
    response_format = response_format_of(request)
    if request.suffix:
        prompts = infilling_prompts(model, info, request, request.suffix)
    else:
        prompts = _prompts(model, info, request)
    params = sampling_params(
        model,
        request,
        response_format,
        max_tokens=request.max_tokens or (None if request.max_tokens is None else 1),  # 0: one, not shown
        logprobs=None if request.logprob_token_ids is not None else request.logprobs,
        prompt_logprobs=request.logprobs if wants_scores else request.prompt_logprobs,
    )
    unchecked = unchecked_format(model, response_format)
    jobs = []
    for ids, text in prompts:
        ids, text = truncated(ids, text, request, info)
        check_job(model, info, ids, params, "prompt")
        if text is None and request.echo:
            text = _decode(model, ids)
        jobs.append(GenerationJob(ids, params, text, unchecked))
    return with_logprobs_counted(info, jobs, request)


def truncated(ids: list[int], text: str | None, request: Sampling, info: EngineInfo) -> tuple[list[int], str | None]:
    """The last `truncate_prompt_tokens` of a prompt; the text is unknown if that cuts it."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return ids, text
    if keep == 0:
        raise invalid("truncate_prompt_tokens=0 leaves no prompt; give 1 or more, or -1", "truncate_prompt_tokens")
    keep = info.config.max_model_len - 1 if keep == -1 else keep
    return (ids, text) if len(ids) <= keep else (ids[-keep:], None)


def _prompts(model: ServedModel, info: EngineInfo, request: CompletionRequest) -> list[tuple[list[int], str | None]]:
    prompt = request.prompt
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts:
        raise invalid("prompt is an empty list; give at least one", "prompt")
    if len({type(one) for one in prompts}) > 1:
        raise invalid("prompt mixes texts and token ids; send two requests", "prompt")
    special = request.add_special_tokens is not False
    found = []
    for one in prompts:
        if isinstance(one, str):
            found.append((encode(model, info, one, "prompt", add_special_tokens=special), one))
        else:
            found.append((one, None))
    return found


def infilling_prompts(
    model: ServedModel, info: EngineInfo, request: CompletionRequest, suffix: str
) -> list[tuple[list[int], str | None]]:
    """Prompts for the text between each prompt and `suffix`; tokens that end such a text are added to the request's
    stop tokens. Raises `APIError`."""
    tokenizer = model.need_tokenizer("suffix")
    tokens = infilling_tokens(tokenizer)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = [one for one in prompts if isinstance(one, str)]
    if not texts or len(texts) < len(prompts):
        raise invalid("suffix needs prompts in text; token ids can have the tokens for filling in themselves", "suffix")
    if request.echo:
        raise unsupported("echo", "echo shows a prompt and what follows it; with suffix, leave it out")
    request.stop_token_ids = [*(request.stop_token_ids or ()), *tokens.ends]
    special = request.add_special_tokens is not False
    length = len(encode(model, info, suffix, "suffix", add_special_tokens=False))
    if length >= info.config.max_model_len:  # before it is encoded for each prompt
        raise _too_many(length, info, "suffix")
    found: list[tuple[list[int], str | None]] = []
    for one in texts:
        check_chars(info, one, "prompt")
        with refusing("suffix"):
            ids = infilling_ids(tokenizer, tokens, one, suffix, add_special_tokens=special)
        found.append((ids, one))
    return found


def _decode(model: ServedModel, ids: list[int]) -> str:
    return model.need_tokenizer("echo").decode(ids, skip_special_tokens=False)


def encode(
    model: ServedModel, info: EngineInfo, text: str, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of `text`, refused without tokenizing if it is far too long. Raises `APIError`."""
    check_chars(info, text, param)
    with refusing(param):
        return model.need_tokenizer(param).encode(text, add_special_tokens)


def check_chars(info: EngineInfo, text: str, param: str) -> None:
    """Raises `APIError` for a text that is far too long for the model."""
    most = info.config.max_model_len * _MOST_CHARS_PER_TOKEN
    if len(text) > most:
        raise too_long(
            f"{maximum_length(info)}, which hold at most {most} characters, and {param} has {len(text)}", param
        )


def sampling_params(
    model: ServedModel,
    request: Sampling,
    response_format: ResponseFormat | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The request's sampling parameters, with the model's recommendations as defaults. Raises `APIError`."""
    given = {name: value for name in _PASSED if (value := getattr(request, name)) is not None}
    defaults = {} if request.beam_width is not None else model.defaults
    if request.best_of:
        given["best_of"] = request.best_of
    fields = (
        defaults
        | given
        | {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "output_kind": RequestOutputKind.DELTA,
            "stream_interval": 1 if request.stream else _UNARY_INTERVAL,
            "detokenize": model.tokenizer is not None,
            "structured_outputs": None if response_format is None else response_format.wanted,
        }
    )
    with refusing(None, _FIELDS):
        return SamplingParams(**fields)


def unchecked_format(model: ServedModel, response_format: ResponseFormat | None) -> ResponseFormat | None:
    """The format, unless it was checked before. Raises `APIError` for one that was refused."""
    if response_format is None:
        return None
    with refusing(response_format.param):
        return None if model.grammars.knows(response_format.wanted) else response_format


def check_job(model: ServedModel, info: EngineInfo, ids: list[int], params: SamplingParams, param: str) -> None:
    """Raises `APIError` for token ids, lengths and beam widths that this engine can't serve."""
    if len(ids) >= info.config.max_model_len:
        raise _too_many(len(ids), info, param)
    with refusing(param, _FIELDS):
        check_request(ids, params, info.config, info.vocab, model.tokenizer)


def _too_many(count: int, info: EngineInfo, param: str) -> APIError:
    return too_long(
        f"{maximum_length(info)}, of which one at least is for the answer, and the prompt has {count} tokens. Shorten "
        "the prompt",
        param,
    )


def maximum_length(info: EngineInfo) -> str:
    """What messages begin with by which clients like litellm know that a prompt is too long."""
    return f"This model's maximum context length is {info.config.max_model_len} tokens"
