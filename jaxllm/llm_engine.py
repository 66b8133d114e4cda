"""`LLMEngine`: an `LLM` for those who add requests and step by themselves, with vLLM's interface."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxllm.engine.caller import Inbox
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.from_vllm.configs import ModelConfig, VllmConfig
from jaxllm.from_vllm.request_arguments import ADD_REQUEST_ARGUMENTS, check_request_arguments
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


class LLMEngine:
    """The requests of one caller of `llm`. What it steps goes on with those of others, whose outputs go to them."""

    def __init__(self, llm: "LLM"):
        self._llm, self._inbox = llm, Inbox()
        self._unfinished: dict[str, None] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLMEngine":
        """Of an `EngineArgs`."""
        from jaxllm.llm import LLM  # which imports this module

        return cls(LLM.from_engine_args(engine_args))

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
        if request_id in self._unfinished:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        self.submit(request_id, self._llm._prepare(prompt, params), priority=priority, stream=True)

    def submit(self, request_id: str, prepared: PreparedRequest, *, priority: int, stream: bool) -> None:
        """Hands over what is prepared."""
        self._llm._loop.submit(prepared, self._inbox, request_id=request_id, priority=priority, stream=stream)
        self._unfinished[request_id] = None

    def step(self) -> list[RequestOutput]:
        """Makes a step, and returns what is new of this caller's requests."""
        if not self._unfinished:
            return []
        outputs = list(self._llm._loop.wait(self._inbox))
        for output in outputs:
            if output.finished:
                self._unfinished.pop(output.request_id, None)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests without a last output."""
        wanted = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ids = [request_id for request_id in wanted if self._unfinished.pop(request_id, self) is None]
        self._llm._loop.drop(ids, self._inbox)
