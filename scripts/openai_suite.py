"""The tests of the `openai` package, run against a server of ours: which pass, and why the others are left out.

    python scripts/openai_suite.py

They are in the package's source distribution, which is downloaded, like what the tests need, into a folder that is
thrown away afterwards. They were written for a server that makes up answers from OpenAI's specification, so that some
send values that no server of models can accept.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("test_completions.py", "test_models.py", "chat/test_completions.py", "test_responses.py")
MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "gpt-5.4", "gpt-4o-mini")  # that the tests ask for
NEEDS = ("pytest", "pytest-asyncio", "rich")
LEFT_OUT = {  # which tests, and why they can't pass
    "create_with_all_params": 'sends what is refused: logit_bias {"foo": 0} (no token id), a suffix, '
    "max_completion_tokens 0, audio, functions, web searches, previous_response_id, stored prompts",
    "chat and (_retrieve or _update or _list or _delete)": "chat completions are not stored",
    "test_responses and (_retrieve or _delete or _cancel or _compact)": "responses are not stored",
    "test_models and _delete": "a model can't be deleted by a request",
}
# The tests of responses send nothing at all, which OpenAI's own server refuses too: they get an input.
PLUGIN = """
from openai.resources import responses

def with_input(real):
    def create(self, **fields):
        return real(self, **{"input": "Hi", "model": "gpt-6-astra"} | fields)
    return create

for kind in (responses.Responses, responses.AsyncResponses):
    kind.create = with_input(kind.create)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", help="of the package (default: the newest)")
    parser.add_argument("--all", action="store_true", help="the tests that are left out too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openai-suite-") as folder:
        source = download(Path(folder), arguments.version)
        python = environment(Path(folder), source)
        server, url = serve()
        try:
            return run(python, source, url, everything=arguments.all)
        finally:
            server.terminate()
            server.wait(60)


def download(folder: Path, version: str | None) -> Path:
    """The unpacked source distribution."""
    name = "openai" if version is None else f"openai=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai"]
    subprocess.run([*pip, "--dest", str(folder), name], check=True)
    (archive,) = folder.glob("openai-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def environment(folder: Path, source: Path) -> Path:
    """The interpreter of an environment with the package, as released, and what its tests need."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    version = source.name.removeprefix("openai-")
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"openai[aiohttp]=={version}", *NEEDS], check=True)
    return python


def serve() -> tuple[subprocess.Popen, str]:
    """A server of the embedded model, and its URL."""
    sizes = ["--max-model-len", "192", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    command = [sys.executable, "-m", "jaxllm.serve", "--port", "0", "--served-model-name", *MODELS, *sizes]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return server, f"{found[0]}/v1"
    raise RuntimeError(f"the server did not start (status {server.wait()})")


def run(python: Path, source: Path, url: str, *, everything: bool) -> int:
    (source / "given_input.py").write_text(PLUGIN)
    options = ["-o", "addopts=", "-o", "asyncio_mode=auto", "--tb=short", "-q"]
    pytest = [python, "-m", "pytest", "-p", "given_input", *options]
    if not everything:
        pytest += ["-k", " and ".join(f"not ({part})" for part in LEFT_OUT)]
        for part, reason in LEFT_OUT.items():
            print(f"left out: {part}: {reason}")
    files = [f"tests/api_resources/{name}" for name in FILES]
    return subprocess.run([*pytest, *files], cwd=source, env={"TEST_API_BASE_URL": url}).returncode


if __name__ == "__main__":
    sys.exit(main())
