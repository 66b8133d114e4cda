"""What blocks of the documents name and no test has: models of the hub, and a server."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.default_model import DEFAULT_MODEL
from tests.fake_server import running

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")
CLASSIFIERS = {"BAAI/bge-reranker-v2-m3": 1, "path/to/a-classifier": 3}  # and their labels
URL = "http://127.0.0.1:8000/"


def make_models(folder: Path, text: str) -> None:
    """Those that `text` names, as paths under `folder`, which come before names of the hub."""
    for name in [*MODELS, *CLASSIFIERS]:
        if f'LLM("{name}"' not in text:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in MODELS:
            path.symlink_to(DEFAULT_MODEL)
        else:
            _make_classifier(path, CLASSIFIERS[name])


def _make_classifier(path: Path, labels: int) -> None:
    pytest.importorskip("torch")
    from tests.engine.test_encoders import write_tokenizer
    from tests.models.test_encoders import ENCODER, save

    save(path, "BertForSequenceClassification", ENCODER, num_labels=labels)
    write_tokenizer(path)


@contextlib.contextmanager
def served(text: str) -> Iterator[str]:
    """A block's text, whose server runs if it names one."""
    if URL not in text:
        yield text
        return
    with running(api_keys=("KEY",)) as web:
        yield text.replace(URL, f"http://127.0.0.1:{web.port}/")
