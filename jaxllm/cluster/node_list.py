"""Slurm's lists of nodes, as in `gpu[01-03,07],other5`."""

import itertools
import re

from jaxllm.errors import ClusterError

_NODE = re.compile(r"(?:[\w.-]|\[[\d,-]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_node_list(text: str) -> list[str]:
    """The names in a list of nodes, in its order. Raises `ClusterError`."""
    if not re.fullmatch(rf"{_NODE.pattern}(?:,{_NODE.pattern})*", text):
        raise ClusterError(
            f"{text!r} is no list of nodes such as gpu[01-03,07],other5; "
            "give --coordinator, --num-hosts and --host-index instead of --cluster slurm"
        )
    return [name for node in _NODE.findall(text) for name in _names(node)]


def _names(node: str) -> list[str]:
    """`a[1-2]b[3,5]` -> a1b3, a1b5, a2b3, a2b5."""
    parts = re.split(r"\[([\d,-]+)\]", node)  # every second one stood in brackets
    choices = [_numbers(part, node) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(ranges: str, node: str) -> list[str]:
    """`01-03,07` -> 01, 02, 03, 07."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ClusterError(f"{part!r} in the nodes {node!r} is no number and no range such as 01-03")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
