"""Reads the text of an optimised HLO module: computations, instructions, and the bytes of their shapes.

XLA has no Python interface to a compiled module but its text, which every backend prints alike.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # other element types carry their width in the name
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"%([\w.\-]+)")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]*)\)")


@dataclass(frozen=True)
class ArrayShape:
    """One array: its element type, dimensions and layout ("1,0:T(8,128)S(1)", as printed between braces)."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def memory_space(self) -> int:
        """0 is the device's main memory, 1 a TPU's VMEM, 2 its SMEM."""
        found = _SPACE.search(self.layout)
        return int(found[1]) if found else 0

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, including a TPU's padding of each row's last tile."""
        return -(-math.prod(self._padded) * self.bits // 8)

    @property
    def bits(self) -> int:
        """Of an element."""
        return _bits(self.dtype)

    @property
    def _padded(self) -> tuple[int, ...]:
        order, _, tiling = self.layout.partition(":")
        found = _TILE.search(tiling)
        if not found or not found[1] or not self.dims:
            return self.dims
        tile = [int(n) for n in found[1].split(",")]
        major_to_minor = [int(i) for i in order.split(",")][::-1]
        dims = [self.dims[i] for i in major_to_minor]
        first = max(0, len(dims) - len(tile))
        for i, size in zip(range(first, len(dims)), tile[-(len(dims) - first) :], strict=True):
            dims[i] = -(-dims[i] // size) * size
        return tuple(dims)


Shape = ArrayShape | tuple["Shape", ...]


def arrays(shape: Shape) -> Iterator[ArrayShape]:
    """The arrays of a shape, in order."""
    if isinstance(shape, ArrayShape):
        yield shape
    else:
        for part in shape:
            yield from arrays(part)


def num_bytes(shape: Shape) -> int:
    """Bytes of the shape's arrays that lie in the device's main memory."""
    return sum(array.num_bytes for array in arrays(shape) if array.memory_space == 0)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `attributes` is the text behind the operands."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]  # names; a parameter's number
    attributes: str = field(repr=False)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs (for a loop, its body), without those that combine two elements."""
        if self.opcode in (
            "reduce",
            "reduce-window",
            "scatter",
            "sort",
            "map",
            "all-reduce",
            "all-reduce-start",
            "reduce-scatter",
            "select-and-scatter",
        ):
            return ()
        found = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.attributes)
        for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.attributes):
            found += _NAME.findall(group)
        found += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.attributes)
        return tuple(found)

    @property
    def custom_call_target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """A loop's number of trips, if the compiler knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """Its origin in the traced program."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass
class Computation:
    """Instructions by name, in the order of the text; `root` is the result."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.operands[0]): i for i in found}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for user in self.instructions.values():
            for operand in dict.fromkeys(user.operands):
                if operand in users:
                    users[operand].append(user)
        return users


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """The module of `jax.stages.Compiled.as_text()`. ValueError if there is no entry computation in it."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if current is None:
            if head := _HEAD.match(line):
                current = computations[head[1]] = Computation()
                entry = current if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif " = " in line:
            instruction = _instruction(line.strip())
            current.instructions[instruction.name] = instruction
            if line.lstrip().startswith("ROOT "):
                current.root = instruction.name
    if entry is None:
        raise ValueError(f"no ENTRY computation in this text of {len(text)} characters: it is no HLO module")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = _shape(rest[:end]), rest[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    inside = rest[:end]
    operands = (inside,) if opcode == "parameter" else tuple(_NAME.findall(inside))
    return Instruction(name.lstrip("%"), shape, opcode, operands, rest[end + 1 :])


def _closing(text: str) -> int:
    """Where the bracket that opens `text` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")


def _shape(text: str) -> Shape:
    if not text.startswith("("):
        return _array(text)
    parts, depth, start = [], 0, 1
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            part = re.sub(r"/\*.*?\*/", "", text[start:i]).strip()
            parts += [_shape(part)] if part else []
            start = i + 1
    return tuple(parts)


def _array(text: str) -> ArrayShape:
    found = _ARRAY.match(text)
    if not found:
        return ArrayShape("opaque", ())
    dims = tuple(int(n.lstrip("<=")) for n in found[2].split(",") if n)
    return ArrayShape(found[1], dims, found[3] or "")


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    assert digits, f"unknown element type {dtype}"
    return int(digits[0])
