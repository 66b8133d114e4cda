"""The results for people: goals first, then each section."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.on_gpu.floors import H200, Ceilings, Sizes
from benchmarks.on_gpu.goals import GOALS, Goal
from benchmarks.on_gpu.results import Results


def document(results: Results) -> str:
    machine = results.values("machine")
    what = machine.get("machine", {})
    title = what.get("device_kind", "a machine that has not said what it is")
    parts = [f"# First measurements on {title}", _facts(machine), "## Goals", *_goals(results)]
    parts += ["## Sections", _sections(results)]
    for name in ("speed-8b", "speed-0.6b"):
        if sizes := results.values(name).get("sizes"):
            parts += [f"## {name}", *_speed(results.values(name), Sizes(**sizes), _ceilings(machine))]
    for name in ("graph", "autotune", "attention-speed"):
        if values := results.values(name):
            parts += [f"## {name}", "```json", json.dumps(values, indent=1), "```"]
    return "\n\n".join(parts) + "\n"


def _facts(machine: dict[str, Any]) -> str:
    what = machine.get("machine", {})
    facts = [
        machine.get("nvidia_smi") or what.get("cpu"),
        f"Python {what.get('python')}, JAX {what.get('jax')}",
        f"{(machine.get('memory_bytes') or 0) / 1e9:.1f} GB for JAX",
        f"copies {machine.get('bandwidth', 0) / 1e12:.2f} TB/s",
        f"bfloat16 products {machine.get('flops', 0) / 1e12:.0f} TFLOP/s",
    ]
    return "; ".join(str(fact) for fact in facts) + "."


def _ceilings(machine: dict[str, Any]) -> Ceilings:
    """Those measured, or an H200's if they have not been."""
    return Ceilings(machine.get("bandwidth") or H200.bandwidth, machine.get("flops") or H200.flops)


def _goals(results: Results) -> list[str]:
    rows = [_goal(goal, None if results.small else goal.read(results)) for goal in GOALS]  # tiny shapes meet no goal
    table = _table(("goal, of one H200", "floor", "must", "stretch", "measured", "ratio", "met", "from"), rows)
    return ["Ratio: of what must be; 1 and more is met.", table]


def _goal(goal: Goal, measured: float | None) -> tuple[str, ...]:
    unit = f" {goal.unit}"
    wanted = ["" if goal.floor is None else f"{goal.floor:g}", f"{goal.must:.4g}", f"{goal.stretch:.4g}"]
    if measured is None:
        return (goal.name + "," + unit, *wanted, "–", "–", "not measured", goal.derivation)
    is_stretch = measured >= goal.stretch if goal.more_is_better else measured <= goal.stretch
    ratio = goal.ratio(measured)
    met = "stretch" if is_stretch else "must" if ratio >= 1 else "no"
    return (goal.name + "," + unit, *wanted, f"{measured:.4g}", f"{ratio:.2f}", met, goal.derivation)


def _sections(results: Results) -> str:
    rows = [(name, s.status, f"{s.seconds:.0f}", s.summary) for name, s in results.sections.items()]
    return _table(("section", "status", "s", "summary"), rows)


def _speed(values: dict[str, Any], sizes: Sizes, at: Ceilings) -> list[str]:
    """Shares are of the floors at what was measured of this device."""
    decodes = []
    for batch, row in values.get("decode", {}).items():
        if "skipped" in row:
            decodes.append((batch, row["skipped"], *[""] * 6))
            continue
        floor_ms, busy = sizes.decode_s(int(batch), row["context"], at) * 1e3, row["busy"]
        decodes.append(
            (
                batch,
                f"{row['step_ms']:.3f}",
                f"{row['tokens_per_s']:.0f}",
                f"{100 * floor_ms / row['step_ms']:.0f} %",
                f"{row['host_ms']:.3f}",
                f"{row['wait_ms']:.3f}",
                "–" if busy is None else f"{100 * busy['idle_share']:.1f} %",
                "–" if busy is None else f"{busy['kernels_per_step']:.0f}",
            )
        )
    titles = ("decode at", "ms", "tok/s", "of the floor", "host ms", "wait ms", "idle", "kernels")
    prompts = [
        (tokens, f"{ms:.1f}", f"{int(tokens) / ms * 1e3:.0f}", f"{100e3 * sizes.prefill_s(int(tokens), at) / ms:.0f} %")
        for tokens, ms in values.get("prefill", {}).items()
    ]
    start = values.get("start")
    return [
        _table(titles, decodes),
        _table(("prompt of", "ms to first token", "tok/s", "of the floor"), prompts),
        "Start: not measured." if start is None else f"Start: `{json.dumps(start)}`",
    ]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
