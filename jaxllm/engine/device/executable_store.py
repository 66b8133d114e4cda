"""Compiled executables, kept on disk from one start to the next.

JAX has a cache of its own, which is the whole process's: it serves where it is configured. This one is for a library
in somebody's script, whose options stay the caller's.
"""

import contextlib
import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from jaxllm.argument_checks import a_type
from jaxllm.engine.device.compat import QUICKLY, Options
from jaxllm.sharding.mesh import platform_of

log = logging.getLogger(__name__)

MAX_BYTES = 2 << 30
_SUFFIX = ".executable"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class Compilers(NamedTuple):
    """What make a `jax.stages.Compiled` of a `jax.stages.Lowered`."""

    compile: Callable[[Any], Any]
    compile_quickly: Callable[[Any], tuple[Any, bool]]  # as in `CompilePlan`: on a CPU, little of it optimised


class ExecutableStore:
    """Executables in the files of `folder`, up to `max_bytes`; those that were used least recently go first.

    Loading one runs its code, so `folder` must be private (`private_folder`). Files that can't be read or written cost
    time, and no more.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, max_bytes: int = MAX_BYTES):
        self._folder, self._max_bytes = folder, max_bytes
        self._devices = list(mesh.devices.flat)
        self._target = hashlib.sha256(repr(_target(self._devices)).encode()).digest()
        self._num_bytes: int | None = None  # in the folder, as of the first file that is written
        if not _jax_has_cache():
            reset_cache()  # one that was configured before goes on serving otherwise

    def compile(self, lowered: Any) -> Any:
        """The executable of a `jax.stages.Lowered`, from the folder if it is there."""
        return self._get(lowered, self._digest(lowered))

    def compile_quickly(self, lowered: Any) -> tuple[Any, bool]:
        """That of `compile` if it is in the folder, or another that is there sooner; and which it is."""
        digest = self._digest(lowered)
        if digest is not None and (compiled := self._load(self._file(digest), lowered)) is not None:
            return compiled, True
        return self._get(lowered, digest, QUICKLY), False

    def _get(self, lowered: Any, digest: bytes | None, options: Options = None) -> Any:
        if digest is None:
            return lowered.compile(compiler_options=options)
        file = self._file(digest, options)
        compiled = self._load(file, lowered)
        if compiled is None:
            compiled = lowered.compile(compiler_options=options)
            self._save(file, compiled)
        return compiled

    def _file(self, digest: bytes, options: Options = None) -> Path:
        """Where an executable of these options is, or would be."""
        name = hashlib.sha256(digest + repr(options and sorted(options.items())).encode()).hexdigest()
        return self._folder / f"{name}{_SUFFIX}"

    def _digest(self, lowered: Any) -> bytes | None:
        """Of the program and what it is for; None if its executable can't be kept."""
        text = lowered.as_text()
        # What calls back names places in this process's memory. What comes out of another cache can't be written once
        # more: the runtime drops functions of an executable that it has loaded itself.
        if "callback" in text or _jax_has_cache():
            return None
        return hashlib.sha256(self._target + _interface(lowered) + text.encode()).digest()

    def _load(self, file: Path, lowered: Any) -> Any:
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.info("%s can't be read, and is compiled anew: %s", file, error)
            return None
        digest, payload = data[:32], data[32:]
        if hashlib.sha256(payload).digest() != digest:
            log.info("%s is damaged, and is compiled anew", file)
            return None
        try:
            compiled = serialize_executable.deserialize_and_load(
                payload, lowered.in_tree, lowered.out_tree, self._devices[0].client, self._devices
            )
        except Exception as error:  # noqa: BLE001 - the runtime raises what it likes; compiling is always right
            log.info("%s can't be loaded, and is compiled anew: %s", file, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return compiled

    def _save(self, file: Path, compiled: Any) -> None:
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            data = hashlib.sha256(payload).digest() + payload
            self._make_room(len(data))
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as written:
                written.write(data)
            os.replace(written.name, file)
        except Exception as error:  # noqa: BLE001 - not every runtime can serialize; the executable itself is sound
            log.info("an executable is not kept for the next start: %s", error)

    def _make_room(self, num_bytes: int) -> None:
        if self._num_bytes is None:
            self._num_bytes = sum(size for _, size, _ in self._files())
        self._num_bytes += num_bytes
        if self._num_bytes <= self._max_bytes:
            return
        for _, size, file in sorted(self._files(), reverse=True):  # the least recently used one last
            if self._num_bytes <= self._max_bytes:
                break
            file.unlink(missing_ok=True)
            self._num_bytes -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        """Seconds since its last use, bytes and path of each."""
        return [(-(status := file.stat()).st_mtime, status.st_size, file) for file in self._folder.glob(f"*{_SUFFIX}")]


def open_store(where: bool | str | Path | None, mesh: Mesh) -> Compilers:
    """What compile for devices of `mesh`. `where` is a folder, or whether there is one: None is jaxllm's own unless
    JAX has a cache configured or switched off. ValueError for a folder that is not private, or beside JAX's cache."""
    if not isinstance(where, bool | str | Path | None):
        raise ValueError(f"compilation_cache is {a_type(where)}; give a folder, or whether there is one: True or False")
    if where is None:
        options = jax.config.values
        where = not _jax_has_cache() and options["jax_enable_compilation_cache"]
    if jax.process_count() > 1:
        # GPUs' processes would share their trials of kernels, and wait for who compiles in another order.
        options = {"xla_gpu_shard_autotuning": False} if platform_of(mesh) == "gpu" else None
        return _unkept(options)
    if where is False:
        return _unkept()
    if _jax_has_cache():
        raise ValueError(
            f"compilation_cache={where!r} is given, and JAX has a cache of its own "
            f"({jax.config.values['jax_compilation_cache_dir']}), which serves; leave compilation_cache out, or unset "
            "JAX_COMPILATION_CACHE_DIR"
        )
    try:
        folder = own_folder() if where is True else private_folder(Path(where).expanduser())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        log.warning("there is no compilation cache, so that each start compiles everything: %s", error)
        return _unkept()
    store = ExecutableStore(folder, mesh)
    return Compilers(store.compile, store.compile_quickly)


def _unkept(options: Options = None) -> Compilers:
    return Compilers(
        lambda lowered: lowered.compile(compiler_options=options),
        lambda lowered: (lowered.compile(compiler_options=QUICKLY), False),
    )


def _jax_has_cache() -> bool:
    return jax.config.values["jax_compilation_cache_dir"] is not None


def own_folder() -> Path:
    """jaxllm's, created if missing. ValueError as `private_folder`."""
    # The XDG specification ignores relative paths.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = (base if base.is_absolute() else Path.home() / ".cache") / "jaxllm"
    return private_folder(private_folder(home) / "executables")


def private_folder(folder: Path) -> Path:
    """`folder`, created if missing. ValueError if others can write to it: they could run code as this user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        trouble = f"belongs to user {status.st_uid}, not to you (user {os.getuid()})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        trouble = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return folder
    raise ValueError(
        f"the compilation cache {folder} {trouble}, but the code in it runs as you. Remove it, or give another: "
        "compilation_cache=, or JAX_COMPILATION_CACHE_DIR"
    )


def _target(devices: list[Any]) -> tuple[Any, ...]:
    """What an executable depends on besides its program."""
    first = devices[0]
    options = sorted((name, repr(value)) for name, value in jax.config.values.items())
    flags = [os.environ.get(name, "") for name in _FLAGS]
    version = jax.__version__, jaxlib.version.__version__, first.client.platform_version
    return version, first.device_kind, [device.id for device in devices], _processor(), flags, options


def _interface(lowered: Any) -> bytes:
    """The arguments and results, of which the text lacks those that are not used: an executable checks them all."""
    given = [(one.shape, str(one.dtype), one.donated) for one in jax.tree.leaves(lowered.args_info)]
    return hashlib.sha256(repr((given, lowered.in_tree, lowered.out_tree)).encode()).digest()


def _processor() -> str:
    """The instruction sets of this machine, which code for CPUs is made for."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    return f"{platform.machine()} {platform.processor()}"
