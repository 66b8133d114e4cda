"""Compiles a plan for a target, and reports its executables' memory, compile time, kernels and traffic."""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from jaxllm.aot import thunks
from jaxllm.aot.collectives import Collectives
from jaxllm.aot.efficiency import Efficiency, efficiency, pick_batch
from jaxllm.aot.floors import Floor, decode_floor, host_weight_bytes, prefill_floor
from jaxllm.aot.prepare import Prepared
from jaxllm.engine.device import memory


@dataclass(frozen=True)
class Executable:
    """A compiled executable of the plan; bytes are per device."""

    name: str
    seconds: float  # to lower and compile
    cpu_seconds: float  # likewise, of all threads
    argument_bytes: int
    output_bytes: int  # of results in memory of their own
    alias_bytes: int  # of results in the memory of a donated argument
    temp_bytes: int
    code_bytes: int
    cost_bytes: float | None  # TPUs: "bytes accessed" of the compiler's cost analysis
    launches: int | None  # GPUs: kernels, copies and collectives of one run; a loop's count once
    command_buffers: int | None  # GPUs
    outer_thunks: int | None  # GPUs: launches by the host
    text: str = dataclasses.field(repr=False, compare=False)  # optimised HLO

    @property
    def peak_bytes(self) -> int:
        """The most memory in use while it runs."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes + self.code_bytes


@dataclass(frozen=True)
class Report:
    """The plan's memory on each device."""

    model: str
    prepared: Prepared
    num_executables: int
    executables: list[Executable]
    first: list[Executable]  # those that serve the first request; [] if they were not all compiled
    decode: list[Executable]  # that a decode step runs: the forward pass, then the sampler
    largest: Executable  # the step with most tokens
    efficiency: Efficiency
    floors: tuple[Floor, Floor]  # of the decode step, and of the largest step as a prompt's

    @property
    def host_weight_bytes(self) -> list[int]:
        """Of each host's devices, what lies on several of them once: what it reads."""
        return host_weight_bytes(self.prepared)

    @property
    def decode_launches(self) -> int | None:
        """GPUs: of a decode step."""
        return _sum(e.launches for e in self.decode)

    @property
    def decode_cost_bytes(self) -> float | None:
        """TPUs: of a decode step, as the compiler's cost analysis has it."""
        return _sum(e.cost_bytes for e in self.decode)

    @property
    def params_bytes(self) -> int:
        return memory.leaf_bytes(self.prepared.shape.leaves)

    @property
    def pool_bytes(self) -> int:
        return memory.leaf_bytes(jax.tree.leaves(self.prepared.lowering.state().kv_pools))

    @property
    def state_bytes(self) -> int:
        """Slots, sampling tables and the last hidden states."""
        return memory.leaf_bytes(jax.tree.leaves(self.prepared.lowering.small_state()))

    @property
    def code_bytes(self) -> int:
        """Machine code of all executables, which stays loaded."""
        return sum(e.code_bytes for e in self.executables)

    @property
    def cpu_seconds(self) -> float:
        """To lower and compile what was compiled."""
        return sum(e.cpu_seconds for e in self.executables)

    @property
    def first_cpu_seconds(self) -> float | None:
        """Until the first step can run."""
        return sum(e.cpu_seconds for e in self.first) if self.first else None

    @property
    def used_bytes(self) -> int:
        """The most memory in use, while the largest step runs."""
        step = self.largest.output_bytes + self.largest.temp_bytes
        return self.params_bytes + self.pool_bytes + self.state_bytes + step + self.code_bytes


def _sum(numbers: Iterable[float | None]) -> Any:
    """None where one is unknown."""
    given = list(numbers)
    known = [number for number in given if number is not None]
    return sum(known) if len(known) == len(given) else None


def compile_one(prepared: Prepared, name: Hashable, job: Any) -> Executable:
    """Lowers and compiles one of `Prepared.jobs`."""
    start, cpu_start, listed = time.perf_counter(), time.process_time(), None
    lowered = prepared.lower(job)
    if prepared.target.chip.platform == "gpu":
        with TemporaryDirectory() as directory:
            compiled, listed = thunks.compile_and_list(lowered, Path(directory))
    else:
        compiled = lowered.compile()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    stats = compiled.memory_analysis()
    assert stats is not None
    costs = compiled.cost_analysis() or {}
    return Executable(
        name=" ".join(map(str, name)) if isinstance(name, tuple) else str(name),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        cost_bytes=costs.get("bytes accessed"),
        launches=listed and listed.launches,
        command_buffers=listed and listed.command_buffers,
        outer_thunks=listed and sum(listed.outer.values()),
        text=compiled.as_text(),
    )


def make_report(
    model: str,
    prepared: Prepared,
    *,
    batch: int | None = None,
    context: int,
    steps_only: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compiles the whole plan, or a decode step's executables and the largest step's alone; see `pick_batch` for the
    batch. Raises what it raises, and what compiling does."""
    batch = pick_batch(prepared, context, batch)
    jobs = prepared.jobs()
    decode, largest = prepared.decode_names(batch), ("step", max(prepared.layouts))
    names = dict.fromkeys((*decode, largest) if steps_only else jobs)
    executables = {}
    for i, name in enumerate(names):
        executables[name] = compile_one(prepared, name, jobs[name])
        progress(f"compiled {executables[name].name}, {i + 1} of {len(names)}, in {executables[name].seconds:.1f} s")
    decoding = [executables[name] for name in decode]
    texts = {name[0]: executables[name].text for name in decode}
    counted = efficiency(prepared, texts, batch, context)
    floors = decode_floor(prepared, texts, batch, context), prefill_floor(prepared, executables[largest].text)
    compiled = list(executables.values())
    num_first = prepared.lowering.num_first
    first = [executables[name] for name in list(jobs)[:num_first] if name in executables]
    first = first if len(first) == num_first else []
    return Report(model, prepared, len(jobs), compiled, first, decoding, executables[largest], counted, floors)


def to_json(report: Report) -> dict[str, Any]:
    """A report's numbers by name; bytes are per device."""
    prepared, decode = report.prepared, report.efficiency
    target, (decoding, prefill) = prepared.target, report.floors
    fields = ("params_bytes", "pool_bytes", "state_bytes", "code_bytes", "used_bytes", "num_executables", "cpu_seconds")
    return {
        "model": report.model,
        "target": str(target),
        "mesh": dict(prepared.mesh.shape),
        "hosts": {
            "count": len(set(prepared.hosts)),
            "size": target.host_size,
            "weight_bytes": report.host_weight_bytes,
        },
        "config": dataclasses.asdict(prepared.config),
        "device_bytes": target.chip.usable_bytes,
        **{name: getattr(report, name) for name in (*fields, "first_cpu_seconds")},
        "executables": [
            {f.name: getattr(e, f.name) for f in dataclasses.fields(e) if f.name != "text"} for e in report.executables
        ],
        "decode": dataclasses.asdict(decode)
        | {
            "names": [e.name for e in report.decode],
            "launches": report.decode_launches,
            "fewest_bytes": decode.fewest,
            "moved_bytes": decode.total,
            "static_efficiency": decode.ratio,
            "floor_ms": decode.floor_ms,
            "kv_ratio": decode.kv_ratio,
            "uncached_ratio": decode.uncached_ratio,
            "other_ratio": decode.other_ratio,
            **_floor_json(decoding),
        },
        "prefill": {"what": prefill.what, "fewest_bytes": prefill.fewest_bytes, **_floor_json(prefill)},
        "largest": report.largest.name,
    }


def _floor_json(floor: Floor) -> dict[str, Any]:
    times = ("memory_ms", "compute_ms", "links_ms", "network_ms")
    return {
        "flops": floor.flops,
        "collectives": _sent_json(floor.sent),
        **{name: getattr(floor, name) for name in times},
    }


def _sent_json(found: Collectives) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "crosses_hosts": crosses, **dataclasses.asdict(sent)} for (kind, crosses), sent in found.items()
    ]
