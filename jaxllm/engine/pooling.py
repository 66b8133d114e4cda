"""Prompts that are pooled: what a model makes of their hidden states, and the requests that ask for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxllm.engine.schedule.sequence import Pooling
from jaxllm.engine.schedule.sequence import Sequence as ScheduledSequence
from jaxllm.pooling_outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams

Array = np.ndarray
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
    "tanh": np.tanh,
}


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A layer behind the pooling, float32: `[outputs, inputs]`."""

    weight: Array
    bias: Array | None
    activation: str  # of `ACTIVATIONS`

    def __call__(self, x: Array) -> Array:
        y = self.weight @ x
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """What becomes of hidden states: they are pooled on the device, and the rest is done here, in float32."""

    task: Literal["embed", "classify"] = "embed"
    pooling: Pooling = "last"
    normalize: bool = True  # an embedding to unit length, unless a request wants otherwise
    activation: str = "softmax"  # of classes' logits, likewise
    dense: tuple[Dense, ...] = ()
    width: int = 0  # of what is made: elements of an embedding, or classes
    labels: tuple[str, ...] = ()  # of the classes
    is_matryoshka: bool = False  # whether an embedding's first elements are one too
    dimensions: tuple[int, ...] = ()  # how many they may be; none given: any number

    def check(self, params: PoolingParams) -> None:
        """Raises `ValueError` for what this model can't make."""
        if params.task not in (None, self.task):
            raise ValueError(
                f"task={params.task!r} is not what this model does: it does {self.task!r}; take a model that "
                f"was trained to {params.task}"
            )
        wanted = params.dimensions
        if wanted is None or self.task == "classify":
            if wanted is not None:
                raise ValueError(f"dimensions={wanted} is for embeddings, and this model classifies; leave it out")
            return
        if not self.is_matryoshka:
            raise ValueError(
                f"dimensions={wanted} is for models whose embeddings may be cut, and this model's files do not say so; "
                "leave it out, or start it with hf_overrides={'is_matryoshka': True} if you know that it was trained so"
            )
        if wanted > self.width or (self.dimensions and wanted not in self.dimensions):
            known = f"one of {list(self.dimensions)}" if self.dimensions else f"at most {self.width}"
            raise ValueError(f"dimensions={wanted} must be {known} for this model")

    def check_scores(self) -> None:
        """Raises `ValueError` if pairs of texts have no score."""
        if self.width != 1:
            raise ValueError(
                f"this model knows {self.width} classes, and a score is of one; call classify, or take a model that "
                "embeds or reranks"
            )

    def finish(self, pooled: Array, params: PoolingParams) -> Array:
        """The output of float32 `pooled` hidden states, or of what the model's head has made of them."""
        if self.task == "classify":
            is_active = params.use_activation is not False
            return (ACTIVATIONS[self.activation](pooled) if is_active else pooled).astype(np.float32)
        for layer in self.dense:
            pooled = layer(pooled)
        pooled = pooled[: params.dimensions]
        if self.normalize if params.use_activation is None else params.use_activation:
            pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
        return pooled.astype(np.float32)


@dataclass(eq=False, kw_only=True)
class PoolingRequest:
    """One prompt that is pooled: of `Request`'s interface what the engine's loop needs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: PoolingParams
    pooler: Pooler
    lean: bool = False  # the output leaves the prompt out
    sequences: list[ScheduledSequence] = field(default_factory=list)
    arrived_at: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    error: str | None = None
    stream: Literal[False] = False
    watches_text: Literal[False] = False

    @property
    def shown(self) -> Sequence[ScheduledSequence]:
        return self.sequences

    def scheduled(self) -> None:
        """It is in a step."""
        self.queued_s = self.queued_s or time.monotonic() - self.arrived_at

    def fail(self, error: str) -> None:
        self.error = error

    def update(self) -> PoolingRequestOutput | None:
        """The output, if it is over."""
        return self.output() if self.sequences[0].end is not None else None

    def output(self) -> PoolingRequestOutput:
        (sequence,) = self.sequences
        error, vector = self.error or sequence.error, sequence.pooled
        outputs = None
        if error is None and vector is not None:
            outputs = PoolingOutput(data=self.pooler.finish(vector, self.params))
        elif error is None:
            error = "the request was aborted"
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=outputs,
            prompt_token_ids=[] if self.lean else self.prompt_token_ids,
            num_cached_tokens=max(0, sequence.num_cached),
            finished=sequence.end is not None,
            error=error,
            prompt=None if self.lean else self.prompt,
            queued_s=self.queued_s,
        )
