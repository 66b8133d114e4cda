"""Counts the bytes that an optimised module moves between main memory and its kernels.

Every kernel (a fusion, custom call, copy, collective ...) reads its operands and writes its results once, with these
corrections: what is only sliced or gathered counts as much as comes out, what is updated in place as much as goes in;
results of other memories (a TPU's VMEM) cost nothing, the copies that fetch them do; a loop's body counts as often as
it runs. Our own Pallas kernels count nothing here, but for products: the module can't know what they read, so they say
it themselves.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxllm.aot.hlo import ArrayShape, Computation, Instruction, Module, Shape, arrays, num_bytes

PALLAS_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "mosaic_gpu")
READ_ONCE = ("jaxllm_quantized_matmul",)  # of our kernels: those that read each operand once, as others do
_ALIASES = ("bitcast", "get-tuple-element", "tuple", "optimization-barrier", "reshape")  # no work
_FREE = (*_ALIASES, "parameter", "constant", "after-all", "partition-id", "replica-id", "iota", "domain")
_FREE_TARGETS = ("ConcatBitcast", "AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
_SLICES = ("slice", "dynamic-slice", "gather")  # read of operand 0 what comes out
_UPDATES = ("dynamic-update-slice", "scatter")  # write into operand 0 what goes in
_CALLS = ("call", "call-start", "async-start", "conditional")
OTHER = "intermediates"
CACHED = "small intermediates"
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), ")  # index of a result, number of the operand whose place it takes

Origin = str | tuple["Origin", ...]  # an array's kind, or the kinds of a tuple's elements


@dataclass
class Traffic:
    """Bytes by kind of data read or written, kernels, and the assumptions of the count."""

    num_bytes: Counter[str] = field(default_factory=Counter)  # by origin
    kernels: int = 0  # run in a step
    pallas_calls: int = 0  # among them
    open_loops: int = 0  # with a number of trips unknown to the compiler
    largest: Counter[str] = field(default_factory=Counter)  # bytes by instruction, all its runs

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())

    def add(self, name: str, other: "Traffic") -> None:
        """Adds that of the executable `name`."""
        self.num_bytes += other.num_bytes
        self.kernels += other.kernels
        self.pallas_calls += other.pallas_calls
        self.open_loops += other.open_loops
        self.largest.update({f"{name}: {instruction}": size for instruction, size in other.largest.items()})


def count(module: Module, label: Callable[[Instruction], str], *, open_trips: int = 1, small_bytes: int = 0) -> Traffic:
    """The traffic of one run. `label` names an entry parameter's origin; a loop that ends when data say so counts
    `open_trips` times, or, with 0, is not entered; intermediate arrays up to `small_bytes`, which a cache may hold,
    count apart."""
    counter = _TrafficCounter(module, open_trips, small_bytes)
    origins = [label(parameter) for _, parameter in sorted(module.entry.parameters.items())]
    counter.walk(module.entry, origins, 1)
    return counter.traffic


class _TrafficCounter:
    def __init__(self, module: Module, open_trips: int, small_bytes: int):
        self.module, self.open_trips, self.small_bytes = module, open_trips, small_bytes
        self.traffic = Traffic()

    def walk(self, computation: Computation, parameters: Sequence[Origin], runs: int) -> Origin:
        """Counts `runs` runs of a computation whose parameters have these origins; returns its result's origin."""
        origins: dict[str, Origin] = {}
        for instruction in computation.instructions.values():
            given = [origins.get(name, OTHER) for name in instruction.operands]
            if instruction.opcode == "parameter":
                origins[instruction.name] = parameters[int(instruction.operands[0])]
            else:
                origins[instruction.name] = self._visit(computation, instruction, given, runs)
        return origins[computation.root]

    def _visit(self, owner: Computation, op: Instruction, given: Sequence[Origin], runs: int) -> Origin:
        if op.opcode == "while":
            return self._loop(op, given, runs)
        if op.opcode in _CALLS and op.called:
            results = [
                self.walk(self.module.computations[name], self._arguments(op, given, i), runs)
                for i, name in enumerate(op.called)
            ]
            return results[0] if op.opcode == "call" else _spread(op.shape, OTHER)
        if op.opcode in _FREE or op.opcode.endswith(("-done", "-update")) or op.custom_call_target in _FREE_TARGETS:
            return _passed_on(op, given)
        self.traffic.kernels += runs
        if op.custom_call_target in PALLAS_TARGETS:
            self.traffic.pallas_calls += runs
            if not any(f"/{name}/" in op.op_name for name in READ_ONCE):
                return self._in_place(op, given)
        self._count(owner, op, given, runs)
        return self._in_place(op, given)

    def _arguments(self, op: Instruction, given: Sequence[Origin], i: int) -> Sequence[Origin]:
        """Origins of the `i`th called computation's parameters: a branch of a conditional takes one operand."""
        count = len(self.module.computations[op.called[i]].parameters)
        operands = given[i + 1 : i + 2] if op.opcode == "conditional" else given
        return [*operands, *[OTHER] * (count - len(operands))]

    def _loop(self, op: Instruction, given: Sequence[Origin], runs: int) -> Origin:
        trips = op.trip_count
        if trips is None:
            trips = self.open_trips
            self.traffic.open_loops += trips > 0
        self.walk(self.module.computations[op.called[-1]], given, runs * trips)
        return given[0]

    def _count(self, owner: Computation, op: Instruction, given: Sequence[Origin], runs: int) -> None:
        reads, writes = self._moved(owner, op)
        read = zip((origin if isinstance(origin, str) else OTHER for origin in given), reads, strict=True)
        written = zip(_flat(self._in_place(op, given), op.shape), writes, strict=True)
        for origin, size in (*read, *written):
            if origin == OTHER and size <= self.small_bytes:
                origin = CACHED
            if size:
                self.traffic.num_bytes[origin] += size * runs
                self.traffic.largest[op.name] += size * runs

    def _moved(self, owner: Computation, op: Instruction) -> tuple[list[int], list[int]]:
        """Bytes read of each operand, and written of each array of the result."""
        shapes = [owner.instructions[name].shape for name in op.operands]
        whole = [num_bytes(shape) for shape in shapes]
        result = [array.num_bytes if array.memory_space == 0 else 0 for array in arrays(op.shape)]
        if op.opcode in ("fusion", "fusion-start") and op.called:
            body = self.module.computations[op.called[0]]
            reads = [self._read_by(body, i, size) for i, size in enumerate(whole)]
            written = self._written(body)
            if op.opcode == "fusion":
                result = [min(a, b) for a, b in zip(result, written, strict=True)]
            else:  # its shape is (operands, results, context)
                result = [*[0] * sum(1 for _ in arrays(op.shape[0])), *written]
                result += [0] * (sum(1 for _ in arrays(op.shape)) - len(result))
            return reads, result
        if op.opcode in ("copy-start", "slice-start"):  # (result, operand, context) or (operand, result, context)
            moved = op.shape[0] if op.opcode == "copy-start" else op.shape[1]
            amount = sum(array.num_bytes for array in arrays(moved))
            return [min(size, amount) for size in whole], _only(result, 0 if op.opcode == "copy-start" else 1)
        if op.opcode.endswith("-start"):  # a collective: results behind the operands, or the results alone
            return whole, result if len(result) == len(whole) else _only(result, *range(len(whole), 2 * len(whole)))
        if op.opcode in _SLICES:
            return [min(whole[0], sum(result)), *whole[1:]], result
        if op.opcode in _UPDATES:
            update = self._update_bytes(owner, op)
            return [0, *whole[1:]], [update]
        return whole, result

    def _read(self, body: Computation, index: int, size: int) -> tuple[int, bool]:
        """Bytes that a fusion reads of its parameter `index`, which has `size`, and whether it hands it on as it is."""
        total, passed, todo = 0, False, [body.parameters[index].name] if index in body.parameters else []
        seen = set(todo)
        while todo:
            name = todo.pop()
            passed = passed or name == body.root
            for user in body.users[name]:
                alias = user.opcode in _ALIASES
                if user.opcode == "fusion":
                    inner = self.module.computations[user.called[0]]
                    for i, operand in enumerate(user.operands):
                        if operand == name:
                            amount, alias_of_inner = self._read(inner, i, size)
                            total, alias = total + amount, alias or alias_of_inner
                elif user.opcode in _SLICES and name == user.operands[0]:
                    total += _dense(user.shape)
                elif not alias and not (user.opcode in _UPDATES and name == user.operands[0]):
                    return size, False
                if alias and user.name not in seen:
                    seen.add(user.name)
                    todo.append(user.name)
        return min(total, size), passed

    def _read_by(self, body: Computation, index: int, size: int) -> int:
        amount, passed = self._read(body, index, size)
        return size if passed else amount

    def _written(self, body: Computation) -> list[int]:
        """Bytes that a fusion writes of each array of its result."""
        root = body.instructions[body.root]
        parts = [body.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return [size for part in parts for size in self._written_by(body, part)]

    def _written_by(self, body: Computation, part: Instruction) -> list[int]:
        source = part
        while source.opcode in ("bitcast", "reshape"):
            source = body.instructions[source.operands[0]]
        if source.opcode in _UPDATES and (updated := self._updates(body, source)) is not None:
            return [updated]
        if source.opcode == "fusion":
            return self._written(self.module.computations[source.called[0]])
        return [array.num_bytes for array in arrays(part.shape)]

    def _updates(self, body: Computation, last: Instruction) -> int | None:
        """Bytes that a chain of updates, of which this is the `last`, writes into a parameter; None if it is none."""
        total = 0
        while last.opcode in ("bitcast", "reshape", *_UPDATES):
            total += self._update_bytes(body, last) if last.opcode in _UPDATES else 0
            last = body.instructions[last.operands[0]]
        return total if last.opcode == "parameter" else None

    @staticmethod
    def _update_bytes(owner: Computation, op: Instruction) -> int:
        return _dense(owner.instructions[op.operands[1 if op.opcode == "dynamic-update-slice" else -1]].shape)

    def _in_place(self, op: Instruction, given: Sequence[Origin]) -> Origin:
        """The origin of a kernel's result: an operand's, where the result takes its place or is its copy."""
        if op.opcode in ("copy-start", "slice-start", *_UPDATES):
            return _spread(op.shape, given[0] if isinstance(given[0], str) else OTHER)
        if op.opcode == "fusion":
            body = self.module.computations[op.called[0]]
            root = body.instructions[body.root]
            if root.opcode == "tuple":
                return tuple(self._updated(body, part, given) for part in root.operands)
            is_array = isinstance(op.shape, ArrayShape)  # else one operation has several results: a reduction
            return self._updated(body, root.name, given) if is_array else _spread(op.shape, OTHER)
        if found := _ALIASED.findall(op.attributes.partition("output_to_operand_aliasing=")[2]):
            sources = {int(result or 0): given[int(operand)] for result, operand in found}
            if isinstance(op.shape, ArrayShape):
                return sources.get(0, OTHER)
            return tuple(sources.get(i, _spread(part, OTHER)) for i, part in enumerate(op.shape))
        return _spread(op.shape, OTHER)

    def _updated(self, body: Computation, name: str, given: Sequence[Origin]) -> str:
        """The origin of the fusion's parameter that `name` is, updated."""
        source = body.instructions[name]
        while source.opcode in ("bitcast", "reshape", *_UPDATES):
            source = body.instructions[source.operands[0]]
        origin = given[int(source.operands[0])] if source.opcode == "parameter" else OTHER
        return origin if isinstance(origin, str) else OTHER


def _passed_on(op: Instruction, given: Sequence[Origin]) -> Origin:
    """The origin of the result of an operation that moves nothing."""
    if op.opcode == "tuple":
        return tuple(given)
    if op.opcode == "get-tuple-element":
        index = int(op.attributes.split("index=")[1].split(",")[0])
        return given[0][index] if isinstance(given[0], tuple) else given[0]
    if not given:
        return _spread(op.shape, OTHER)
    first = given[0]
    if op.opcode.endswith("-done") and isinstance(first, tuple) and not isinstance(op.shape, tuple):
        return first[0] if first else OTHER
    same = len(set(map(str, given))) == 1  # parts of one array, put together
    return first if same and not isinstance(op.shape, tuple) else _spread(op.shape, OTHER)


def _spread(shape: Shape, origin: str) -> Origin:
    return origin if isinstance(shape, ArrayShape) else tuple(_spread(part, origin) for part in shape)


def _flat(origin: Origin, shape: Shape) -> list[str]:
    if isinstance(shape, ArrayShape):
        return [origin if isinstance(origin, str) else OTHER]
    parts = origin if isinstance(origin, tuple) else [origin] * len(shape)
    return [name for part, inner in zip(parts, shape, strict=True) for name in _flat(part, inner)]


def _only(sizes: Sequence[int], *kept: int) -> list[int]:
    return [size if i in kept else 0 for i, size in enumerate(sizes)]


def _dense(shape: Shape) -> int:
    return sum(array.num_bytes for array in arrays(shape))
