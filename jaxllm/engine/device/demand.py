"""Which executable the work at hand lacks most, while not all are compiled."""

from collections import defaultdict
from collections.abc import Sequence

from jaxllm.engine.device.packing import pick_bucket


class Demand:
    """Adds up the seconds that steps lose because the bucket they would best run in is not compiled: to padding, and
    to tokens that had to be left for later steps. `sizes` are all buckets, in tokens, ascending."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes
        self._lost: defaultdict[int, float] = defaultdict(float)  # seconds, by bucket

    def observe(self, num_tokens: int, bucket: int, seconds: float, *, patience: float) -> int | None:
        """Notes a step that ran in `bucket` and would have had `num_tokens`. Returns the bucket that it lacked, once
        more than `patience` seconds have been lost for that one."""
        best = pick_bucket(self._sizes, min(num_tokens, self._sizes[-1]))
        if best == bucket:
            return None
        self._lost[best] += seconds * (1 - min(best, bucket) / max(best, bucket))
        if self._lost[best] <= patience:
            return None
        del self._lost[best]
        return best
