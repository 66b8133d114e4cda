"""Types are checked while tests run, and shapes where there are any.

jaxtyping keeps the sizes of axes for each call of each function, and checks arguments twice, which took a quarter of
the tests' time. Most functions have no shapes in their annotations: beartype alone checks those.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping

_with_shapes = jaxtyping.jaxtyped


def install() -> None:
    """Has the import hook of `--jaxtyping-packages` decorate with `checked` what is imported from now on."""
    jaxtyping.jaxtyped = lambda *, typechecker: partial(checked, typechecker=typechecker)


def checked(fn: Any, *, typechecker: Callable[[Any], Any]) -> Any:
    """A function, or dataclass, that `typechecker` checks, with jaxtyping where its annotations have shapes."""
    if not inspect.isclass(fn):
        return _with_shapes(fn, typechecker=typechecker) if _has_shapes(fn) else typechecker(fn)
    init = vars(fn).get("__init__")
    if dataclasses.is_dataclass(fn) and init is not None:
        fn.__init__ = checked(init, typechecker=typechecker)
    return fn


def _has_shapes(fn: Any) -> bool:
    return any(map(_may_be_shape, fn.__annotations__.values()))


def _may_be_shape(annotation: Any) -> bool:
    if isinstance(annotation, str | ForwardRef):
        return True  # as far as anyone knows here
    if get_origin(annotation) is Literal:
        return False
    if isinstance(annotation, list):  # of a Callable's arguments
        return any(map(_may_be_shape, annotation))
    return type(annotation).__module__.startswith("jaxtyping") or any(map(_may_be_shape, get_args(annotation)))
