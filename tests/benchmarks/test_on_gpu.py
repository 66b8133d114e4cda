"""`scripts/on_gpu` in its small form on a CPU, what it does about sections that fail, and its arithmetic."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.attention_cases import Batch
from benchmarks.on_gpu import attention, draws, engines, graph, main, markdown, trace
from benchmarks.on_gpu.checks import Checks, compile_all
from benchmarks.on_gpu.floors import H200, sizes_of
from benchmarks.on_gpu.goals import GOALS
from benchmarks.on_gpu.results import Results, SectionResult
from benchmarks.on_gpu.sections import SECTIONS, Section
from jaxllm.aot import thunks
from jaxllm.aot.prepare import find_model
from jaxllm.checkpoint.config import read_config
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.sampling import reference

ROOT = Path(__file__).parents[2]
HERE = "tests.benchmarks.on_gpu_sections"


def test_the_small_form_runs_and_resumes(tmp_path):
    check_small_form(tmp_path, ["machine", "ops", "speed-8b"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_small_form_of_all_sections(tmp_path):
    check_small_form(tmp_path, [section.name for section in SECTIONS])


def check_small_form(tmp_path, names):
    command = [sys.executable, "scripts/on_gpu", "--small", "--out", str(tmp_path), "--only", *names]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = partial(subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True)
    first = run()
    assert first.returncode == 0, first.stdout + first.stderr
    report = json.loads((tmp_path / "on_gpu.json").read_text())
    assert report["small"] and list(report["sections"]) == names
    for name, section in report["sections"].items():
        check_values(name, section["values"])
    text = (tmp_path / "on_gpu.md").read_text()
    assert all(f"| {name} | ok |" in text for name in names) and text.count("not measured") >= len(GOALS)
    assert first.stdout.count("\n") == len(names) + 1, "a line each"

    before = (tmp_path / "on_gpu.json").stat().st_mtime_ns
    start = time.monotonic()
    second = run()
    assert second.returncode == 0 and second.stdout.count("before: ok") == len(names)
    assert (tmp_path / "on_gpu.json").stat().st_mtime_ns == before and time.monotonic() - start < 20


def check_values(name, values):
    if name == "machine":
        assert values["machine"]["platform"] == "cpu" and values["missing_packages"] == []
    elif name in ("attention", "ops"):
        assert len(values["checks"]) >= 3 and all(check["ok"] for check in values["checks"].values())
    elif name == "model":
        assert values["dtypes"]["float32"]["ok"] and values["dtypes"]["float32"]["samplers_agree"]
    elif name.startswith("speed"):
        assert set(values["decode"]) == {"1", "8"} and values["prefill"]["40"] > 0
        assert all(row["step_ms"] > 0 and 16 < row["context"] < 64 for row in values["decode"].values())
    elif name == "attention-speed":
        assert values["decode"]["2x32"]["us"] > 0 and values["prefill"]["32"]["flops_per_s"] > 0
    elif name == "graph":
        assert values["compiled"] == {} and set(values["measured"]) == {"1"}, "a CPU has no graphs"
    else:
        assert name == "autotune" and set(values["steps"]["8"]) == {"tuned", "untuned"}


def has_ended(pid):
    """Whether a process ends soon; one that nobody has waited for yet has ended too."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_section_that_fails_is_recorded_and_the_others_run(tmp_path, capsys):
    names = ("failing", "crashing", "hanging", "good")
    sections = [Section(name, f"{HERE}:{name}", 10 if name == "hanging" else 120) for name in names]
    results = main.run(sections, tmp_path, minutes=5, again=False, small=True)
    assert {name: s.status for name, s in results.sections.items()} == dict.fromkeys(names, "failed") | {"good": "ok"}
    found = json.loads((tmp_path / main.JSON_NAME).read_text())["sections"]
    assert found["failing"]["summary"] == "exit code 1: ValueError: three of four kernels are wrong"
    assert found["failing"]["values"] == {"before": 1}
    assert found["crashing"]["summary"].startswith("exit code -11") and found["crashing"]["values"] == {"before": 2}
    assert found["hanging"]["summary"].startswith("stopped after 10 s") and found["hanging"]["values"]["before"] == 3
    assert has_ended(found["hanging"]["values"]["child"]), "what it started ends with it"
    assert found["good"] == found["good"] | {"summary": "all is well", "values": {"small": True, "pid": 0}}
    assert "| crashing | failed |" in (tmp_path / main.MARKDOWN_NAME).read_text()

    capsys.readouterr()
    main.run(sections, tmp_path, minutes=5, again=False, small=True)
    assert capsys.readouterr().out.count("before: ") == 4
    (again,) = main.run(sections[:1], tmp_path / "x", minutes=5, again=True, small=True).sections.values()
    assert again.status == "failed"
    with pytest.raises(ValueError, match="small=True, this one has small=False; give another --out"):
        main.run(sections, tmp_path, minutes=5, again=False, small=False)


def test_what_the_time_does_not_reach_is_left_for_the_next_run(tmp_path, capsys):
    hanging, good = Section("hanging", f"{HERE}:hanging", 12), Section("good", f"{HERE}:good", 120)
    results = main.run([hanging, good], tmp_path, minutes=5 / 60, again=False, small=True)
    assert results.sections["hanging"].status == "cut" and "good" not in results.sections
    assert "good             not started" in capsys.readouterr().out
    results = main.run([good], tmp_path, minutes=5, again=False, small=True)
    assert results.is_done("good") and not results.is_done("hanging")


def test_exit_codes(tmp_path, capsys):
    done = Results(tmp_path / main.JSON_NAME, small=True)
    for section in SECTIONS:
        done.put(section.name, SectionResult("ok", 1.0))
    assert main.main(["--out", str(tmp_path), "--small"]) == 0
    assert main.main(["--out", str(tmp_path)]) == 2 and "give another --out" in capsys.readouterr().err
    done.put("ops", SectionResult("failed", 1.0, "wrong"))
    assert main.main(["--out", str(tmp_path), "--small"]) == 1
    assert main.main(["--out", str(tmp_path), "--small", "--only", "machine"]) == 0
    done.put("ops", SectionResult("cut", 1.0))
    assert main.main(["--out", str(tmp_path), "--small", "--minutes", "0"]) == 1
    assert "left, for another run: ops" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "decodes", "prompts"),
    [
        ("llama-3.1-8b", {1: 3.52, 8: 3.74, 64: 5.49, 256: 12.85}, {1024: 18.4, 8192: 167, 32768: 935}),
        ("qwen3-0.6b", {1: 0.30, 8: 0.50, 64: 2.03, 256: 7.38}, {1024: 1.3, 8192: 18.9, 32768: 192}),
    ],
)
def test_floors(model, decodes, prompts):
    """Of one H200 at a context of 1024, in ms."""
    sizes = sizes_of(read_config(find_model(model), "bfloat16").cfg)
    for batch, ms in decodes.items():
        assert sizes.decode_s(batch, 1024, H200) * 1e3 == pytest.approx(ms, abs=0.006)
    for tokens, ms in prompts.items():
        assert sizes.prefill_s(tokens, H200) * 1e3 == pytest.approx(ms, rel=0.02)


def test_goals_beside_what_was_measured(tmp_path):
    results = Results(tmp_path / "x.json", small=False)
    busy = {"window_s": 1, "idle_share": 0.02, "gap_share": 0, "kernels": 1, "kernels_per_step": 400}
    blind = busy | {"kernels_per_step": 1, "idle_share": 0.9}
    rows = {"1": {"step_ms": 5.0, "busy": busy}, "64": {"step_ms": 6.0, "busy": blind}, "256": {"skipped": "too large"}}
    results.put("speed-8b", SectionResult("ok", 1.0, values={"decode": rows, "prefill": {"8192": 220.0}}))
    prefill = {"8192": {"us": 1, "flops_per_s": 400e12}}
    results.put("attention-speed", SectionResult("failed", 1.0, values={"prefill": prefill}))
    lines = {line.split(" | ")[0]: line for line in markdown.document(results).splitlines()}
    assert "| 5 | 0.94 | no |" in lines["| 8B, decode at 1, ms"]
    assert "| 6 | 1.22 | stretch |" in lines["| 8B, decode at 64, ms"]
    assert "not measured" in lines["| 8B, decode at 256, ms"] and "not measured" in lines["| 0.6B, decode at 1, ms"]
    assert "| 220 | 1.16 | must |" in lines["| 8B, prompt of 8k, first token, ms"]
    assert "| 400 | 0.80 | no |" in lines["| attention, prompt of 8k, TFLOP/s"]
    assert "| 2 | 1.50 | must |" in lines["| device idle while decoding, %"], "a trace that saw no kernels says nothing"


def test_idle_shares():
    us = 1000
    busy = trace.busy_of([(0, 10 * us), (5 * us, 20 * us), (21 * us, 50 * us), (80 * us, 100 * us)])
    assert (busy.idle_share, busy.gap_share, busy.kernels) == (0.3, 0.01, 4)


def test_counts_of_a_graph_go_into_json():
    listed = thunks.parse("0: kCommandBuffer\n  0: kKernel\n  1: kKernel\n  2: kGemm\n")
    assert json.loads(json.dumps(graph.counts_of(listed))) == {
        "launches": 3,
        "command_buffers": 1,
        "outer": 1,
        "kinds": {"kCommandBuffer": 1, "kKernel": 2, "kGemm": 1},
    }


def test_graph_updates_in_a_log():
    log = """\
I0101 00:00:00.1 7 command_executor.cc:512] Updated 520 commands in 310 us (skipped 12)
I0101 00:00:00.1 7 command_executor.cc:512] Updated 4 commands in 2 us (skipped 0)
I0101 00:00:00.1 7 command_buffer_thunk.cc:9] Updated command buffer in 20 μs; num_commands=524
I0101 00:00:00.1 7 command_buffer_thunk.cc:8] Execute 0xf00 on device #0
W0101 00:00:00.1 7 other.cc:8] Updated 3 commands
"""
    assert graph.updates(log, 2) == {
        "command_executor": {"updates": 1.0, "commands": 262.0, "us": 156.0, "skipped": 6.0},
        "command_buffer_thunk": {"updates": 0.5, "commands": 262.0, "us": 10.0, "skipped": 0.0},
    }
    assert graph.updates("nothing", 2) == {}
    assert graph.kinds_of_lines(log, 2)["Updated # commands in # us (skipped #)"] == 1.0
    assert graph.kinds_of_lines(log, 2)["Execute # on device ##"] == 0.5
    assert graph.stderr_of(lambda: os.write(2, b"said by a library")) == "said by a library"


class Recorded(dict):
    def __call__(self, name, value):
        self[name] = value


def test_one_wrong_kernel_fails_the_section_after_all_have_run():
    record = Recorded()
    checks = Checks(record)

    def wrong():
        raise AssertionError("differs\n by 3")

    checks.run("first", wrong)
    checks.run("second", lambda: {"error": 0.5})
    assert record["checks"] == {
        "first": {"ok": False, "error": "AssertionError: differs by 3"},
        "second": {"ok": True, "error": 0.5},
    }
    with pytest.raises(kernels.WrongResultError, match="1 of 2 wrong: first"):
        checks.summary()


def test_a_kernel_that_does_not_compile_fails_alone():
    def broken():
        raise ValueError("no such layout")

    waits = compile_all({"broken": broken})
    with pytest.raises(ValueError, match="no such layout"):
        waits["broken"]()


def test_wrong_attention_is_found():
    case = attention.SMALL_CASES["decode"]
    batch = Batch(case, attention.contents(case, 0))
    out, pool = batch.expected()
    right = out.astype(batch.q.dtype), pool
    attention.check(Placement.default(), case, [batch], lambda: lambda *_, **__: right)
    nearly = np.where(np.arange(len(out))[:, None, None] == 2, out * 1.2, out).astype(batch.q.dtype), pool
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        attention.check(Placement.default(), case, [batch], lambda: lambda *_, **__: nearly)
    moving = iter([right, right, (right[0] + right[0].dtype.type(0.001), pool), right, right])
    with pytest.raises(kernels.WrongResultError, match="several results"):
        attention.check(Placement.default(), case, [batch], lambda: lambda *_, **__: next(moving))


@pytest.mark.parametrize("name", attention.CASES)
def test_batches_of_the_device_s_cases_are_whole(name):
    """Full ones and half ones, as `Batch` wants them: decodes first, no more tokens than there are."""
    case = attention.CASES[name]
    for seed in (0, 1):
        decodes, q_lens, kv_lens, _, _ = attention.contents(case, seed)
        assert q_lens[:decodes] == [1] * decodes and sum(q_lens) <= case.tokens
        assert all(1 <= q_len <= kv_len <= case.max_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True))
        assert seed or (len(q_lens), max(kv_lens)) == (case.seqs, case.max_len)


@pytest.mark.parametrize("filters", draws.FILTERS)
def test_wrong_draws_are_found(filters):
    rows, vocab = 8, 500
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    columns = draws.columns_of(filters, rows)
    keys = rng.integers(0, 2**32, size=(rows, 2), dtype=np.uint32)
    tokens = np.array(reference.draw(*map(jnp.asarray, (logits, *columns, keys))).tokens)
    assert draws.check_draws(tokens, logits, columns, keys) == 0
    for row in range(rows):
        other = tokens.copy()
        other[row] = np.argmin(logits[row])
        with pytest.raises(kernels.WrongResultError, match=f"row {row}: token"):
            draws.check_draws(other, logits, columns, keys)


def test_limits_of_filters():
    scaled = np.log(np.array([0.1, 0.4, 0.3, 0.1, 0.1])) - np.log(0.4)
    at = partial(draws.limit_of, scaled)
    assert at(0, 1.0, 0.0) == scaled[0] and at(2, 1.0, 0.0) == scaled[2] and at(1, 1.0, 0.0) == 0
    assert at(3, 1.0, 0.0) == scaled[0], "ties are kept"
    assert at(0, 0.6, 0.0) == scaled[2] and at(0, 0.3, 0.0) == 0 and at(0, 1.0, 0.5) == scaled[2]
    assert at(2, 0.5, 0.0) == 0, "of what top-k leaves"


def test_few_executables_are_compiled():
    with engines.few_executables((1, 5), compiled=(1,)) as jobs:
        assert engines.encoder.token_ladder(8) == engines.lowering.token_ladder(8) == (1, 5) and jobs == {}
        assert engines.encoder.sample_ladder(8) == engines.lowering.sample_ladder(8) == (1, 5)
    assert engines.encoder.token_ladder(8) == engines.lowering.token_ladder(8) == (1, 8)


def test_no_section_outlasts_ten_minutes():
    """The most that one command may take on some machines."""
    assert all(section.limit_s < 600 for section in SECTIONS)
    assert replace(SECTIONS[0], limit_s=8).least_s() == 2
