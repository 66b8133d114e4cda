"""Whether preempted sequences had better be swapped to host memory or computed again. Numbers only; no clock."""

DECAY = 0.95  # of what was learned, a step


class PreemptionCosts:
    """Compares the seconds that copying blocks out and back takes with those of prefilling their tokens again.

    Left out, as they depend on what runs beside it: copies overlap steps, which makes swapping cheaper than it says;
    a recomputed chunk shares its step with others' decodes (its tokens are charged the average of such steps), and the
    prefix cache may still have some of its blocks, which makes recomputing cheaper; attention to a long prefix, which
    costs more than the average token's, makes it dearer.
    """

    def __init__(self, page_bytes: int):
        self.page_bytes = page_bytes  # of a page in host memory
        self.copy_bytes_per_s: float | None = None  # of a round trip, once it is measured
        self._seconds = self._tokens = 0.0

    @property
    def prefill_s(self) -> float | None:
        """Seconds a prefilled token, on the average of late steps; None before the first."""
        return self._seconds / self._tokens if self._tokens else None

    def observe_step(self, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learns from a step of `num_tokens`, if at least half of them are prompts': others say what a decode costs,
        which is mostly the reading of the parameters."""
        assert 0 <= num_prompt_tokens <= num_tokens and seconds >= 0, (num_tokens, num_prompt_tokens, seconds)
        if num_prompt_tokens and 2 * num_prompt_tokens >= num_tokens:
            self._seconds = DECAY * self._seconds + seconds
            self._tokens = DECAY * self._tokens + num_tokens

    def prefers_swap(self, num_pages: int, num_tokens: int) -> bool:
        """Whether copying `num_pages` out and back is faster than computing `num_tokens` again.

        False while the bandwidth is unknown: recomputing needs nothing but steps. Else True while the prefill's speed
        is unknown, which keeps what has been computed.
        """
        if self.copy_bytes_per_s is None:
            return False
        if self.prefill_s is None:
            return True
        return num_pages * self.page_bytes / self.copy_bytes_per_s < num_tokens * self.prefill_s
