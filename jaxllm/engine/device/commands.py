"""What the host asks of the device, as commands: whoever applies the same ones in the same order has the same state."""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np


class Command(NamedTuple):
    """The name of an executable, or of what the executor does itself, and the arrays that the host sends."""

    name: Hashable
    arrays: tuple[np.ndarray, ...] = ()
    key: int = -1  # of the host's copy, if it is about blocks that are swapped
