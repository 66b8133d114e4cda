"""Where commands keep what they compile: where JAX's variable says, or in jaxllm's own folder."""

import os

import jax
import pytest

from jaxllm.cli import common as cli
from jaxllm.engine.device.executable_store import open_store, own_folder
from jaxllm.sharding.mesh import make_mesh


@pytest.fixture
def options(monkeypatch, tmp_path):
    """The JAX options that a command sets, with an empty home directory and environment."""
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: found.update({name: value}))
    return found


def test_jax_keeps_everything_where_its_variable_says(options, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    cli.setup_compilation_cache()
    assert options == {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    assert all(hasattr(jax.config, name) for name in options)


def test_the_environment_wins(options, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://elsewhere")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    cli.setup_compilation_cache()
    assert options == {"jax_persistent_cache_min_entry_size_bytes": -1}
    assert not list(tmp_path.iterdir())


def test_a_place_that_can_not_be_is_said(options, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cli.setup_compilation_cache()
    assert options == {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": False}
    assert "each start compiles everything" in caplog.text


def test_without_the_variable_jax_is_left_alone(options, tmp_path):
    cli.setup_compilation_cache()
    assert not options
    folder = own_folder()
    assert folder == tmp_path / "jaxllm" / "executables"
    for made in (folder, folder.parent):
        assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("xdg", ["", "relative"])
def test_the_cache_is_in_the_home_directory_by_default(options, monkeypatch, tmp_path, xdg):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_folder() == tmp_path / ".cache" / "jaxllm" / "executables"


@pytest.mark.parametrize("folder", ["jaxllm", "jaxllm/executables"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_that_others_can_write_is_refused(options, tmp_path, folder, mode):
    (tmp_path / "jaxllm" / "executables").mkdir(parents=True, mode=0o700)
    (tmp_path / "jaxllm").chmod(0o700)
    (tmp_path / folder).chmod(mode)
    with pytest.raises(
        ValueError, match=rf"{folder} can be written by others \(mode {mode:o}\).*JAX_COMPILATION_CACHE_DIR"
    ):
        open_store(True, make_mesh(None))


def test_a_cache_of_another_user_is_refused(options, monkeypatch, tmp_path):
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(ValueError, match=f"belongs to user {me}, not to you"):
        open_store(True, make_mesh(None))
