"""For how long somebody has been silent."""

import time


class SilenceMeter:
    """Seconds since the last sign of life, of those in which we were awake ourselves to notice one."""

    MOST_PER_TICK_S = 1.0

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._ticked_at = time.monotonic()

    def heard(self) -> None:
        self.silent_s = 0.0

    def tick(self) -> None:
        """To be called several times a second. After a suspension of the whole machine one second counts."""
        now = time.monotonic()
        self.silent_s += min(now - self._ticked_at, self.MOST_PER_TICK_S)
        self._ticked_at = now
