"""What of a prompt is wanted in the place of a text: `PoolingParams`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxllm.argument_checks import check_int
from jaxllm.from_vllm.request_arguments import POOLING_FIELDS
from jaxllm.from_vllm.rules import Rule
from jaxllm.keyword_fields import KeywordFields
from jaxllm.sampling_checks import MAX_SALT_LEN

TASKS = ("embed", "classify")


@dataclass(kw_only=True)
class PoolingParams(KeywordFields):
    """How a prompt is pooled, with vLLM's names and defaults. Raises `ValueError` naming field, value and range, and
    `TypeError` for a name that is no field."""

    task: str | None = None  # "embed" or "classify"; None: the model's
    dimensions: int | None = None  # of an embedding: its first ones, for models that were trained for that
    use_activation: bool | None = (
        None  # normalises an embedding, makes probabilities of classes; None: as the model says
    )
    truncate_prompt_tokens: int | None = None  # the last tokens that count; -1: as many as the model takes
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None  # prompts share cached blocks with those of the same salt alone

    _foreign: ClassVar[Mapping[str, Rule]] = POOLING_FIELDS

    def __init__(self, *args: Any, **given: Any):
        self._set_fields(args, given)

    def __post_init__(self) -> None:
        if self.task not in (None, *TASKS):
            raise ValueError(f"task={self.task!r:.100} must be one of {', '.join(TASKS)}")
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, 2**18)
        if not isinstance(self.use_activation, bool | None):
            raise ValueError(f"use_activation={self.use_activation!r:.100} must be True, False or None")
        if self.truncate_prompt_tokens not in (None, -1):
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        if not isinstance(self.skip_reading_prefix_cache, bool):
            raise ValueError(f"skip_reading_prefix_cache={self.skip_reading_prefix_cache!r:.100} must be True or False")
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise ValueError(f"cache_salt={self.cache_salt!r:.100} must be a non-empty string")
        if len(self.cache_salt or "") > MAX_SALT_LEN:
            raise ValueError(f"cache_salt has {len(self.cache_salt or '')} characters; at most {MAX_SALT_LEN} count")
        self._keep()
