"""The results of all sections: one JSON file, rewritten whenever a section ends."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, CUT = "ok", "failed", "cut"  # cut: the time of the whole run was over; run again by the next one


@dataclass
class SectionResult:
    status: str
    seconds: float
    summary: str = ""  # one line; the error of a section that failed
    values: dict[str, Any] = field(default_factory=dict)  # what it recorded, also before it failed


class Results:
    """What is in `path`, or nothing yet. Raises `ValueError` for a file that the other kind of run, small or not,
    wrote."""

    def __init__(self, path: Path, *, small: bool):
        self.path, self.small = path, small
        self.sections: dict[str, SectionResult] = {}
        if not path.is_file():
            return
        found = json.loads(path.read_text())
        if found["small"] != small:
            raise ValueError(
                f"{path} is of a run with small={found['small']}, this one has small={small}; give another --out"
            )
        self.sections = {name: SectionResult(**fields) for name, fields in found["sections"].items()}

    def is_done(self, name: str) -> bool:
        return name in self.sections and self.sections[name].status != CUT

    def values(self, name: str) -> dict[str, Any]:
        """What a section recorded; nothing if it has not run."""
        return self.sections[name].values if name in self.sections else {}

    def put(self, name: str, result: SectionResult) -> None:
        self.sections[name] = result
        sections = {name: asdict(result) for name, result in self.sections.items()}
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps({"small": self.small, "sections": sections}, indent=1) + "\n")
        os.replace(beside, self.path)
