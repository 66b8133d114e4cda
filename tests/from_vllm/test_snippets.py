"""Common snippets of programs for vLLM, with nothing but the library's name changed: what runs has the meaning that it
has there, and what does not says why."""

import json
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from tests.chat_model import write_model
from tests.from_vllm import construction, interfaces, requests
from tests.from_vllm.snippet import Snippet, execute, kinds

ON_ONE_ENGINE = [
    *requests.PROMPTS,
    *requests.PARAMETERS,
    *requests.OUTPUTS,
    *interfaces.TOKENIZER,
    *interfaces.ENGINE,
    *interfaces.IMPORTS,
]
LEAST_THAT_RUN = 100
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("from_vllm") / "model", max_position_embeddings=512)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "max_new_tokens": 6}))
    return folder


@pytest.fixture(scope="module")
def sizes():
    return dict(dtype="float32", max_model_len=128, max_num_seqs=4)


@pytest.fixture(scope="module")
def shared(model_dir, sizes):
    llm = LLM(model_dir, block_size=16, max_num_batched_tokens=32, **sizes)
    yield llm
    llm.close()


@pytest.fixture
def names(model_dir, sizes, tmp_path, monkeypatch):
    """What snippets find. The engines that they build are closed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "profile"))
    found = {"M": str(model_dir), "SIZES": sizes, "LLM": LLM, "SamplingParams": SamplingParams, "said": said}
    yield found
    for value in found.values():
        if isinstance(value, LLM) and value is not found.get("llm"):
            value.close()


def said(engine: LLM) -> bool:
    """Whether the engine generates."""
    (output,) = engine.generate("ab", SamplingParams(max_tokens=2, ignore_eos=True))
    return len(output.outputs[0].token_ids) == 2


def check(snippet: Snippet, names: dict) -> None:
    if not snippet.error:
        execute(snippet, names)
        assert eval(snippet.check, names), snippet.check
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of which kind is asserted next
        execute(snippet, names)
    assert snippet.error in kinds(caught.value), repr(caught.value)
    assert snippet.message in str(caught.value)


@pytest.mark.parametrize("snippet", ON_ONE_ENGINE, ids=lambda snippet: snippet.name)
def test_on_a_running_engine(snippet, shared, names):
    names["llm"] = shared
    check(snippet, names)
    assert not shared.engine.requests


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(snippet, id=snippet.name, marks=() if snippet.error else pytest.mark.slow)
        for snippet in construction.SNIPPETS
    ],
)
def test_that_build_an_engine(snippet, shared, names):
    names["llm"] = shared
    check(snippet, names)


def test_most_of_them_run():
    snippets = [*construction.SNIPPETS, *ON_ONE_ENGINE]
    assert len(snippets) == len({(snippet.name, snippet.code) for snippet in snippets}) == 152
    num_running = sum(not snippet.error for snippet in snippets)
    assert num_running >= LEAST_THAT_RUN
    assert f"Of {len(snippets)} snippets that are common in programs for it, {num_running} run" in README.read_text()
    assert all(bool(snippet.check) != bool(snippet.error and snippet.message) for snippet in snippets)
