"""`EngineArgs` and `AsyncEngineArgs`: the arguments of `LLM` as dataclasses, with vLLM's beside ours."""

import dataclasses
import inspect
from typing import Any

from jaxllm.base_llm import BaseLLM
from jaxllm.from_vllm.engine_arguments import ELSEWHERE, ENGINE_ARGUMENTS
from jaxllm.keyword_fields import KeywordFields


class _Arguments(KeywordFields):
    """`LLM(**dataclasses.asdict(args))` and `LLM.from_engine_args(args)` build an engine, and check the values."""

    _elsewhere = ELSEWHERE

    def __init__(self, model: Any = None, **given: Any):
        self._set_fields((), {"model": model} | given)

    def __post_init__(self) -> None:
        self._keep()


def _fields() -> list[tuple[str, Any, Any]]:
    """Name, type and default of each: of ours as `BaseLLM` has them, and None for vLLM's."""
    parameters = list(inspect.signature(BaseLLM.__init__).parameters.values())[1:]
    ours = [(p.name, Any, p.default) for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return ours + [(name, Any, None) for name in sorted(ENGINE_ARGUMENTS)]


EngineArgs: Any = dataclasses.make_dataclass("EngineArgs", _fields(), bases=(_Arguments,), init=False, kw_only=True)
AsyncEngineArgs: Any = dataclasses.make_dataclass("AsyncEngineArgs", [], bases=(EngineArgs,), init=False, kw_only=True)
for _made in (EngineArgs, AsyncEngineArgs):
    _made.__module__ = __name__
