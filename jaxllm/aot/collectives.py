"""Counts what devices send to each other in an optimised module, and what of it goes from host to host."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from jaxllm.aot.hlo import Computation, Instruction, Module, arrays

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_LISTS = re.compile(r"\{((?:\{[\d, ]*\},? ?)*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'?([^',=]+?)'?=(\d+)")
_REFERENCE = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Sent:
    """Of one kind of collective in a step: bytes are of each device."""

    count: int = 0  # runs
    operand_bytes: int = 0  # what a device puts in; for sums of a wider type than their result's, in that
    link_bytes: int = 0  # that it sends at least, over the links of its host or slice
    network_bytes: int = 0  # likewise to other hosts, where that is another network

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Sent)))


Collectives = dict[tuple[str, bool], Sent]  # by kind, and whether it crosses hosts


def count(module: Module, hosts: Sequence[int], *, has_network: bool, open_trips: int = 1) -> Collectives:
    """The collectives of one run. `hosts` says which host each device is of, in the order of the executable's devices;
    `has_network`: what goes to other hosts takes other links. A loop that ends when data say so counts `open_trips`
    times, and both branches of a condition count."""
    found: Collectives = {}
    for owner, op, runs in _walk(module, module.entry, 1, open_trips):
        kind = op.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        size = sum(_data_bytes(owner.instructions[name], op) for name in op.operands)
        crosses, link, network = _sent(kind, size, op.attributes, np.asarray(hosts), has_network)
        one = Sent(runs, size * runs, round(link * runs), round(network * runs))
        found[kind, crosses] = found.get((kind, crosses), Sent()) + one
    return found


def _walk(
    module: Module, computation: Computation, runs: int, open_trips: int
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Every instruction that runs, those within fusions included, with how often."""
    for op in computation.instructions.values():
        yield computation, op, runs
        if op.opcode.endswith(("-done", "-update")):
            continue  # it names what its start calls
        trips = 1
        if op.opcode == "while":
            trips = open_trips if op.trip_count is None else op.trip_count
        for name in op.called:
            yield from _walk(module, module.computations[name], runs * trips, open_trips)


def _data_bytes(operand: Instruction, op: Instruction) -> int:
    """Bytes of an operand's arrays without padding, wherever they lie; of a sum that is rounded those of its result, as
    TPUs add up float32 to bfloat16, and XLA does not say which of them is sent."""
    sums = list(arrays(op.shape)) if op.opcode.startswith("all-reduce") else []
    return sum(
        math.prod(array.dims) * min([array.bits, *(each.bits for each in sums if each.dims == array.dims)]) // 8
        for array in arrays(operand.shape)
    )


def _sent(kind: str, size: int, text: str, hosts: np.ndarray, has_network: bool) -> tuple[bool, float, float]:
    """Whether a collective with operands of `size` bytes crosses hosts, and the bytes that a device sends at least:
    over its links, and over the network."""
    if kind == "collective-permute":
        pairs = np.array([_ints(pair) for pair in _inner(text, "source_target_pairs=")])
        crosses = bool((hosts[pairs[:, 0]] != hosts[pairs[:, 1]]).any())
        return crosses, 0.0 if crosses and has_network else float(size), float(size) if crosses and has_network else 0.0
    groups = parse_groups(text, len(hosts))
    each = groups.shape[1]
    num_hosts = max(len(set(row)) for row in hosts[groups].tolist())
    if num_hosts == 1 or not has_network:
        return num_hosts > 1, _share(kind, each) * size, 0.0
    # At best a host's devices do their part first or last, and each meets its like on the other hosts.
    within, link, across = each // num_hosts, _share(kind, each // num_hosts) * size, _share(kind, num_hosts) * size
    if kind == "all-gather":
        return True, link * num_hosts, across
    if kind.endswith("all-to-all"):
        return True, link / num_hosts, across
    return True, link, across / within


def _share(kind: str, n: int) -> float:
    """Bytes that each of `n` devices sends at least, for a byte that it puts in."""
    if kind == "all-reduce":
        return 2 * (n - 1) / n
    if kind == "all-gather":
        return float(n - 1)
    return 1.0 if kind == "collective-broadcast" else (n - 1) / n


def _inner(text: str, name: str) -> list[str]:
    found = _LISTS.match(text, text.index(name) + len(name))
    return re.findall(r"\{([\d, ]*)\}", found[1]) if found else []


def parse_groups(text: str, num_devices: int) -> np.ndarray:
    """The devices that take part in one collective each, int `[groups, devices]`, of an instruction's attributes.
    ValueError for a form that XLA did not have when this was written."""
    name = "replica_groups="
    start = text.find(name) + len(name)
    if text.find(name) < 0 or text.startswith("{}", start):
        return np.arange(num_devices)[None]
    if found := _IOTA.match(text, start):
        return _counted(found).reshape(_ints(found[1]))
    if found := _MESH.match(text, start):
        return _of_mesh(*found.groups())
    if rows := _inner(text, name):
        return np.array([_ints(row) for row in rows])
    raise ValueError(f"unknown form of the devices of a collective: {text[start : start + 100]!r}")


def _counted(found: re.Match[str]) -> np.ndarray:
    """The ids of "[4,2]<=[2,4]T(1,0)" before they get the first shape: 0, 1, ... in the second one, transposed."""
    dims = _ints(found[2])
    return np.arange(math.prod(dims)).reshape(dims).transpose(_ints(found[3]) if found[3] else None)


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _of_mesh(axes: str, device_ids: str | None, references: str) -> np.ndarray:
    """Of "'data'=2,'tensor'=8" and the axes, or parts of them, that the groups span: "'tensor':(2)4"."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    num_devices = math.prod(sizes.values())
    ids = np.arange(num_devices)
    if device_ids and (found := _IOTA.search(device_ids)):
        ids = _counted(found).reshape(-1)
    elif device_ids:
        ids = np.array(_ints(device_ids))
    dims: list[tuple[str, int, int]] = []  # name, where it begins within the axis, size
    parts = [
        (name, int(before or 1), int(size or sizes[name])) for name, before, size in _REFERENCE.findall(references)
    ]
    for axis, size in sizes.items():
        edges = {1, size, *(edge for name, first, n in parts if name == axis for edge in (first, first * n))}
        dims += [(axis, a, b // a) for a, b in itertools.pairwise(sorted(edges))] or [(axis, 1, 1)]
    spanned = [
        i
        for i, (axis, first, _) in enumerate(dims)
        if any(name == axis and start <= first < start * n for name, start, n in parts)
    ]
    kept = [i for i in range(len(dims)) if i not in spanned]
    grid = ids.reshape([size for *_, size in dims]).transpose([*kept, *spanned])
    return grid.reshape(-1, math.prod(dims[i][2] for i in spanned))
