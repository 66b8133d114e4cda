"""Methods of vLLM's `LLM` that are not there: each says why, and what to do."""

from collections.abc import Callable
from typing import Any


def _missing(name: str, why: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.{name} is not supported: {why}")

    method.__name__ = name
    method.__doc__ = f"Raises `NotImplementedError`: {why}."
    return method


class MissingMethods:
    """Base of what programs expect to have them."""

    reward = _missing(
        "reward", "call encode: of a reward model it gives the reward, with PoolingParams(use_activation=False)"
    )
    collective_rpc = _missing(
        "collective_rpc",
        "there are no workers to call, the engine is in this process; LLM.params, update_params, sleep and "
        "reset_prefix_cache do what it is used for",
    )
    apply_model = _missing(
        "apply_model", "a model is a function of its parameters; read those as llm.params, change them by update_params"
    )
    set_tokenizer = _missing("set_tokenizer", "give it when the engine is built: LLM(model, tokenizer=...)")
