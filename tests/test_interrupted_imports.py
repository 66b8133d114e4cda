"""Ctrl-C while modules are imported, or JAX traces: commands end with its status."""

import asyncio
import signal
import sys
import time
import types
from importlib import import_module
from importlib.util import find_spec

import pytest

from jaxllm import interrupts
from jaxllm.cli.common import run_command
from jaxllm.interrupts import HeldSignals, WholeImports, asyncios_interrupts
from tests.test_interrupts import press_ctrl_c

FLAT_TREES = "jax._src.flattree" if find_spec("jax._src.flattree") else "jax._src.tree_util"
noted: list[str] = []  # by modules that are imported here


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Imports a module that does what it is given before it notes that it is whole."""

    def load(body: str) -> None:
        sys.modules.pop("with_ctrl_c", None)
        (tmp_path / "with_ctrl_c.py").write_text(
            f"from tests.test_interrupted_imports import noted, press_ctrl_c\n{body}\nnoted.append('whole')\n"
        )
        import_module("with_ctrl_c")

    monkeypatch.syspath_prepend(tmp_path)
    noted.clear()
    yield load
    sys.modules.pop("with_ctrl_c", None)


def test_an_import_is_finished_first(load):
    handler = signal.getsignal(signal.SIGINT)
    for then in (lambda: time.sleep(10), lambda: 0, lambda: {}["a bug"]):
        noted.clear()
        start = time.monotonic()
        assert run_command(lambda then=then: [load("press_ctrl_c()"), then()][1]) == 130
        assert noted == ["whole"] and time.monotonic() - start < 5
        assert signal.getsignal(signal.SIGINT) is handler


def test_a_backend_of_jax_is_not_left_half_made(monkeypatch):
    """With which the end of Python would hang, or wait a minute."""
    xla_bridge = import_module("jax._src.xla_bridge")
    made = types.SimpleNamespace(device_count=lambda: 1, platform="fake", process_index=lambda: 0)
    made.local_devices = made.devices = lambda: []

    def factory():
        press_ctrl_c()
        noted.append("whole")
        return made

    registration = types.SimpleNamespace(experimental=False, factory=factory)
    monkeypatch.setitem(xla_bridge._backend_factories, "fake", registration)
    noted.clear()
    with pytest.raises(KeyboardInterrupt), WholeImports():
        xla_bridge._init_backend("fake")
        time.sleep(10)
    assert noted == ["whole"]


def test_the_repetition_of_one_that_was_dropped_is_not_dropped(monkeypatch):
    """It comes while the hook still starts the thread that repeats it."""

    class Finalized:
        def __del__(self):
            raise KeyboardInterrupt

    later = interrupts._press_later

    def at_once(delay_s, press=None):
        return press_ctrl_c() if press is None else later(delay_s, press)

    monkeypatch.setattr(interrupts, "_press_later", at_once)

    def command():
        Finalized()
        time.sleep(10)

    start = time.monotonic()
    assert run_command(command) == 130 and time.monotonic() - start < 5


def test_jax_has_the_functions_that_are_not_broken_off():
    xla_bridge = import_module("jax._src.xla_bridge")
    found = [
        xla_bridge._init_backend,
        xla_bridge.discover_pjrt_plugins,
        import_module("jax._src.lib")._xla_gc_callback,
        import_module(FLAT_TREES).FlatTree.paths.func,
        import_module("jax._src.util").HashableWrapper.__init__,
        import_module("jax._src.api")._is_ref,
        import_module("jax._src.lax.lax").broadcast_shapes,
        import_module("jax._src.core").is_constant_dim,
    ]
    assert {function.__code__.co_qualname for function in found} == interrupts._OF_JAX
    assert all(interrupts._JAX in function.__code__.co_filename for function in found)


def test_ctrl_c_is_not_dropped_while_jax_traces(monkeypatch):
    lax = import_module("jax._src.lax.lax")
    real = lax._broadcast_shapes_cached
    monkeypatch.setattr(lax, "_broadcast_shapes_cached", lambda *shapes: [press_ctrl_c(), real(*shapes)][1])

    def command():
        lax.broadcast_shapes((1, 3), (2, 1))
        time.sleep(10)

    assert run_command(command) == 130


def test_an_import_is_not_waited_for_by_a_second_one(load):
    assert run_command(lambda: load("press_ctrl_c(2)")) == 130
    assert noted == []
    with pytest.raises(KeyboardInterrupt), WholeImports():
        press_ctrl_c()


def test_imports_around_the_command_are_not_waited_for(load):
    body = "from jaxllm.interrupts import WholeImports\nwith WholeImports():\n    press_ctrl_c()"
    with pytest.raises(KeyboardInterrupt):
        load(body)


def test_where_ctrl_c_is_held_or_ignored_imports_change_nothing(load):
    with HeldSignals(signal.SIGINT) as held, WholeImports():
        load("press_ctrl_c()")
        assert held.signal == signal.SIGINT, "at once"
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with WholeImports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_asyncio_makes_a_cancellation_of_it(load):
    async def work():
        try:
            load("press_ctrl_c()")
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            noted.append("cancelled")
            raise

    def command():
        with asyncios_interrupts():
            asyncio.run(work())

    assert run_command(command) == 130
    assert noted == ["whole", "cancelled"]
