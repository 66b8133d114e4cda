"""Executables on disk: found again, never trusted when damaged, never more than fit."""

import os
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.engine.device.executable_store import ExecutableStore, open_store, private_folder
from jaxllm.sharding.mesh import make_mesh


class Lowering:
    """A lowered function that counts how often it is compiled."""

    def __init__(self, function, *shapes, **options):
        self._lowered, self.count = jax.jit(function, **options).lower(*shapes), 0

    def __getattr__(self, name):
        return getattr(self._lowered, name)

    def compile(self, **options):
        self.count += 1
        return self._lowered.compile(**options)


VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)


def add(x, y):
    return {"sum": x + y, "both": [x, y]}


def test_what_is_compiled_once_is_loaded_later(tmp_path):
    compiled = []
    for _ in range(2):
        lowered = Lowering(add, VECTOR, VECTOR)
        compiled.append(ExecutableStore(tmp_path, make_mesh(None)).compile(lowered))
        results = compiled[-1](jnp.arange(4.0), jnp.ones(4))
        np.testing.assert_array_equal(results["sum"], np.arange(4) + 1)
        assert len(results["both"]) == 2
    assert lowered.count == 0 and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(TypeError):
        compiled[1](jnp.arange(5.0), jnp.ones(5))


def test_what_is_compiled_quickly_is_kept_until_there_is_better(tmp_path):
    for is_best, count in ((False, 1), (False, 0), (True, 0)):
        lowered, store = Lowering(add, VECTOR, VECTOR), ExecutableStore(tmp_path, make_mesh(None))
        compiled, is_same = store.compile_quickly(lowered)
        np.testing.assert_array_equal(compiled(jnp.arange(4.0), jnp.ones(4))["sum"], np.arange(4) + 1)
        assert (is_same, lowered.count) == (is_best, count)
        if count == 0 and not is_same:
            store.compile(lowered)
            assert lowered.count == 1 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("where", [False, None])
def test_without_a_store_something_is_compiled_quickly(where):
    with option("jax_enable_compilation_cache", False):
        compiled, is_same = open_store(where, make_mesh(None)).compile_quickly(Lowering(add, VECTOR, VECTOR))
    assert not is_same
    np.testing.assert_array_equal(compiled(jnp.arange(4.0), jnp.ones(4))["sum"], np.arange(4) + 1)


def test_arguments_that_are_not_used_count(tmp_path):
    """The text of the program lacks them, and the executable takes no others."""
    for size in (2, 3):
        unused = jax.ShapeDtypeStruct((size,), jnp.float32)
        first = ExecutableStore(tmp_path, make_mesh(None)).compile(Lowering(lambda x, y: x + 1, VECTOR, unused))
        np.testing.assert_array_equal(first(jnp.zeros(4), jnp.zeros(size)), np.ones(4))


def test_donated_arguments_stay_donated(tmp_path):
    where = NamedSharding(make_mesh(None), P())
    shape = jax.ShapeDtypeStruct((1 << 16,), jnp.float32, sharding=where)
    for _ in range(2):
        step = ExecutableStore(tmp_path, make_mesh(None)).compile(Lowering(lambda x: x + 1, shape, donate_argnums=0))
        given = jax.device_put(jnp.zeros(1 << 16), where)
        address = given.unsafe_buffer_pointer()
        assert step(given).unsafe_buffer_pointer() == address and given.is_deleted()


def test_another_program_or_other_devices_are_another_executable(tmp_path):
    devices = jax.devices()
    for mesh in (Mesh(np.array(devices[:1]), "x"), Mesh(np.array(devices[1:2]), "x"), Mesh(np.array(devices[:2]), "x")):
        where = NamedSharding(mesh, P("x"))
        for function in (lambda x: x + 1, lambda x: x + 2):
            for count in (1, 0):
                lowered = Lowering(function, jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where))
                compiled = ExecutableStore(tmp_path, mesh).compile(lowered)
                assert lowered.count == count
                x = jax.device_put(jnp.zeros(4), where)
                result = compiled(x)
                assert result.sharding == where
                np.testing.assert_array_equal(result, function(np.zeros(4)))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""]
)
def test_a_damaged_file_is_compiled_anew(tmp_path, damage):
    mesh = make_mesh(None)
    ExecutableStore(tmp_path, mesh).compile(Lowering(add, VECTOR, VECTOR))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for count in (1, 0):
        lowered = Lowering(add, VECTOR, VECTOR)
        assert ExecutableStore(tmp_path, mesh).compile(lowered)(jnp.ones(4), jnp.ones(4))["sum"][0] == 2
        assert lowered.count == count


def test_those_used_least_recently_go_first(tmp_path):
    mesh, numbers = make_mesh(None), range(4)

    def compile(i, **options):
        ExecutableStore(tmp_path, mesh, **options).compile(lowered := Lowering(lambda x: x + i, VECTOR))
        return lowered.count

    sizes = {}
    for i in numbers:
        assert compile(i) == 1
        sizes[i] = sum(file.stat().st_size for file in tmp_path.iterdir())
    for age, file in enumerate(sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns, reverse=True)):
        os.utime(file, (1e9 - age, 1e9 - age))
    assert compile(0) == 0  # used just now
    compile(9, max_bytes=sizes[3])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= sizes[3]
    assert compile(0) == 0 and compile(9) == 0 and compile(3) == 0 and compile(1) == 1


def test_constants_count(tmp_path):
    mesh = make_mesh(None)
    for i in range(2):
        table = np.zeros(5000, np.float32)
        table[2500] = i
        lowered = Lowering(lambda x, table=table: x + table[2500 - 4 : 2500][0] + table.sum(), VECTOR)
        assert ExecutableStore(tmp_path, mesh).compile(lowered)(jnp.zeros(4))[0] == i and lowered.count == 1


def test_what_calls_back_into_this_process_is_not_kept(tmp_path):
    lowered = Lowering(lambda x: (jax.debug.print("{}", x), x + 1)[1], VECTOR)
    ExecutableStore(tmp_path, make_mesh(None)).compile(lowered)
    assert lowered.count == 1 and not list(tmp_path.iterdir())


def test_what_another_cache_has_loaded_is_not_written(tmp_path):
    """The runtime drops functions of an executable that it has loaded when that is serialized once more."""

    def step():
        def made(x):
            y = jnp.concatenate([jnp.where(x > 0, x, 0.0), x * 2])
            return jnp.exp(y) + jnp.cumsum(y), jnp.argmax(x)

        return made  # another one each time, or JAX finds what it has compiled in its memory

    mesh, x = make_mesh(None), jnp.arange(4.0)
    own, jaxs = tmp_path / "own", tmp_path / "jax"
    own.mkdir()
    fresh = ExecutableStore(own, mesh)
    with (
        option("jax_persistent_cache_min_compile_time_secs", 0.0),
        option("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        with option("jax_compilation_cache_dir", str(jaxs)):
            for _ in range(2):  # written, then loaded
                fresh.compile(Lowering(step(), VECTOR))
            assert list(jaxs.iterdir()) and not list(own.iterdir())
        Lowering(step(), VECTOR).compile()  # by JAX's cache, which goes on serving when it is configured no more
        for count in (1, 0):
            lowered = Lowering(step(), VECTOR)
            got = ExecutableStore(own, mesh).compile(lowered)(x)
            assert lowered.count == count
            jax.tree.map(np.testing.assert_array_equal, got, jax.jit(step())(x))


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, caplog):
    store = ExecutableStore(tmp_path / "gone", make_mesh(None))
    with caplog.at_level("INFO"):
        compiled = store.compile(Lowering(add, VECTOR, VECTOR))
    assert compiled(jnp.ones(4), jnp.ones(4))["sum"][0] == 2 and "not kept for the next start" in caplog.text


def test_who_may_write_a_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    assert private_folder(folder) == folder and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(ValueError, match=r"can be written by others \(mode 770\), but the code in it runs as you"):
        private_folder(folder)
    with pytest.raises(ValueError, match="can be written by others"):
        open_store(folder, make_mesh(None))


@contextmanager
def option(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def test_which_cache_serves(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh, own = make_mesh(None), tmp_path / "jaxllm" / "executables"

    def files(where):
        open_store(where, mesh).compile(Lowering(add, VECTOR, VECTOR))
        return len(list(own.iterdir())) if own.exists() else None

    assert files(False) is None
    with option("jax_enable_compilation_cache", False):
        assert files(None) is None
    with option("jax_compilation_cache_dir", str(tmp_path / "jax")):
        assert files(None) is None
        with pytest.raises(ValueError, match="JAX has a cache of its own .*leave compilation_cache out"):
            open_store(True, mesh)
    assert files(None) == files(True) == 1
    open_store(tmp_path / "mine", mesh).compile(Lowering(add, VECTOR, VECTOR))
    assert len(list((tmp_path / "mine").iterdir())) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert callable(open_store(None, mesh).compile) and "each start compiles everything" in caplog.text
