"""What takes a model takes its name."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.cli import serve
from jaxllm.cli.common import add_engine_arguments, located_kwargs
from jaxllm.cli.main import COMMANDS
from jaxllm.cli.parser import CommandParser
from jaxllm.hub.locate import locate

ROOT = Path(__file__).parents[2]
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=32, num_blocks=32, block_size=8)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_llm(hub):
    with LLM("org/tiny", revision="main", **SIZES) as llm:
        (by_name,) = llm.generate("Hi", PARAMS, use_tqdm=False)
    with LLM(locate("org/tiny"), **SIZES) as llm:
        (by_path,) = llm.generate("Hi", PARAMS, use_tqdm=False)
    assert by_name.outputs[0].token_ids == by_path.outputs[0].token_ids and len(by_name.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="revision='v2' is for names"):
        LLM(locate("org/tiny"), revision="v2")


def test_async_llm(hub, tmp_path):
    async def run():
        llm = AsyncLLM("org/tiny", download_dir=tmp_path / "mine", **SIZES)
        try:
            return [output async for output in llm.generate("Hi", PARAMS)][-1]
        finally:
            llm.close()

    assert len(asyncio.run(run()).outputs[0].token_ids) == 4
    assert (tmp_path / "mine/models--org--tiny").is_dir()


def test_generate(hub, cache):
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxllm", "generate", "Hi", "--model", "org/tiny", "--max-tokens", "2"]
    command += ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--num-blocks", "16", "--no-echo"]
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"org/tiny is commit {hub.repos['org/tiny'].refs['main']}" in done.stderr and "[2 tokens" in done.stderr


@pytest.mark.parametrize(("options", "names"), [([], ("org/tiny",)), (["--served-model-name", "mine"], ("mine",))])
def test_serve(hub, monkeypatch, options, names):
    served = []

    async def fake(config, options, traces):
        served.append((config.served_model_names, options))
        return 0

    monkeypatch.setattr(serve, "_serve", fake)
    assert serve.main(["--model", "org/tiny", "--revision", "main", *options]) == 0
    ((found, given),) = served
    snapshot = str(locate("org/tiny"))
    assert found == names and given["model"] == snapshot and "revision" not in given


def test_bench_of_dummy_weights_fetches_no_weights(hub):
    parser = CommandParser("jaxllm bench")
    add_engine_arguments(parser)
    arguments = parser.parse_args(["--model", "org/tiny", "--dtype", "float32"])
    assert located_kwargs(arguments, weights=False) == {
        "model": str(locate("org/tiny", weights=False)),
        "dtype": "float32",
    }
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def completed(line: str, cache: Path, tmp_path: Path) -> list[str]:
    """What the shell is told after `line` and a TAB."""
    out = tmp_path / "told"
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "HF_HUB_CACHE": str(cache)}
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(out), "PYTHONPATH": str(ROOT), "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", "jaxllm"], env=os.environ | variables, cwd=tmp_path, check=True)
    return [word.strip() for word in out.read_text().split("\n")]


def test_the_shell_completes_commands_and_names_in_the_cache(hub, cache, tmp_path):
    locate("org/tiny")
    assert completed("jaxllm m", cache, tmp_path) == ["models"]
    assert set(COMMANDS) <= set(completed("jaxllm ", cache, tmp_path))
    for line in (
        "chat --model o",
        "chat o",
        "serve --port 1 o",
        "run-batch --model o",
        "models rm o",
        "bench latency --model o",
    ):
        assert completed(f"jaxllm {line}", cache, tmp_path) == ["org/tiny"]
    assert {"smollm2", "org/tiny", "cache/"} <= set(completed("jaxllm serve --model ", cache, tmp_path))
    assert completed("jaxllm generate --model x --max-num-s", cache, tmp_path) == ["--max-num-seqs"]
