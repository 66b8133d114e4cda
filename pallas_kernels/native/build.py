"""Builds the native CPU library: at install, or in a checkout with `python -m jaxllm.pallas_kernels.native.build`.

Imports nothing of the package, so that setup.py can load this file alone.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
_AVX2, _BF16 = ["-mavx2", "-mfma", "-mf16c"], [*_AVX512, "-mavx512bf16", "-mavx512vnni"]
AMX = [*_BF16, "-mamx-tile", "-mamx-bf16"]
# Instruction set -> its table of kernels, and the compiler's flags; one object each, chosen from at run time. The
# portable one has NEON on Arm.
TABLES: dict[str, tuple[str, list[str]]] = {"portable": ("kPortable", [])}
INT8: dict[str, tuple[str, list[str]]] = {}  # likewise, with the table that all but products of int8 are of
if platform.machine().lower() in ("x86_64", "amd64"):
    TABLES |= {"avx2": ("kAvx2", _AVX2), "avx512": ("kAvx512", _AVX512), "avx512_bf16": ("kAvx512Bf16", _BF16)}
    INT8 |= {"avx512_vnni": ("kAvx512", [*_AVX512, "-mavx512vnni"]), "avx2_vnni": ("kAvx2", [*_AVX2, "-mavxvnni"])}
elif platform.machine().lower() in ("aarch64", "arm64"):
    TABLES |= {"neon_bf16": ("kNeonBf16", ["-march=armv8.2-a+dotprod+i8mm+bf16"])}
    INT8 |= {"neon_dotprod": ("kPortable", ["-march=armv8.2-a+dotprod"])}
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-Wno-psabi"]  # psabi: vectors as arguments, within one object only
EXACT = "-ffp-contract=off"  # where results are equal bit by bit to numpy's


class BuildError(Exception):
    """The library can't be built here; says why in one line."""


def library(jaxlib_version: str) -> Path:
    """Where the library for this source, jaxlib and machine is, or would be: no other one is ever loaded."""
    digest = hashlib.sha256(f"{jaxlib_version} {sys.platform} {platform.machine()}".encode())
    for file in sorted([*HERE.glob("*.cc"), *HERE.glob("*.h"), HERE / "build.py"]):
        digest.update(file.read_bytes())
    return HERE / f"native-{digest.hexdigest()[:16]}.so"


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """Compiles the library against the jaxlib of this environment, unless it is there: minutes on two cores, which pip
    would take each time that it installs a checkout. Further flags are for one who wants it made anew. Raises
    `BuildError`."""
    include, version = _jaxlib()
    target = library(version)
    if target.exists() and not extra_flags:
        return target
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if compiler is None:
        raise BuildError("no C++ compiler is found (g++, clang++, or what CXX names)")
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        objects = _compile([*compiler.split(), *FLAGS, *extra_flags], include, Path(folder))
        made = Path(folder) / target.name
        _wait([_start([*compiler.split(), "-shared", *extra_flags, *map(str, objects), "-o", str(made)])])
        made.replace(target)
    return target


def _compile(command: list[str], include: Path, folder: Path) -> list[Path]:
    jobs = [
        [*command, EXACT, "-isystem", str(include), "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        for source in sorted(HERE.glob("*ops.cc"))
    ]
    for isa, (table, flags) in TABLES.items():
        names = [f"-DJAXLLM_ISA={isa}", f"-DJAXLLM_TABLE={table}", f'-DJAXLLM_ISA_NAME="{isa}"']
        jobs.append([*command, *flags, *names, "-c", str(HERE / "kernels.cc"), "-o", str(folder / f"{isa}.o")])
    amx = _accepted(command, AMX)
    jobs.append([*command, *amx, "-c", str(HERE / "amx.cc"), "-o", str(folder / "amx.o")])
    for isa, (base, flags) in INT8.items():
        names = [f"-DJAXLLM_ISA={isa}", f"-DJAXLLM_BASE={base}", f'-DJAXLLM_ISA_NAME="{isa}"']
        names += [f"-DJAXLLM_KERNELS={isa}_kernels", *_accepted(command, flags)]
        jobs.append([*command, *names, "-c", str(HERE / "int8.cc"), "-o", str(folder / f"{isa}.o")])
    _wait([_start(job) for job in jobs])
    return [Path(job[-1]) for job in jobs]


def _accepted(command: list[str], flags: list[str]) -> list[str]:
    """The flags if the compiler knows all of them, else none."""
    process = _start([*command, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
    process.communicate()
    return flags if process.returncode == 0 else []


def _start(command: list[str]) -> subprocess.Popen:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} can't be run: {error}") from error


def _wait(processes: list[subprocess.Popen]) -> None:
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            errors = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no output"]
            raise BuildError(f"{process.args[0]} failed: {errors[0]}")


def _jaxlib() -> tuple[Path, str]:
    """Headers and version of jaxlib: the installed one; while pip builds in isolation, that of its own environment."""
    paths = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path]
    for dist in importlib.metadata.distributions(name="jaxlib", path=paths):
        include = Path(dist.locate_file("jaxlib/include"))
        if (include / "xla" / "ffi" / "api" / "ffi.h").exists():
            return include, dist.version
    raise BuildError("jaxlib, whose headers it needs, is not installed yet")


def try_build() -> Path | None:
    """`build`, or None where that can't be; says in one line what came of it."""
    try:
        library = build()
    except BuildError as error:
        print(f"jaxllm: the native CPU kernels are not built, XLA does their work: {error}", file=sys.stderr)
        return None
    print(f"jaxllm: the native CPU kernels are built: {library}")
    return library


def main() -> int:
    """Returns the exit code: 1 if there is no library."""
    return 1 if try_build() is None else 0


if __name__ == "__main__":
    sys.exit(main())
