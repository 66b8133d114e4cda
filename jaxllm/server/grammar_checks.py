"""Checks of grammars beside the event loop and the text threads, so that plain requests don't wait for them."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from jaxllm.server.http.errors import refusing, unavailable
from jaxllm.server.observe.metrics import Metrics
from jaxllm.server.openai.response_format import ResponseFormat
from jaxllm.server.served_model import ServedModel

MAX_WAITING = 128
MAX_WAITING_OF_A_KEY = 32  # where there are several


class GrammarChecks:
    """Checks one grammar at a time; a bounded number waits, and of each API key. For one event loop."""

    def __init__(self, model: ServedModel, metrics: Metrics, *, several_keys: bool):
        self._model, self._metrics = model, metrics
        self._max_of_a_key = MAX_WAITING_OF_A_KEY if several_keys else MAX_WAITING
        self._waiting: Counter[bytes | None] = Counter()  # by digest of the key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-grammar")

    @property
    def num_waiting(self) -> int:
        """Grammars that are checked or wait for that."""
        return self._waiting.total()

    async def check(self, response_format: ResponseFormat | None, tenant: bytes | None) -> None:
        """Returns if the format is sound, or None. Raises `APIError`: 400, or 503 if too many wait."""
        if response_format is None:
            return
        if self.num_waiting >= MAX_WAITING or self._waiting[tenant] >= self._max_of_a_key:
            self._metrics.rejected("max_waiting_grammars")
            raise unavailable(
                f"{self._waiting[tenant]} of your grammars and schemas wait to be checked, and {self.num_waiting} in "
                "all; try again later"
            )
        self._waiting[tenant] += 1
        try:
            with refusing(response_format.param):
                await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._model.grammars.check, response_format.wanted
                )
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        self._thread.shutdown(wait=wait, cancel_futures=cancel_futures)
