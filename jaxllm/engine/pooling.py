"""Prompts that are pooled: what a model makes of their hidden states, and the requests that ask for it."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from jaxllm.checkpoint.pooling_config import PoolingConfig, default_activation
from jaxllm.engine.prompt_request import PromptRequest
from jaxllm.engine.schedule.sequence import Pooling
from jaxllm.pooling_outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """What becomes of a prompt's hidden states: `width` elements of an embedding, or classes with these `labels`."""

    config: PoolingConfig
    width: int
    task: str = "embed"  # or "classify"
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: Any, config: PoolingConfig | None = None) -> "Pooler":
        """Of a model with the configuration `cfg`; without a `config` of its files it pools as it says itself, or
        else takes the last token's hidden state, of length 1."""
        if config is None:
            pooling = getattr(cfg, "pooling", "last")
            activation = default_activation(cfg) if task_of(cfg) == "classify" else "identity"
            config = PoolingConfig(pooling=pooling, normalize=True, max_length=cfg.max_len, activation=activation)
        if task_of(cfg) == "classify":
            return cls(config=config, width=len(cfg.labels), task="classify", labels=tuple(cfg.labels))
        return cls(config=config, width=config.dim(cfg.embed))

    @property
    def pooling(self) -> Pooling:
        """Which hidden states are wanted."""
        return cast(Pooling, self.config.pooling)

    def check(self, params: PoolingParams) -> None:
        """Raises `ValueError` for what this model can't make."""
        if params.task not in (None, self.task):
            raise ValueError(
                f"task={params.task!r} is not what this model does: it does {self.task!r}; take a model that "
                f"was trained to {params.task}"
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)

    def _check_dimensions(self, wanted: int) -> None:
        if self.task == "classify":
            raise ValueError(f"dimensions={wanted} is for embeddings, and this model classifies; leave it out")
        if not self.config.is_matryoshka:
            raise ValueError(
                f"dimensions={wanted} is for models whose embeddings may be cut, and this model's files do not say so; "
                "leave it out, or start it with hf_overrides={'is_matryoshka': True} if you know that it was trained so"
            )
        known = self.config.matryoshka_dimensions
        if wanted > self.width or (known and wanted not in known):
            allowed = f"one of {list(known)}" if known else f"at most {self.width}"
            raise ValueError(f"dimensions={wanted} must be {allowed} for this model")

    def check_scores(self) -> None:
        """Raises `ValueError` if pairs of texts have no score."""
        if self.width != 1:
            raise ValueError(
                f"this model knows {self.width} classes, and a score is of one; call classify, or take a model that "
                "embeds or reranks"
            )

    def finish(self, pooled: np.ndarray, params: PoolingParams) -> np.ndarray:
        """The output, float32, of float32 `pooled` hidden states; or of what the model's head has made of them."""
        rows, wanted = pooled[None], params.use_activation
        if self.task == "classify":
            return (rows if wanted is False else self.config.activate(rows))[0]
        return self.config.finish(rows, dimensions=params.dimensions, normalize=wanted)[0]


def task_of(cfg: Any) -> str:
    """What a model is for, of `jaxllm.models.tasks`: it generates, unless its configuration says otherwise."""
    return getattr(cfg, "task", "generate")


@dataclass(eq=False, kw_only=True)
class PoolingRequest(PromptRequest):
    """One prompt that is pooled."""

    params: PoolingParams
    pooler: Pooler

    def update(self) -> PoolingRequestOutput | None:
        """The output, if it is over."""
        return self.output() if self.finished else None

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
            finished=self.finished,
            error=error,
            prompt=None if self.lean else self.prompt,
            queued_s=self.queued_s,
        )
