"""Files of real models, which `.ci/real_files` fetches; what needs one that is not there is skipped."""

import os
from pathlib import Path

import pytest

from tests.real.smollm2 import SMOLLM2

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
    file = real(SMOLLM2)
    model, num_threads = transformers.AutoModelForCausalLM, torch.get_num_threads()
    torch.set_num_threads(1)  # other workers have tests for the other cores, and threads that wait for one take time
    yield model.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def logprobs(smollm2):
    """A function from ids to `[len(ids) - 1, vocab]`: the reference's log-probabilities after each but the last."""
    import torch

    def forward(ids):
        with torch.inference_mode():
            return torch.log_softmax(smollm2(torch.tensor([ids])).logits[0, :-1].double(), -1).numpy()

    return forward


@pytest.fixture(scope="session")
def greedy_tokens(smollm2):
    """A function from a prompt and its continuation to the token that the reference takes at each place, which are
    the reference's own greedy tokens if all are those of the continuation: one pass where generating takes one each."""
    import torch

    def tokens(prompt, continuation):
        ids = torch.tensor([[*prompt, *continuation]])
        with torch.inference_mode():
            return smollm2(ids, logits_to_keep=len(continuation) + 1).logits[0, :-1].argmax(-1).tolist()

    return tokens
