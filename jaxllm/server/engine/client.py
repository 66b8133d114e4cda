"""What the server wants of an engine, wherever that runs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.stats import EngineStats
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.pooling import Pooler


@dataclass(frozen=True)
class EngineInfo:
    """What requests are checked against."""

    config: EngineConfig
    vocab: int  # rows of the embedding and width of the logits: every id below it is sound
    task: str = "embed"  # what it makes of prompts that are pooled: embed or classify
    width: int = 0  # elements of an embedding, or classes
    labels: tuple[str, ...] = ()  # of the classes
    lowercases: bool = False  # whether texts are lowercased before they are pooled

    @classmethod
    def of(cls, config: EngineConfig, vocab: int, pooler: "Pooler") -> "EngineInfo":
        return cls(config, vocab, pooler.task, pooler.width, pooler.labels, pooler.config.lowercase)


class Health(NamedTuple):
    is_alive: bool  # it has not stopped
    silent_s: float  # since the last sign of life; 0 while it has nothing to do
    patience_s: float = 0.0  # it may be silent for longer than others, as its steps are long
    trouble: str | None = None  # why it serves nobody for now, though it may again


class EngineCommand(NamedTuple):
    """What is done with an engine between two steps: the method of `LLM` with this name."""

    name: Literal["sleep", "wake_up", "reset_prefix_cache"]
    level: int = 1  # of `sleep`
    tags: list[str] | None = None  # of `wake_up`


@runtime_checkable
class EngineClient(Protocol):
    """Requests go in as token ids, deltas come out. All methods are for one event loop."""

    @property
    def info(self) -> EngineInfo | None:
        """None while the model is being loaded."""

    async def start(self) -> None:
        """Returns when requests can be taken. Raises `ValueError` or a `JaxLLMError` if they never can."""

    def generate(
        self, token_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """What is new, as it comes in: outputs of kind DELTA, the last of them `finished`. Their prompt is left out,
        and `prompt_logprobs` come once. Closing the iterator aborts. Raises `ValueError` for what the engine refuses,
        `EngineDeadError` when it stops."""

    async def pool(
        self, token_ids: list[int], params: PoolingParams, *, request_id: str, priority: int = 0
    ) -> PoolingRequestOutput:
        """What the model makes of a prompt, which is left out. A cancelled call aborts. Raises as `generate`."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request with what it has; nothing happens if it is over."""

    def abort_all(self) -> None:
        """Ends all requests with what they have."""

    async def command(self, command: EngineCommand) -> bool:
        """Returns, once it is done, whether the engine sleeps. Raises `ValueError` for what it refuses, such as `sleep`
        while requests run, and `EngineDeadError` when it stops."""
        ...

    def fail_all(self, reason: str) -> None:
        """Every open iterator raises `RequestEndedError` with the reason, and what it stands for is aborted."""

    def stats(self) -> EngineStats | None: ...

    def health(self) -> Health: ...

    async def close(self) -> None: ...
