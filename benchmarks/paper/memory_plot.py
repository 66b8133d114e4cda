"""The report of `memory` as a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.paper import contiguous, trace
from benchmarks.paper.memory import BLOCK_SIZE, BLOCK_SIZES, PAPER_SAVED, WIDTHS
from jaxllm.errors import JaxLLMError

_COLORS = {"alpaca": "#e08214", "sharegpt": "#2166ac"}  # told apart by everybody
_NAMES = {"alpaca": "Alpaca lengths", "sharegpt": "ShareGPT lengths"}
_BAR = 0.42  # the width of a bar; the distance of two groups is 1
_SHIFT = {"alpaca": -_BAR / 2, "sharegpt": _BAR / 2}
_METHODS = {"samples": "samples of a prompt", "beams": "beams"}


def check(path: Path) -> None:
    """Raises `JaxLLMError` without matplotlib, and `ValueError` for a file that could not be written as PNG."""
    if importlib.util.find_spec("matplotlib") is None:
        raise JaxLLMError("matplotlib is not installed, but --plot needs it; pip install 'jaxllm[bench]'")
    if path.suffix != ".png":
        raise ValueError(f"--plot {path} would be a PNG file; give it a name that ends in .png")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no directory {path.parent}; make it, or write elsewhere")


def draw(report: dict[str, Any], path: Path) -> None:
    """Two panels: waste by block size beside contiguous memory, and savings beside the paper's. Without pyplot, which
    keeps figures and a back end for the whole process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _draw_wasted(left, report)
    _draw_saved(right, report)
    left.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.set_ylim(0, 100)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.tick_params(axis="x", length=0, labelsize=8)
        axes.tick_params(axis="y", labelsize=8)
    figure.savefig(path)


def _draw_wasted(axes: Any, report: dict[str, Any]) -> None:
    wasted = {(row["memory"], row["block_size"], row["trace"]): 100 * row["wasted"] for row in report["wasted"]}
    reserved, sizes = list(contiguous.RESERVED), list(reversed(BLOCK_SIZES))
    first = len(reserved) + 0.5
    places = [float(i) for i in range(len(reserved))] + [first + i for i in range(len(sizes))]
    for name in trace.MEANS:
        heights = [wasted[kind, None, name] for kind in reserved] + [wasted["blocks", size, name] for size in sizes]
        _draw_bars(axes, name, places, heights)
    _name_groups(axes, {"contiguous chunks": (0.0, reserved), "blocks of so many tokens": (first, sizes)})
    axes.set_title("Held KV memory without a token, %", fontsize=10, loc="left")


def _draw_saved(axes: Any, report: dict[str, Any]) -> None:
    saved = {(row["method"], row["trace"], row["width"]): 100 * row["saved"] for row in report["saved"]}
    methods = list(dict.fromkeys(method for method, _, _ in saved))
    groups = {}
    for i, method in enumerate(methods):
        start = i * (len(WIDTHS) + 1.5)
        groups[_METHODS[method]] = start, [*WIDTHS, "paper"]
        for name in trace.MEANS:
            heights = [saved[method, name, width] for width in WIDTHS]
            _draw_bars(axes, name, [start + k for k in range(len(WIDTHS))], heights)
            low, high = PAPER_SAVED[method, name]
            x = start + len(WIDTHS) + _SHIFT[name] / 2
            axes.errorbar(x, (low + high) / 2, (high - low) / 2, color=_COLORS[name], capsize=4)
    _name_groups(axes, groups)
    axes.set_title(f"Blocks of {BLOCK_SIZE} saved by sharing, %", fontsize=10, loc="left")


def _draw_bars(axes: Any, name: str, places: list[float], heights: list[float]) -> None:
    places = [place + _SHIFT[name] for place in places]
    axes.bar(places, heights, _BAR, color=_COLORS[name], label=_NAMES[name])
    for place, height in zip(places, heights, strict=True):
        text = f"{height:.0f}" if height >= 9.95 else f"{height:.1f}"
        axes.annotate(text, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=6.5)


def _name_groups(axes: Any, groups: dict[str, tuple[float, list[Any]]]) -> None:
    """`groups` have a title below, the place of their first bars, and the labels of all."""
    ticks = {start + i: str(label) for start, labels in groups.values() for i, label in enumerate(labels)}
    axes.set_xticks(list(ticks), list(ticks.values()))
    for title, (start, labels) in groups.items():
        middle = start + (len(labels) - 1) / 2
        axes.text(middle, -0.1, title, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=9)
