"""Writes `deploy/constraints-*.txt`: all that a deployment installs, with versions and hashes of the wheels.

    pip install uv && python scripts/lock.py

They are of the newest versions that fit `pyproject.toml`, for each kind of device and each Python that is tested. Only
wheels are locked, so that no code runs while they are installed.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12")
PLATFORM = "{}-manylinux_2_34"  # glibc 2.34: RHEL 9, Debian 12, Ubuntu 22.04
BOTH = ("x86_64", "aarch64")
MACHINES = {"cpu": BOTH, "cuda12": BOTH, "cuda13": BOTH, "tpu": ("x86_64",)}
BESIDE = "setuptools>=77\n"  # which builds the package, without an isolated environment of unlocked things
HEAD = """\
# Made by scripts/lock.py for {devices} on Linux ({machines}) with Python {python}. To use it: deploy/README.md.
"""


def main() -> int:
    for devices, machines in MACHINES.items():
        for python in PYTHONS:
            locked: dict[str, tuple[str, set[str]]] = {}
            for machine in machines:
                for name, version, hashes in resolve(devices, python, machine):
                    known, found = locked.setdefault(name, (version, set()))
                    if known != version:
                        raise SystemExit(f"{name} is {known} on one machine and {version} on {machine}")
                    found |= hashes
            file = ROOT / "deploy" / f"constraints-{devices}-py{python}.txt"
            file.write_text(HEAD.format(devices=devices, machines=", ".join(machines), python=python) + text(locked))
            print(f"{file.relative_to(ROOT)}: {len(locked)} packages")
    return 0


def resolve(devices: str, python: str, machine: str) -> list[tuple[str, str, set[str]]]:
    """Name, version and SHA-256 of the wheels of each package. Raises `CalledProcessError`."""
    extras = [] if devices == "cpu" else ["--extra", devices]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "pylock.toml")
        command = ["uv", "pip", "compile", "--quiet", "--no-config", "--no-build", "--format", "pylock.toml"]
        command += ["--python-version", python, "--python-platform", PLATFORM.format(machine), "-o", str(out)]
        command += [*extras, "--extra", "otel", "pyproject.toml", "-"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
        subprocess.run(command, check=True, cwd=ROOT, input=BESIDE, text=True, env=environment)
        packages = tomllib.loads(out.read_text())["packages"]
    return [(p["name"], p["version"], {wheel["hashes"]["sha256"] for wheel in p["wheels"]}) for p in packages]


def text(locked: dict[str, tuple[str, set[str]]]) -> str:
    return "".join(
        " \\\n    --hash=sha256:".join([f"{name}=={version}", *sorted(hashes)]) + "\n"
        for name, (version, hashes) in sorted(locked.items())
    )


if __name__ == "__main__":
    sys.exit(main())
