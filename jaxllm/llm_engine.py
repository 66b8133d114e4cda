"""`LLMEngine`: an `LLM` for those who add requests and step by themselves, with vLLM's interface."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxllm.engine.caller import CallerLoop, Inbox
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.from_vllm.configs import ModelConfig, VllmConfig
from jaxllm.from_vllm.request_arguments import ADD_REQUEST_ARGUMENTS, check_request_arguments
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


class OwnRequests:
    """The requests that one caller of `loop` has open."""

    def __init__(self, loop: CallerLoop):
        self._loop, self._inbox = loop, Inbox()
        self._open: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def submit(self, request_id: str, prepared: PreparedRequest, *, priority: int, stream: bool) -> None:
        """Hands over what is prepared; the options are as in `Engine.submit`."""
        self._loop.submit(prepared, self._inbox, request_id=request_id, priority=priority, stream=stream)
        self._open.add(request_id)

    def step(self) -> list[RequestOutput]:
        """Makes a step if something is open, and returns what is new."""
        if not self._open:
            return []
        outputs = list(self._loop.wait(self._inbox))
        self._open.difference_update(output.request_id for output in outputs if output.finished)
        return outputs

    def drop(self, request_ids: Iterable[str]) -> None:
        """Ends those that are open, without a last output."""
        ids = self._open.intersection(request_ids)
        self._open -= ids
        self._loop.drop(ids, self._inbox)


class LLMEngine:
    """An `LLM` that is stepped by hand. What a step does for other callers' requests goes to them."""

    def __init__(self, llm: "LLM", requests: OwnRequests):
        self._llm, self._requests = llm, requests

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLMEngine":
        """Of an `EngineArgs`."""
        from jaxllm.llm import LLM  # which imports this module

        return LLM.from_engine_args(engine_args).llm_engine

    @property
    def vllm_config(self) -> VllmConfig:
        return self._llm.vllm_config

    @property
    def model_config(self) -> ModelConfig:
        return self._llm.model_config

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0, **vllm: Any
    ) -> None:
        """Raises `ValueError` for what can't be served."""
        check_request_arguments("add_request", vllm, ADD_REQUEST_ARGUMENTS)
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        self._requests.submit(request_id, self._llm._prepare(prompt, params), priority=priority, stream=True)

    def step(self) -> list[RequestOutput]:
        """Makes a step, and returns what is new of the requests that were added."""
        return self._requests.step()

    def has_unfinished_requests(self) -> bool:
        return len(self._requests) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests without a last output."""
        self._requests.drop([request_ids] if isinstance(request_ids, str) else request_ids)
