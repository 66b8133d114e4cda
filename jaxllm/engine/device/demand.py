"""Which executable the work at hand lacks most, while not all are compiled."""

from collections import defaultdict
from collections.abc import Sequence

from jaxllm.engine.device.packing import pick_bucket

_FIXED_TOKENS = 64  # of a CPU, whose steps take about as long for reading and laying out weights
_SLOW_PADDING = 1 / 8  # of what padding takes elsewhere, it takes code that was compiled quickly for a CPU


class Demand:
    """Adds up the seconds that steps lose because the bucket they would best run in is not compiled: to padding, and
    to tokens that are left for later steps. `sizes` are all buckets, in tokens, ascending. Where steps have
    `free_padding`, they take as long as they have tokens, but for what they would take without any."""

    def __init__(self, sizes: Sequence[int], *, free_padding: bool = False):
        self._sizes, self._free_padding = sizes, free_padding
        self._lost: defaultdict[int, float] = defaultdict(float)  # seconds so far, by bucket
        self._fastest: dict[int, float] = {}  # seconds of a step, by bucket: the first of all takes much longer
        self._told: set[int] = set()

    def observe(
        self, num_tokens: int, bucket: int, seconds: float, *, patience: float, is_quick: bool = False
    ) -> int | None:
        """Notes a step of `seconds` that ran in `bucket` and would have had `num_tokens`. Returns the bucket it lacked
        if with the steps that are left of these tokens more than `patience` seconds will have been lost for that. The
        padding of one that was compiled quickly is not as free as that of others."""
        is_first = bucket not in self._fastest
        self._fastest[bucket] = min(seconds, self._fastest.get(bucket, seconds))
        best = pick_bucket(self._sizes, min(num_tokens, self._sizes[-1]))
        self._told -= {told for told in self._told if told <= bucket}  # it is there
        if best == bucket or any(told >= best for told in self._told):  # that one will do
            return None
        fixed = self._fixed_share(bucket, best, is_quick)
        self._lost[best] += seconds * fixed * (1 - min(best, bucket) / max(best, bucket))
        ahead = 0.0 if is_first else self._fastest[bucket] * fixed * max(0.0, num_tokens / bucket - 1)
        if self._lost[best] + ahead <= patience:
            return None
        del self._lost[best]
        self._told.add(best)
        return best

    def _fixed_share(self, bucket: int, best: int, is_quick: bool) -> float:
        """Of a step's time in a bucket, what a step of fewer tokens takes too, or one of the best bucket no less."""
        if not self._free_padding:
            return 1.0
        if bucket > best:
            return _SLOW_PADDING * is_quick
        return min(1.0, _FIXED_TOKENS / bucket)
