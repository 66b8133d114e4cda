"""Rollouts: what a model has drawn for a batch of prompts, as arrays."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxllm.engine.rollout_request import RolloutOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompts import Prompt, parse_params, parse_prompts, with_salt


class Finish(enum.IntEnum):
    """Why a sample is over; as strings, these are `CompletionOutput.finish_reason`."""

    STOP = 0  # the end of sequence, or another stop token
    LENGTH = 1
    ABORT = 2
    ERROR = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """`n` samples of each of `B` prompts. `T` is the largest `max_tokens` asked for, so that calls alike give arrays
    alike, or of the longest sample where there is none; `P` is the longest prompt. What a sample does not fill is
    `pad_id` in `tokens` and `prompts`, 0 in `logprobs`, -1 in `version`."""

    tokens: np.ndarray  # int32 [B, n, T]
    lengths: np.ndarray  # int32 [B, n]: tokens of each sample, a stop token included
    logprobs: np.ndarray | None  # float32 [B, n, T], nats, of the tokens drawn; with `SamplingParams(logprobs=0)`
    finish: np.ndarray  # int8 [B, n], of `Finish`
    version: np.ndarray  # int32 [B, n, T]: of the parameters that made each token's logits; see `update_params`
    prompts: np.ndarray  # int32 [B, P], padded behind
    prompt_lengths: np.ndarray  # int32 [B]
    errors: Mapping[int, str]  # by prompt: why its samples have the finish `ERROR`

    @property
    def mask(self) -> np.ndarray:
        """bool [B, n, T]: where there are tokens."""
        return np.arange(self.tokens.shape[-1]) < self.lengths[..., None]

    def to_device(self, sharding: Any = None) -> dict[str, Any]:
        """The arrays and `mask` as `jax.Array`s by name, for a jitted step. `sharding` is as of `jax.device_put`: the
        first axis of each is the prompts'."""
        import jax

        names = [field.name for field in fields(self) if field.name != "errors"]
        arrays = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return jax.device_put(arrays | {"mask": self.mask}, sharding)


def rollout_prompts(prompts: Any, lengths: Any, tokenizer: Any) -> list[Prompt]:
    """The prompts of a rollout: those of `parse_prompts`, or the first `lengths` tokens of each row of an array."""
    if lengths is None:
        return parse_prompts(prompts, tokenizer)
    array, each = np.asarray(prompts), np.asarray(lengths)
    if array.ndim != 2 or each.shape != array.shape[:1] or not np.issubdtype(each.dtype, np.integer):
        raise ValueError(
            f"lengths has the shape {each.shape} and prompts {array.shape}; lengths are integers [B] of an array [B, P]"
        )
    if len(each) and (each.min() < 1 or each.max() > array.shape[1]):
        raise ValueError(f"lengths are {each.min()} to {each.max()}; each must be between 1 and {array.shape[1]}")
    return parse_prompts([row[:length] for row, length in zip(array, each, strict=True)], tokenizer)


def rollout_params(params: Any, prompts: Sequence[Prompt]) -> list[SamplingParams]:
    """One for each prompt, or those for all if there are no prompts. ValueError for what a rollout has no place for."""
    if not prompts and isinstance(params, SamplingParams):
        check_rollout_params(params)
        return [params]
    given = parse_params(params, len(prompts))
    each = [with_salt(one, prompt.cache_salt) for one, prompt in zip(given, prompts, strict=True)]
    for one in {id(one): one for one in each}.values():
        check_rollout_params(one)
    counts = sorted({one.n for one in each})
    if len(counts) > 1:
        raise ValueError(f"n is {counts[0]} for some prompts and {counts[-1]} for others; a rollout has one n")
    return each


def check_rollout_params(params: SamplingParams) -> None:
    """Raises `ValueError` for what a rollout has no place for."""
    reasons = {
        "beam_width": (params.beam_width is not None, "are searched, not drawn"),
        "best_of": (params.num_samples > params.n, "draws samples that it drops; choose with your own scores"),
        "stop": (bool(params.stops), "needs text, which a rollout does not make; use stop_token_ids"),
        "logprobs": ((params.logprobs or 0) > 0, "above 0 are of other tokens; 0 gives those of the tokens drawn"),
        "logprob_token_ids": (params.logprob_token_ids is not None, "are of other tokens; use logprobs=0"),
        "prompt_logprobs": (params.prompt_logprobs is not None, "have no place in a rollout; use loglikelihood"),
    }
    for name, (is_asked, reason) in reasons.items():
        if is_asked:
            raise ValueError(f"{name}={getattr(params, name)!r:.100}: {name} {reason}, or generate")


def make_rollout(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    outputs: Mapping[int, RolloutOutput],
    pad_id: int = 0,
) -> Rollout:
    """The arrays of `outputs`, by prompt, in the shapes that `params` ask for, also if there are no prompts."""
    num_prompts, n = len(prompts), params[0].n if params else 0
    limits = [one.max_tokens for one in params]
    drawn = [tokens for output in outputs.values() for tokens in output.tokens]
    longest = max(map(len, drawn), default=0)
    if limits and None not in limits:
        longest = max(limit for limit in limits if limit is not None)
    tokens = np.full((num_prompts, n, longest), pad_id, np.int32)
    version = np.full_like(tokens, -1)
    has_logprobs = any(one.wants_logprobs for one in params)
    logprobs = np.zeros(tokens.shape, np.float32) if has_logprobs else None
    lengths, finish = np.zeros((num_prompts, n), np.int32), np.full((num_prompts, n), Finish.ERROR, np.int8)
    prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.full((num_prompts, max(prompt_lengths, default=0)), pad_id, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    for b, output in outputs.items():
        for i, (ids, reason, spans) in enumerate(zip(output.tokens, output.finish, output.versions, strict=True)):
            tokens[b, i, : len(ids)], lengths[b, i], finish[b, i] = ids, len(ids), Finish[reason.upper()]
            for start, number in spans:
                version[b, i, start : len(ids)] = number
            if logprobs is not None and output.logprobs is not None:
                logprobs[b, i, : len(ids)] = output.logprobs[i]
    return Rollout(
        tokens=tokens,
        lengths=lengths,
        logprobs=logprobs,
        finish=finish,
        version=version,
        prompts=padded,
        prompt_lengths=prompt_lengths,
        errors={b: output.error for b, output in sorted(outputs.items()) if output.error is not None},
    )
