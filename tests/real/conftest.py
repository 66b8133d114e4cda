"""Files of real models, which `.ci/real_files` fetches; what needs one that is not there is skipped."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("JAXLLM_REAL_FILES", Path.home() / ".cache" / "jaxllm-ci" / "real"))


@pytest.fixture(scope="session")
def real():
    """A function from a file's or folder's name to its path."""

    def path(name: str) -> Path:
        found = FOLDER / name
        if not found.exists():
            pytest.skip(f"{name} is not in {FOLDER}: run .ci/real_files")
        return found

    return path
