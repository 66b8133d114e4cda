"""`AsyncLLM`: the engine in a thread of its own, its requests as async iterators."""

import asyncio
import itertools
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

from jaxllm.base_llm import BaseLLM
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.failure import check_rollout
from jaxllm.engine.loop import Delivery, EngineLoop
from jaxllm.engine.mailbox import Basket, Mailbox
from jaxllm.engine.pooling import Pooler
from jaxllm.engine.weight_update import prepare_update
from jaxllm.from_vllm.request_arguments import ADD_REQUEST_ARGUMENTS, check_request_arguments
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.rollout import Rollout, make_rollout, rollout_params, rollout_prompts
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.prompts import parse_each, parse_prompt, with_salt


class AsyncLLM(BaseLLM):
    """A model that serves concurrent requests from any number of asyncio tasks, in any number of event loops. Takes
    `LLM`'s arguments. It closes itself when nothing refers to it any more."""

    def _start(self) -> None:
        self._ids = itertools.count()
        self._loop = EngineLoop(self._engine, _deliver)
        self._loop.start()
        # Also before Python exits, as a thread that dies inside the runtime would take the process down.
        self._close = weakref.finalize(self, self._loop.close)

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def vocab(self) -> int:
        return self._engine.vocab

    @property
    def pooler(self) -> Pooler:
        """What the engine makes of prompts that are pooled."""
        return self._engine.intake.pooler

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests."""
        return self._loop.is_alive

    @property
    def silent_s(self) -> float:
        """Seconds since the engine made progress, compiling included; 0 while it has nothing to do."""
        return self._loop.silent_s

    @property
    def patience_s(self) -> float:
        """For how many seconds it may be silent, as its steps are long."""
        return self._loop.patience_s

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **vllm: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output so far (or what `output_kind` says) whenever it has grown, the finished one last. Leaving
        the iterator early, or cancelling its task, aborts the request.

        `prompt` is a string, `{"prompt": str}` or `{"prompt_token_ids": [...]}`. Raises `ValueError` for what can't
        be served, and `EngineDeadError` if the engine stops. A request whose steps fail on the device ends with
        finish_reason "error", and its `error` names the cause.
        """
        check_request_arguments("generate", vllm, ADD_REQUEST_ARGUMENTS)
        request_id = f"async-{next(self._ids)}" if request_id is None else request_id
        text, token_ids, salt = await asyncio.to_thread(parse_prompt, prompt, self.tokenizer)
        params = with_salt(sampling_params or SamplingParams(), salt).snapshot()  # which the caller may change
        mailbox = Mailbox(is_delta=params.output_kind is RequestOutputKind.DELTA)
        self.add(token_ids, params, request_id=request_id, receiver=mailbox, prompt=text, priority=priority)
        try:
            while not mailbox.is_finished:
                yield await mailbox.get()
        finally:
            self.drop(request_id, mailbox)

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **vllm: Any,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yields what the model makes of one prompt, once; see `LLM.encode`. Leaving the iterator early aborts it."""
        check_request_arguments("encode", vllm, ADD_REQUEST_ARGUMENTS)
        request_id = f"async-{next(self._ids)}" if request_id is None else request_id
        text, token_ids, salt = await asyncio.to_thread(parse_prompt, prompt, self.tokenizer)
        params = pooling_params or PoolingParams()
        params = replace(params, cache_salt=salt or params.cache_salt)
        mailbox = Mailbox(is_delta=False)
        self.add(token_ids, params, request_id=request_id, receiver=mailbox, prompt=text, priority=priority)
        try:
            yield await mailbox.get()
        finally:
            self.drop(request_id, mailbox)

    async def rollout(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lengths: Any = None,
        priority: int | Sequence[int] = 0,
        pad_id: int = 0,
    ) -> Rollout:
        """See `LLM.rollout`. Cancelled, it aborts what is left."""
        parsed = await asyncio.to_thread(rollout_prompts, prompts, lengths, self.tokenizer)
        params = rollout_params(SamplingParams() if sampling_params is None else sampling_params, parsed)
        order = parse_each("priority", priority, int, len(parsed))
        requests = await asyncio.to_thread(
            lambda: [self._engine.prepare(each.token_ids, one) for each, one in zip(parsed, params, strict=False)]
        )
        basket, ids = Basket(len(requests)), [f"rollout-{next(self._ids)}" for _ in requests]
        try:
            for request_id, request, one in zip(ids, requests, order, strict=True):
                self._loop.submit(request, request_id=request_id, receiver=basket, priority=one, as_arrays=True)
            by_id = await basket.get()
        finally:
            self._loop.drop(ids, basket)
        outputs = {index: by_id[request_id] for index, request_id in enumerate(ids)}
        check_rollout(self._engine.failure, outputs)
        return make_rollout([request.token_ids for request in requests], params, outputs, pad_id)

    def add(
        self, token_ids: Sequence[int], params: SamplingParams | PoolingParams, *, receiver: Mailbox, **options: Any
    ) -> None:
        """Sends a request whose outputs go to `receiver`. `options` are those of `EngineLoop.add`. Raises
        `EngineDeadError` if the engine has stopped; what else is wrong with it goes to the receiver."""
        self._loop.add(token_ids, params, receiver=receiver, stream=True, **options)

    def drop(self, request_id: str, receiver: Mailbox) -> None:
        """Aborts a request that `receiver` sent, if it is not over, without a last output."""
        self._loop.drop([request_id], receiver)

    def abort(self, request_id: str) -> None:
        """Ends a request; its iterator yields a last output with finish_reason "abort" for what was unfinished."""
        self._loop.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        await self._between_steps(self._engine.scheduler.forget_keys)
        return True

    @property
    def params_version(self) -> int:
        """See `LLM.params_version`."""
        return self._engine.params_version

    async def update_params(
        self,
        params: Any,
        *,
        version: SupportsIndex | None = None,
        cast: bool = True,
        in_flight: str = "continue",
        keep_prefix: bool = False,
        donate: bool = False,
    ) -> None:
        """See `LLM.update_params`. They are placed while steps go on."""
        options = dict(version=version, cast=cast, in_flight=in_flight, keep_prefix=keep_prefix, donate=donate)
        take_over = await asyncio.to_thread(partial(prepare_update, self._engine, params, **options))
        await self._between_steps(partial(take_over, self._loop))

    async def pause(self) -> None:
        """Makes no more steps until `resume`; requests wait, and new ones are accepted."""
        await self._between_steps(partial(setattr, self._engine, "is_paused", True))

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._between_steps(partial(setattr, self._engine, "is_paused", False))

    async def sleep(self, level: int | None = None, *, kv: bool = True, params: bool = False) -> None:
        """See `LLM.sleep`."""
        await self._between_steps(partial(self._engine.sleep, level, kv=kv, params=params))

    async def wake(self) -> None:
        """See `LLM.wake`."""
        await self.wake_up()

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        await self._between_steps(partial(self._engine.wake_up, tags))

    async def is_sleeping(self) -> bool:
        return self._engine.is_sleeping

    async def _between_steps(self, function: Callable[[], Any]) -> None:
        await asyncio.wrap_future(self._loop.call(function))

    def close(self) -> None:
        """Aborts what is left, stops the thread and frees the device's memory."""
        self._close()

    shutdown = close


def _deliver(deliveries: list[Delivery]) -> list[str]:
    """Hands each event loop its mailboxes' news at once. Returns the ids of those whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        by_loop[delivery.receiver.loop].append(delivery)
    gone = []
    for loop, news in by_loop.items():
        if loop.is_closed():
            gone += [delivery.request_id for delivery in news]
        else:
            loop.call_soon_threadsafe(_put_all, news)
    return gone


def _put_all(deliveries: list[Delivery]) -> None:
    for delivery in deliveries:
        delivery.receiver.put(delivery.news)
