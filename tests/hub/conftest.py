import types
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from tests.chat_model import write_model
from tests.checkpoints import split_in_two
from tests.fake_hub import FakeHub


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A real repository's layout: what is needed, and what must never be fetched."""
    folder = write_model(tmp_path_factory.mktemp("checkpoint"))
    split_in_two(folder)
    (folder / "LICENSE").write_text("Apache 2.0")
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    never = ("modeling_tiny.py", "pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors")
    return found | {name: name.encode() for name in (*never, "README.md", "onnx/config.json")}


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def environment(monkeypatch, cache, tmp_path) -> None:
    """huggingface_hub reads its variables once, when it is imported."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    values = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_TELEMETRY": True}
    for name, value in (values | {"HF_TOKEN_PATH": str(tmp_path / "no-token")}).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # bytes
    monkeypatch.setattr(file_download, "time", types.SimpleNamespace(sleep=lambda seconds: None))  # before it resumes


@pytest.fixture
def hub(environment, monkeypatch, files):
    """A hub with org/tiny."""
    with FakeHub() as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        fake.add("org/tiny", files)
        yield fake


@pytest.fixture
def offline(monkeypatch):
    """A function that cuts the machine off, as HF_HUB_OFFLINE=1 does."""
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
