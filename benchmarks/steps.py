"""What a decode step costs the host: everything but the wait for the device.

A tiny model keeps the device out of the way. On a CPU it still computes on the same cores, so the host's processor
time is given beside the wall time.
"""

import statistics
import time
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxllm.llm import LLM
from jaxllm.models import llama
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.sampling_params import SamplingParams


def tiny_model() -> llama.Model:
    cfg = llama.Config(
        vocab=512,
        embed=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp=32,
        layers=(LayerSpec(rope=Rope(theta=1e4)),) * 2,
        max_len=1024,
        dtype=jnp.float32,
    )
    return llama.Model(cfg, rngs=nnx.Rngs(params=0))


def measure(running: list[int], steps: int) -> list[dict[str, Any]]:
    """Medians over `steps` decode steps with each number of running requests."""
    most = max(running)
    with LLM(tiny_model(), max_num_seqs=most, max_num_batched_tokens=max(512, most)) as llm:
        llm.wait_compiled()
        return [_measure_one(llm, n, steps) for n in running]


def _measure_one(llm: LLM, running: int, steps: int) -> dict[str, Any]:
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=steps + 32, ignore_eos=True, detokenize=False)
    for i in range(running):
        engine.add([1 + i % 500] * 16, params, request_id=f"steps-{i}")
    waits: list[tuple[float, float]] = []  # wall and processor seconds of each wait for the device
    collect = engine.runner.collect

    def timed_collect(handle):
        start = time.perf_counter(), time.thread_time()
        tokens = collect(handle)
        waits.append((time.perf_counter() - start[0], time.thread_time() - start[1]))
        return tokens

    engine.runner.collect = timed_collect
    for _ in range(16):  # past the prefill
        engine.step()
    wall, cpu = [], []
    for _ in range(steps):
        start = time.perf_counter(), time.thread_time()
        engine.step()
        wall.append(time.perf_counter() - start[0] - waits[-1][0])
        cpu.append(time.thread_time() - start[1] - waits[-1][1])
    engine.runner.collect = collect
    while engine.has_work():
        engine.step()
    engine.scheduler.check()
    host_ms = statistics.median(wall) * 1e3
    return {
        "running": running,
        "host_ms": round(host_ms, 4),
        "host_cpu_ms": round(statistics.median(cpu) * 1e3, 4),
        "us_per_request": round(host_ms * 1e3 / running, 2),
        "steps": steps,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'running':>8} {'host ms':>9} {'cpu ms':>9} {'us/request':>11}   (medians)"]
    lines += [
        f"{r['running']:>8} {r['host_ms']:>9.3f} {r['host_cpu_ms']:>9.3f} {r['us_per_request']:>11.2f}" for r in rows
    ]
    return "\n".join(lines)
