"""What the host asks of the device, as commands: whoever applies the same ones in the same order has the same state.

The list is closed: nothing else touches the device.
"""

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Command(NamedTuple):
    """What is to be done, with the arrays that the host sends, all int32."""

    name: Hashable  # a kind, or of kinds that come in sizes (kind, size): the executable's name, where it is one's
    arrays: tuple[np.ndarray, ...] = ()
    key: int = -1  # of the host's copy of blocks that are swapped; the version of parameters
    source: str = ""  # of parameters: the directory they come from; "" for those that the program brings

    @property
    def kind(self) -> Hashable:
        name = self.name
        return name[0] if isinstance(name, tuple) and name else name


class CommandKind(NamedTuple):
    """What commands of a kind bring, and what comes of them."""

    axes: tuple[tuple[str, ...], ...] = ()  # of each array
    repeats: bool = False  # instead: any number of arrays, each with the first one's axes
    runs: bool = False  # the executable of the command's name
    num_results: int = 0  # arrays for the host
    is_repeatable: bool = True  # whether the results are the same each time


_BLOCKS = CommandKind((("blocks",),), repeats=True)
_SAMPLES = (("size",),)

KINDS: Mapping[Hashable, CommandKind] = MappingProxyType(
    {
        # Once, and now and then:
        "update_params": CommandKind(),  # uses the parameters of version `key`, which each process has by its own means
        "kv_scales": CommandKind((("caches", "2"),)),  # of 8-bit keys and values: the bits of floats
        "measure_kv_scales": CommandKind((("rows", "len"),), runs=True),  # by what the parameters make of these tokens
        "init": CommandKind(runs=True),  # an empty state
        "measure_bandwidth": CommandKind((("blocks",),), num_results=1, is_repeatable=False),  # to host memory and back
        # Moves of blocks; copies in host memory have `key` as their name:
        "swap_out": _BLOCKS,
        "swap_in": _BLOCKS,
        "copy": CommandKind((("2", "blocks"),)),
        "release": CommandKind(),  # of the copy in host memory
        "settle": CommandKind(),  # those swapped out before the last "settle" are in host memory now
        # A step:
        "admit": CommandKind((("rows", "size"),), runs=True),
        "rules": CommandKind((("1", "size"),), runs=True),
        "step": CommandKind((("size",),), runs=True, num_results=1),
        "step_shared": CommandKind((("size",),), runs=True, num_results=1),  # with a prompt that all shards compute
        "prompt_logprobs": CommandKind((("2", "rows"),), runs=True, num_results=1),
        "pool": CommandKind(_SAMPLES, runs=True, num_results=1),
        "sample": CommandKind(_SAMPLES, runs=True, num_results=1),
        "logits": CommandKind(_SAMPLES, runs=True),
        "alter": CommandKind((("samples", "words"), ("size",)), runs=True),
        "sample_full": CommandKind(_SAMPLES, runs=True, num_results=2),
    }
)


def kind_of(command: Command) -> CommandKind:
    """ValueError, by name, for what is no command."""
    kind = KINDS.get(command.kind)
    if kind is None:
        raise unknown(command)
    return kind


def unknown(command: Command) -> ValueError:
    """What to raise for what is no command."""
    return ValueError(f"{command.name!r} is no command; there are {', '.join(map(str, KINDS))}")


def check(command: Command) -> None:
    """ValueError for a command that is unknown, or whose arrays are not those of its kind. (Their sizes are checked by
    the executables, which were compiled for some.)"""
    kind = kind_of(command)
    axes = kind.axes * (len(command.arrays) if kind.repeats else 1)
    shapes = [x.shape for x in command.arrays]
    if [len(shape) for shape in shapes] != [len(one) for one in axes]:
        raise ValueError(f"the command {command.name!r} has arrays of shapes {shapes}; expected those of axes {axes}")
