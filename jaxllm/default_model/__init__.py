"""The model that is served when none is named: a small one that the package brings."""

from pathlib import Path

DEFAULT_MODEL = Path(__file__).parent
