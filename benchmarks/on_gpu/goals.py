"""What is wanted on one H200, and what was measured beside it.

`must` and `stretch` come from the floors of `floors.py` on an H200 and from the best that others have shown there. 8B
is the shape of Llama-3.1-8B and 0.6B that of Qwen3-0.6B, both in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.on_gpu.results import Results

FEWEST_KERNELS = 20  # of a step: a trace with fewer has not looked into its graphs
FA3_8X4K_US, FA3_8X32K_US = 41.6, 253.5  # FlashAttention-3's paged decode, 32 heads on 8, on an H200


@dataclass(frozen=True)
class Goal:
    name: str
    unit: str
    floor: float | None
    must: float
    stretch: float
    derivation: str
    read: Callable[[Results], float | None]  # None: not measured
    more_is_better: bool = False

    def ratio(self, measured: float) -> float:
        """Of what must be; at least 1 is met."""
        if self.more_is_better:
            return measured / self.must
        return self.must / measured if measured > 0 else float("inf")


def _decode(section: str, batch: int, *path: str) -> Callable[[Results], float | None]:
    return lambda results: _find(results.values(section), "decode", str(batch), *path)


def _idle(results: Results) -> float | None:
    """Of the batches whose kernels the profiler has seen, the largest share; in percent."""
    rows = [row for section in ("speed-8b", "speed-0.6b") for row in results.values(section).get("decode", {}).values()]
    seen = [row["busy"] for row in rows if row.get("busy") and row["busy"]["kernels_per_step"] >= FEWEST_KERNELS]
    return max(100 * busy["idle_share"] for busy in seen) if seen else None


GOALS = (
    Goal(
        "8B, decode at 1",
        "ms",
        3.52,
        4.7,
        4.1,
        "75 and 86 % of the floor; others reach 77-86 %",
        _decode("speed-8b", 1, "step_ms"),
    ),
    Goal("8B, decode at 64", "ms", 5.49, 7.3, 6.46, "75 and 85 % of the floor", _decode("speed-8b", 64, "step_ms")),
    Goal("8B, decode at 256", "ms", 12.85, 17.0, 15.1, "75 and 85 % of the floor", _decode("speed-8b", 256, "step_ms")),
    Goal(
        "0.6B, decode at 1",
        "ms",
        0.30,
        1.2,
        0.7,
        "about 250 launches of 1.3 µs make the floor 0.6",
        _decode("speed-0.6b", 1, "step_ms"),
    ),
    Goal(
        "8B, prompt of 8k, first token",
        "ms",
        167.0,
        255.0,
        210.0,
        "65 and 80 % of the floor",
        lambda results: _find(results.values("speed-8b"), "prefill", "8192"),
    ),
    Goal(
        "attention, decode of 8x4k",
        "µs",
        31.0,
        1.2 * FA3_8X4K_US,
        1.05 * FA3_8X4K_US,
        "1.2 and 1.05 times FlashAttention-3",
        lambda results: _find(results.values("attention-speed"), "decode", "8x4096", "us"),
    ),
    Goal(
        "attention, decode of 8x32k",
        "µs",
        250.0,
        1.2 * FA3_8X32K_US,
        1.05 * FA3_8X32K_US,
        "1.2 and 1.05 times FlashAttention-3",
        lambda results: _find(results.values("attention-speed"), "decode", "8x32768", "us"),
    ),
    Goal(
        "attention, prompt of 8k",
        "TFLOP/s",
        790.0,
        500.0,
        600.0,
        "others reach 602-679 on an H200, Mosaic GPU 620 on an H100",
        lambda results: _scaled(_find(results.values("attention-speed"), "prefill", "8192", "flops_per_s"), 1e-12),
        more_is_better=True,
    ),
    Goal("device idle while decoding", "%", 0.0, 3.0, 1.0, "the largest of all batches; others 0.6-2.5", _idle),
    Goal(
        "8B, host's work a step at 256",
        "ms",
        None,
        1.0,
        0.4,
        "hidden behind the step, which the floor makes 12.85",
        _decode("speed-8b", 256, "host_ms"),
    ),
)


def _find(values: Any, *path: str) -> float | None:
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
