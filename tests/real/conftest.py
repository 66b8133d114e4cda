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


@pytest.fixture(scope="session")
def smollm2(real):
    """SmolLM2 as transformers reads its file, in float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    file = real("smollm2.gguf")
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def reference(smollm2):
    """A function from a prompt's ids and a number of tokens to the greedy continuation, end of sequence included."""
    import torch

    @torch.no_grad()
    def continued(ids, max_new_tokens, **options):
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        sizes = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 2}
        return smollm2.generate(given, attention_mask=mask, **sizes, **options)[0, len(ids) :].tolist()

    return continued
