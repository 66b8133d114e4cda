"""Samples as arrays, for training loops; and requests that are drawn from an iterator as the engine has room."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxllm.argument_checks import a_type, check_int
from jaxllm.engine.caller import Inbox
from jaxllm.engine.failure import check_rollout
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.engine.rollout_request import RolloutOutput
from jaxllm.errors import EngineAsleepError
from jaxllm.llm_pooling import LLMPooling
from jaxllm.progress import progress_bar
from jaxllm.rollout import Rollout, check_rollout_params, make_rollout, rollout_params, rollout_prompts
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompts import parse_each, parse_prompt, with_salt

_AHEAD = 4  # times what runs at once: requests that wait in the engine, so that a step never lacks some


class LLMRollout(LLMPooling):
    """An engine that gives arrays in place of texts."""

    def rollout(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lengths: Any = None,
        priority: int | Sequence[int] = 0,
        pad_id: int = 0,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> Rollout:
        """Draws `n` samples of each prompt: a `Rollout` of numpy arrays, `[B, n, T]`, without texts.

            r = llm.rollout(prompts, SamplingParams(n=8, max_tokens=64, logprobs=0))
            batch = r.to_device()  # tokens, logprobs, lengths, finish, version, mask, ...

        `prompts` are as of `generate`, an integer array `[B, P]`, or one whose rows have `lengths` `[B]` tokens.
        `sampling_params` (None: what the model recommends) and `priority` are one for all, or one for each, all with
        the same `n`. Seeds count on from a request's: sample `i` is `generate`'s sample `i`.

        `ValueError` before anything runs for an unusable prompt or parameter, and for parameters that need text or
        other tokens' log-probabilities. A prompt whose steps fail, or whose logits are not finite, has the finish
        `ERROR` and an entry in `errors`; `EngineError` if all do: there is nothing to train on.
        """
        check_int("pad_id", pad_id, -(2**31), 2**31 - 1)
        parsed = rollout_prompts(prompts, lengths, self.tokenizer)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = rollout_params(given, parsed)
        order = parse_each("priority", priority, int, len(parsed))
        requests = [
            (self.engine.prepare(prompt.token_ids, one), number)
            for prompt, one, number in zip(parsed, params, order, strict=False)
        ]
        outputs: dict[int, RolloutOutput] = {}
        with progress_bar(use_tqdm, len(requests), "drawing") as bar:
            for index, output in self._run(requests, as_arrays=True):
                outputs[index] = output
                bar.update()
        check_rollout(self.engine.failure, outputs)
        ids = [prepared.token_ids for prepared, _ in requests]
        return make_rollout(ids, params, outputs, pad_id)

    def rollout_iter(
        self, prompts: Iterable[Any], sampling_params: SamplingParams | None = None, *, pad_id: int = 0
    ) -> Iterator[tuple[int, Rollout]]:
        """Like `rollout`, of any number of prompts, drawn from an iterator as the engine has room: yields each one's
        index and `Rollout`, whose B is 1, when its samples are over; one that fails has its entry in `errors`. What the
        iterator yields late comes under the parameters of then. Closing it aborts what is left; so does a prompt that
        can't be served, by `ValueError`."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        check_int("pad_id", pad_id, -(2**31), 2**31 - 1)
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params is {a_type(params)}; rollout_iter takes one SamplingParams for all prompts"
            )
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts is {a_type(prompts)}; rollout_iter takes an iterable of prompts")
        check_rollout_params(params)
        return self._rollouts(prompts, params, pad_id)

    def _rollouts(self, prompts: Iterable[Any], params: SamplingParams, pad_id: int) -> Iterator[tuple[int, Rollout]]:
        token_ids: dict[int, list[int]] = {}

        def prepare(index: int, prompt: Any) -> PreparedRequest:
            try:
                parsed = parse_prompt(prompt, self.tokenizer)
                prepared = self.engine.prepare(parsed.token_ids, with_salt(params, parsed.cache_salt))
            except EngineAsleepError:
                raise
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
            token_ids[index] = prepared.token_ids
            return prepared

        for finished in self._pull(prompts, prepare, as_arrays=True):
            for index, output in finished:
                yield index, make_rollout([token_ids.pop(index)], [params], {0: output}, pad_id)

    def _pull(
        self, drawn: Iterable[Any], prepare: Callable[[int, Any], Any], **options: Any
    ) -> Iterator[list[tuple[int, Any]]]:
        """Runs what `prepare` makes of an item and its number, as the engine has room, with the `options` of
        `Engine.submit`. Yields after each step the outputs that came of it, and at once what is no request."""
        self.engine.check_params()
        window, items = _AHEAD * self.engine.config.most_running, enumerate(drawn)
        running: dict[str, int] = {}  # request id -> index
        inbox = Inbox()
        try:
            while True:
                finished: list[tuple[int, Any]] = []
                while len(running) + len(finished) < window and (item := next(items, None)) is not None:
                    prepared = prepare(*item)
                    if isinstance(prepared, PreparedRequest):
                        request_id = self._next_id()
                        running[request_id] = item[0]
                        self._loop.submit(prepared, inbox, request_id=request_id, **options)
                    else:
                        finished.append((item[0], prepared))
                if running:
                    finished += [(running.pop(output.request_id), output) for output in self._loop.wait(inbox)]
                elif not finished:
                    return
                yield finished
        finally:
            self._loop.drop(running, inbox)

    def _next_id(self) -> str:
        """Of a request."""
        raise NotImplementedError
