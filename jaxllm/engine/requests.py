"""The requests that an engine has, and what each of them does on the host: which may fail, and then ends it alone."""

import logging
from collections.abc import Callable, Iterable, Iterator

from jaxllm.engine.output import Request as TextRequest
from jaxllm.engine.pooling import PoolingRequest
from jaxllm.engine.rollout_request import RolloutOutput, RolloutRequest
from jaxllm.engine.schedule.sequence import End, Sequence
from jaxllm.engine.scoring import LoglikelihoodRequest
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.score_outputs import LoglikelihoodOutput

log = logging.getLogger(__name__)

Request = TextRequest | PoolingRequest | LoglikelihoodRequest | RolloutRequest
Output = RequestOutput | PoolingRequestOutput | LoglikelihoodOutput | RolloutOutput


class OpenRequests:
    """Requests by id, from when they are accepted until their last output is made. `finish` ends a sequence."""

    def __init__(self, finish: Callable[[Sequence, End], None]):
        self._finish = finish
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def end(self, request_id: str, reason: FinishReason) -> Request | None:
        """Forgets a request, whose sequences end now; None if there is no such request (any more)."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for sequence in request.sequences:
                self._finish(sequence, End(reason))
        return request

    def output(self, request: Request) -> Output:
        """What it is so far; with an error if that fails."""
        try:
            return request.output()
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            self._fail(request, error)
            return request.output()

    def updates(self, updated: Iterable[Sequence]) -> list[Output]:
        """The outputs that are due after these sequences got further or ended."""
        changed: dict[Request, None] = {}
        for sequence in updated:
            request = sequence.request
            if request.watches_text:
                self._watch_text(request, sequence)
            if request.stream or sequence.end is not None:
                changed[request] = None
        updates = []
        for request in changed:
            try:
                output = request.update()
            except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
                self._fail(request, error)
                output = request.output()
            if output is not None:
                updates.append(output)
                if output.finished:
                    self._requests.pop(request.request_id, None)
                    _untie(request)
        return updates

    def _watch_text(self, request: TextRequest, sequence: Sequence) -> None:
        try:
            stop = request.find_stop(sequence)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            self._fail(request, error)
            return
        if stop is not None:
            end = End("stop", stop)
            self._finish(sequence, end)
            sequence.end = end  # also if its length ended it just now, or its grammar, which was asked for a token more

    def _fail(self, request: Request, error: Exception) -> None:
        log.error("request %s failed on the host", request.request_id, exc_info=error)
        request.fail(f"decoding its text failed: {error}")
        for sequence in request.sequences:
            self._finish(sequence, End("error"))
        for sequence in request.shown:
            sequence.end = End("error")


def _untie(request: Request) -> None:
    """Lets go of the sequences of a request whose last output is made, which refer to it: what is in no circle goes at
    once, and Python needs no search of all the process's objects for it."""
    for sequence in request.sequences:
        sequence.group.disband()
    request.sequences = []
