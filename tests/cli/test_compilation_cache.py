import os

import jax
import pytest

from jaxllm.cli import common as cli


@pytest.fixture
def options(monkeypatch, tmp_path):
    """The JAX options that a command sets, with an empty home directory and environment."""
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: found.update({name: value}))
    return found


def test_the_cache_is_private_bounded_and_stores_everything(options, tmp_path):
    cli.setup_compilation_cache()
    folder = tmp_path / "jaxllm" / "xla"
    assert options == {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": 2 * 2**30,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for made in (folder, folder.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    cli.setup_compilation_cache()


def test_jax_knows_the_options(options):
    cli.setup_compilation_cache()
    for name in options:
        assert hasattr(jax.config, name)


def test_the_environment_wins(options, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://elsewhere")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    cli.setup_compilation_cache()
    assert options == {"jax_persistent_cache_min_entry_size_bytes": -1}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("xdg", ["", "relative"])
def test_the_cache_is_in_the_home_directory_by_default(options, monkeypatch, tmp_path, xdg):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.cache_dir() == tmp_path / ".cache" / "jaxllm" / "xla"


@pytest.mark.parametrize("folder", ["jaxllm", "jaxllm/xla"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_that_others_can_write_is_refused(options, tmp_path, folder, mode):
    (tmp_path / "jaxllm" / "xla").mkdir(parents=True, mode=0o700)
    (tmp_path / "jaxllm").chmod(0o700)
    (tmp_path / folder).chmod(mode)
    with pytest.raises(
        ValueError, match=rf"{folder} can be written by others \(mode {mode:o}\).*JAX_COMPILATION_CACHE_DIR"
    ):
        cli.setup_compilation_cache()
    assert not options


def test_a_cache_of_another_user_is_refused(options, monkeypatch, tmp_path):
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(ValueError, match=f"belongs to user {me}, not to you"):
        cli.setup_compilation_cache()


def test_without_a_place_for_the_cache_the_command_runs_without(options, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cli.setup_compilation_cache()
    assert not options
    assert "each start compiles everything" in caplog.text
