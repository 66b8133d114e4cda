"""The benchmark command: its workloads, its arithmetic, its reports. No test asserts a time."""

import contextlib
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxllm.bench import latency, options, startup, throughput
from jaxllm.bench.workload import WorkloadRequest
from jaxllm.cli import bench
from jaxllm.errors import JaxLLMError, ModelFormatError
from jaxllm.outputs import CompletionOutput, RequestOutput
from tests.checkpoints import HF, write_config

ROOT = Path(__file__).parents[2]
CONFIG = HF | {"max_position_embeddings": 256}
ENGINE = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 16, "num_blocks": 64}
ABOUT = {
    "machine": {"device_kind": "chip", "device_count": 8, "cpu": "cpu", "cores": 2, "python": "3", "jax": "0"},
    "model": {"name": "model", "parameters": 33_600_000, "dtype": "float32", "dummy_weights": True},
    "engine": {"mesh": {"data": 2, "tensor": 2}},
}
HEADING = "model (dummy weights, 33.6M parameters, float32) on 4 of 8 chip, cpu with 2 cores, Python 3, JAX 0"


class FakeLLM:
    """Generates at once what it was asked for, less `missing` tokens. `log` is what was done, in order."""

    def __init__(self, *, missing: int = 0, cached: int = 0, preempted: int = 0):
        self.missing, self.cached, self.preempted = missing, cached, preempted
        self.log: list = []
        self.engine = SimpleNamespace(scheduler=self)

    def forget_keys(self):
        self.log.append("forget")

    def stats(self):
        runs = sum(entry != "forget" for entry in self.log)
        return SimpleNamespace(num_cached_tokens=self.cached * runs, num_preemptions=self.preempted * runs)

    def generate(self, prompts, params, *, use_tqdm):
        self.log.append([(p["prompt_token_ids"], s.n, s.temperature) for p, s in zip(prompts, params, strict=True)])
        assert all(s.ignore_eos and not s.detokenize for s in params)
        return [output(*[s.max_tokens - self.missing] * s.n) for s in params]

    def stream(self, prompts, params):
        """Two requests, the second one late and with two tokens in its last update."""
        assert params.temperature == 0.0 and params.ignore_eos and not params.detokenize
        self.log.append([p["prompt_token_ids"] for p in prompts])
        for index, length in ((0, 1), (0, 2), (1, 1), (0, 3), (1, 3 - self.missing)):
            yield index, output(length)


def output(*lengths: int) -> RequestOutput:
    completions = [CompletionOutput(index=i, token_ids=[7] * length) for i, length in enumerate(lengths)]
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=[], outputs=completions)


def clock_of(*durations: float):
    """A clock that is read twice a run, these seconds apart."""
    readings = iter([t for duration in durations for t in (100.0, 100.0 + duration)])
    return lambda: next(readings)


ITEMS = [WorkloadRequest([11, 12, 13], 8), WorkloadRequest([14], 4, n=3)]


def test_a_row_is_the_median_run_and_the_best():
    llm = FakeLLM(cached=5, preempted=2)
    ticks = itertools.count()
    row = throughput.measure(
        llm, "kind", ITEMS, ITEMS[:1], 3, tick=lambda: next(ticks), clock=clock_of(99.0, 4.0, 2.0, 8.0)
    )
    assert row == {
        "kind": "kind",
        "requests": 2,
        "prompt_tokens": 4,
        "output_tokens": 20,
        "wall_s": 4.0,
        "best_wall_s": 2.0,
        "output_tokens_per_s": 5.0,
        "best_output_tokens_per_s": 10.0,
        "total_tokens_per_s": 6.0,
        "cached_tokens": 5,
        "preemptions": 2,
    }
    whole = [([11, 12, 13], 1, 0.0), ([14], 3, 1.0)]
    assert llm.log == ["forget", whole[:1], "forget", whole, "forget", whole, "forget", whole]
    assert next(ticks) == 4


def test_the_slower_of_two_runs_is_their_median():
    row = throughput.measure(FakeLLM(), "kind", ITEMS, ITEMS, 2, clock=clock_of(1.0, 4.0, 2.0))
    assert (row["wall_s"], row["best_wall_s"]) == (4.0, 2.0)


def test_a_request_that_ends_early_is_no_measurement():
    with pytest.raises(JaxLLMError, match=r"1 x 8 tokens made \[7\]"):
        throughput.measure(FakeLLM(missing=1), "kind", ITEMS, ITEMS, 1)


def test_throughput_table():
    row = throughput.measure(FakeLLM(cached=7), "mixed", ITEMS, ITEMS, 1, clock=clock_of(1.0, 4.0))
    lines = throughput.table(ABOUT | {"options": {"repeats": 1}, "results": [row]}).splitlines()
    assert lines[0] == HEADING
    assert lines[1].split()[:5] == ["kind", "requests", "prompt", "output", "wall"]
    assert lines[2].split() == ["mixed", "2", "4", "20", "4.000", "4.000", "5.0", "5.0", "6.0", "7", "0"]
    assert lines[3].endswith("best of 1")


def test_latency_counts_from_handing_in_to_each_update():
    llm = FakeLLM()
    clock = iter([10.0, 10.5, 10.6, 11.0, 11.1, 13.0])
    times = latency.stream_once(llm, [[11], [12]], 3, clock=lambda: next(clock))
    assert times.first == pytest.approx([0.5, 1.0])
    assert times.pauses == pytest.approx([0.1, 0.5, 2.0])
    assert times.whole == pytest.approx([1.1, 3.0])
    assert llm.log == ["forget", [[11], [12]]]


def test_a_stream_that_ends_early_is_no_measurement():
    with pytest.raises(JaxLLMError, match=r"requests for 3 tokens made \[3, 2\]"):
        latency.stream_once(FakeLLM(missing=1), [[11], [12]], 3)


def test_latency_quantiles_and_table():
    times = latency.Times(first=[0.001 * i for i in range(101)], pauses=[], whole=[0.25])
    results = latency.summary(times)
    assert results["ttft_ms"] == pytest.approx({"median": 50, "p90": 90, "p99": 99, "samples": 101})
    assert results["itl_ms"] is None
    assert results["e2e_ms"] == pytest.approx({"median": 250, "p90": 250, "p99": 250, "samples": 1})
    shape = {"batch_size": 1, "input_len": 5, "output_len": 1, "repeats": 101}
    lines = latency.table(ABOUT | {"options": shape, "results": results}).splitlines()
    assert lines[0] == HEADING and lines[1] == "1 at a time, 5 tokens in, 1 out, 101 repeats; ms"
    assert lines[3].split() == ["first", "token", "50.00", "90.00", "99.00", "101"]
    assert lines[4].split() == ["between", "tokens", "-", "-", "-", "0"]


TELLS_ALL = """
import json, os, pathlib, sys
cache = pathlib.Path(os.environ["XDG_CACHE_HOME"])
print("noise")
for event in ("imported", "ready", "first_token", "compiled"):
    print(event, flush=True)
print("report", json.dumps({"cache": str(cache), "found": len(list(cache.iterdir())), "options": sys.argv[1:]}))
(cache / "executable").touch()
"""


def test_each_repeat_starts_cold_and_then_warm(monkeypatch):
    starts = []

    def start_once(command, cache):
        starts.append(start := real(command, cache))
        return start

    real = startup.start_once
    monkeypatch.setattr(startup, "start_once", start_once)
    report = startup.run({"model": "dir"}, repeats=2, probe=[sys.executable, "-c", TELLS_ALL])
    told = [start.about for start in starts]
    assert [each["found"] for each in told] == [0, 1, 0, 1]
    assert [each["options"] for each in told] == [['{"model": "dir"}']] * 4
    caches = [each["cache"] for each in told]
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert not any(Path(cache).exists() for cache in caches)
    for start in starts:
        assert list(start.seconds) == ["imported", "ready", "first_token", "compiled"]
        assert list(start.seconds.values()) == sorted(start.seconds.values())
    # With two repeats, a median lies halfway.
    for name, part in (("cold", starts[::2]), ("warm", starts[1::2])):
        mean = sum(start.seconds["first_token"] for start in part) / 2
        assert report["results"][name]["first_token_s"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("import sys; sys.exit('a line\\nerror: no model')", JaxLLMError, "exit code 1:\na line\nerror: no model"),
        ("import sys; sys.stderr.write('w\\nerror: no model\\n'); sys.exit(2)", ValueError, "^no model$"),
        ("print('imported'); print('ready')", JaxLLMError, "without reporting first_token, compiled, report"),
    ],
)
def test_a_start_that_fails_is_an_error(tmp_path, script, error, message):
    with pytest.raises(error, match=message):
        startup.start_once([sys.executable, "-c", script], str(tmp_path))


def test_startup_table():
    results = {
        name: {"imported_s": at, "ready_s": at + 1, "first_token_s": at + 2, "compiled_s": at + 3}
        for name, at in (("cold", 10.0), ("warm", 0.5))
    }
    lines = startup.table(ABOUT | {"options": {"repeats": 3}, "results": results}).splitlines()
    assert lines[0] == HEADING
    assert lines[2].split() == ["cold", "10.00", "11.00", "12.00", "13.00"]
    assert lines[3].split() == ["warm", "0.50", "1.50", "2.50", "3.50"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Nothing but a `config.json`."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_config(folder, **CONFIG)
    return folder


@pytest.fixture(scope="module")
def tiny_llm(model_dir):
    llm = options.open_llm(dummy_weights=True, model=str(model_dir), **ENGINE)
    yield llm
    llm.close()


@pytest.fixture
def command(tiny_llm, monkeypatch, capsys):
    """Runs the command on one engine that all tests share; returns exit code, standard output and error."""

    def run(*arguments):
        code = bench.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    for module in (throughput, latency):
        monkeypatch.setattr(module, "open_llm", lambda **_: contextlib.nullcontext(tiny_llm))
    monkeypatch.setattr(bench, "setup_compilation_cache", lambda: None)
    return run


@dataclass(frozen=True)
class Number:
    """Equal to any number in [least, most]."""

    least: float
    most: float = math.inf

    def __eq__(self, other):
        return isinstance(other, int | float) and self.least <= other <= self.most


def report_of(benchmark: str, arguments: dict, results, *, devices: int = 8) -> dict:
    machine = {
        "platform": "cpu",
        "device_kind": "cpu",
        "device_count": devices,
        "cores": Number(1),
        "jax": jax.__version__,
    }
    return {
        "benchmark": benchmark,
        "machine": machine,
        "model": {"name": "tiny", "parameters": Number(1000), "dtype": "float32", "dummy_weights": True},
        "engine": ENGINE | {"max_model_len": 256, "enable_prefix_caching": True, "mesh": {"tensor": 1}},
        "options": arguments,
        "results": results,
    }


def assert_has(report, expected) -> None:
    """Every key of `expected`, and of results no other."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report.pop("date"))
    assert report.keys() == expected.keys()
    for part in ("machine", "engine", "options"):
        assert report[part].items() >= expected[part].items(), part
    for part in ("benchmark", "model", "results"):
        assert report[part] == expected[part]
    assert all(isinstance(report["machine"][name], str) for name in ("cpu", "python", "jaxlib"))


def test_throughput_as_json(command, model_dir):
    code, out, err = command(
        "throughput", "--kinds", "batch1", "--repeats", 2, "--model", model_dir, "--dummy-weights", "--json"
    )
    assert (code, err) == (0, "")
    row = {
        "kind": "batch1",
        "requests": 1,
        "prompt_tokens": 64,
        "output_tokens": 128,
        "wall_s": Number(1e-3),
        "best_wall_s": Number(1e-3),
        "output_tokens_per_s": Number(0.1),
        "best_output_tokens_per_s": Number(0.1),
        "total_tokens_per_s": Number(0.1),
        "cached_tokens": 0,
        "preemptions": 0,
    }
    arguments = {
        "kinds": ["batch1"],
        "scale": 1.0,
        "repeats": 2,
        "seed": 0,
        "vocab": 24,
        "prefix_caching": True,
        "prefix_cache_at_start_of_run": "empty",
    }
    assert_has(json.loads(out), report_of("throughput", arguments, [row]))


def test_latency_as_json(command, model_dir):
    arguments = {"batch_size": 2, "input_len": 5, "output_len": 4, "repeats": 3, "seed": 1}
    given = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, out, err = command("latency", *given, "--model", model_dir / "config.json", "--dummy-weights", "--json")
    assert (code, err) == (0, "")

    def quantiles(samples):
        return {"median": Number(1e-6), "p90": Number(1e-6), "p99": Number(1e-6), "samples": samples}

    results = {"ttft_ms": quantiles(6), "itl_ms": quantiles(18), "e2e_ms": quantiles(6)}
    more = {"vocab": 24, "prefix_caching": True, "prefix_cache_at_start_of_run": "empty"}
    assert_has(json.loads(out), report_of("latency", arguments | more, results))


def test_nothing_is_cached_from_the_run_before(tiny_llm):
    head = [10 + i % 7 for i in range(48)]
    items = [WorkloadRequest([*head, 20], 2), WorkloadRequest([*head, 21, 22], 2)]
    row = throughput.measure(tiny_llm, "prefix", items, items, 2)
    assert row["cached_tokens"] == len(head), "the second request's beginning, and no more"
    row = throughput.measure(tiny_llm, "n3", [WorkloadRequest([*head, 20], 2, n=2)], items, 1)
    assert row["cached_tokens"] == 0, "the second completion shares the prompt of the first without a cache"


BAD = [
    ("throughput --kinds mixed tree", "workload 'tree' is unknown; choose from batch1, mixed, .*"),
    ("throughput --dummy-weights", "--dummy-weights needs a model configuration; .*"),
    ("latency --dummy-weights", "--dummy-weights needs a model configuration; .*"),
    ("startup --dummy-weights", "--dummy-weights needs a model configuration; .*"),
    ("throughput --repeats 0", "--repeats is 0; it must be at least 1.*"),
    ("startup --repeats -1", "--repeats is -1; it must be at least 1.*"),
    ("throughput --scale nan", "--scale is nan; it must be at least 0.*"),
    ("throughput --scale inf", "--scale is inf; it must be at least 0, and finite"),
    ("latency --output-len 0", "--output-len is 0; it must be at least 1.*"),
    ("latency --batch-size 0", "--batch-size is 0; .*"),
]
BAD_FOR_THE_MODEL = [
    ("throughput --kinds batch1 --vocab 10", r"vocab=10 must be in \[11, 24\]: token ids are drawn from 10 on, .*"),
    ("throughput --kinds batch1 --vocab 25", r"vocab=25 must be in \[11, 24\].*"),
    ("throughput --kinds batch1 prefill", "workload prefill has 768 tokens of prompt and 4 of .*=256; .*"),
    ("latency --input-len 250 --output-len 7", "each request has 250 tokens of prompt and 7 of output, more than .*"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_FOR_THE_MODEL)
def test_what_the_model_cannot_do_is_one_line_and_exit_2(command, arguments, message):
    code, out, err = command(*arguments.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(bench, "setup_compilation_cache", pytest.fail)
    assert bench.main(arguments.split()) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.fullmatch(f"error: {message}\n", written.err)


@pytest.mark.parametrize("arguments", [[], ["tree"], ["startup", "--seed", "1"], ["latency", "--input-len", "x"]])
def test_what_cannot_be_parsed_exits_2(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_checkpoint_needs_its_weights_and_a_dummy_does_not(model_dir):
    with pytest.raises(ModelFormatError, match="and no other weights: its download is incomplete"):
        options.open_llm(dummy_weights=False, model=str(model_dir), **ENGINE)


@pytest.mark.slow
def test_a_real_start(model_dir, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # where the started process finds the package
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    engine = "--max-num-seqs 1 --max-num-batched-tokens 1 --block-size 16 --num-blocks 16 --dtype float32"
    arguments = ["startup", "--repeats", "1", "--model", str(model_dir), "--dummy-weights", "--json"]
    assert bench.main([*arguments, *engine.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    row = {f"{event}_s": Number(1e-3) for event in ("imported", "ready", "first_token", "compiled")}
    expected = report_of("startup", {"repeats": 1}, {"cold": row, "warm": row}, devices=1)
    expected["engine"] |= {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_blocks": 16}
    assert_has(report, expected)


def test_a_start_that_cannot_be_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert bench.main(["startup", "--model", str(tmp_path), "--repeats", "1"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.fullmatch("error: .*config.json is missing; .*\n", written.err)
