"""The outputs of prompts that are pooled, with vLLM's names."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from jaxllm.errors import EngineError


@dataclass(kw_only=True)
class PoolingOutput:
    """What the model makes of a prompt: float32 `[width]`."""

    data: np.ndarray


@dataclass(kw_only=True)
class EmbeddingOutput(PoolingOutput):
    """An embedding; `data` is the same as `embedding`, in a fraction of the memory."""

    @property
    def embedding(self) -> list[float]:
        return self.data.tolist()

    @property
    def hidden_size(self) -> int:
        return len(self.data)


@dataclass(kw_only=True)
class ClassificationOutput(PoolingOutput):
    """The probabilities of the classes, or their logits if `use_activation` is False."""

    @property
    def probs(self) -> list[float]:
        return self.data.tolist()

    @property
    def num_classes(self) -> int:
        return len(self.data)


@dataclass(kw_only=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


Output = TypeVar("Output", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(kw_only=True)
class PoolingRequestOutput(Generic[Output]):
    """A prompt that was pooled. `outputs` is None if it failed, and `error` says why."""

    request_id: str
    outputs: Output | None
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    finished: bool = True
    error: str | None = None
    prompt: str | None = None
    queued_s: float = 0.0  # seconds from arrival in the engine to the first step

    @property
    def made(self) -> Output:
        """`outputs`. Raises `EngineError` with the cause if there are none."""
        if self.outputs is None:
            raise EngineError(f"request {self.request_id} failed: {self.error}")
        return self.outputs


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def cosine(first: PoolingRequestOutput[Any], second: PoolingRequestOutput[Any]) -> ScoringRequestOutput:
    """The cosine of two embeddings."""
    error = first.error or second.error
    made = None
    if error is None:
        a, b = first.made.data, second.made.data
        made = ScoringOutput(score=float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)))
    return ScoringRequestOutput(
        request_id=f"{first.request_id}-{second.request_id}",
        outputs=made,
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        error=error,
    )
