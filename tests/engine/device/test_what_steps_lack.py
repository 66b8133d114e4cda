"""The engine while executables compile: what its requests lack comes next, and nothing else meanwhile."""

import time
import types
from dataclasses import replace

import pytest

from benchmarks.fake_executor import FakeExecutor
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.packing import ADMIT_SIZES, token_ladder
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.engine import Engine
from jaxllm.sampling_params import SamplingParams
from tests.pooler import pooler

CONFIG = EngineConfig(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, block_size=16, num_blocks=64)
FIRST = ["init", ("admit", 1), ("step", 1), ("sample", 1)]
STEP_S = 0.002


class SlowExecutor(FakeExecutor):
    """Whose steps take a while, in buckets that it notes."""

    def __init__(self, config, order):
        super().__init__(config, lambda given: given.slots * 0 + 5)
        names = [*FIRST, *(("step", n) for n in token_ladder(config.max_num_batched_tokens))]
        names += [("sample", n) for n in token_ladder(config.max_num_seqs)] + [("admit", n) for n in ADMIT_SIZES]
        self.compile_plan = CompilePlan(
            {name: lambda name=name: order.append(name) or types.SimpleNamespace(compile=str) for name in names},
            first=FIRST,
            share=1e-9,
        )
        self.buckets = []

    def apply_one(self, command):
        if command.kind == "step":
            self.buckets.append(command.name[1])
            time.sleep(STEP_S)
        return super().apply_one(command)


@pytest.fixture(params=[CONFIG])
def served(request):
    config, order = request.param, []
    executor = SlowExecutor(config, order)
    engine = Engine(Runner(executor, config, 32), vocab=32, eos_ids=(), pooler=pooler())
    yield engine, executor, order
    engine.close()


def finish(engine):
    while engine.has_work():
        engine.step()


def test_a_lone_long_prompt_waits_for_its_bucket(served):
    engine, executor, order = served
    engine.add(list(range(1, 31)) * 2, SamplingParams(max_tokens=6, temperature=0.0), request_id="a")
    finish(engine)
    assert executor.buckets[0] == 1 and 64 in executor.buckets and len(executor.buckets) < 20
    assert {*order[:4]} == {*FIRST} and {*order[4:]} == {("step", 64), ("sample", 8)}


def test_a_short_prompt_needs_no_more(served):
    engine, executor, order = served
    executor.compile_plan.longest_s = 1.0  # so long does another take
    engine.add([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0), request_id="a")
    finish(engine)
    assert set(executor.buckets) == {1} and {*order} == {*FIRST}


def test_many_requests_get_a_bucket_for_all(served):
    engine, executor, order = served
    for i in range(8):
        engine.add([1 + i], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), request_id=str(i))
    finish(engine)
    assert ("step", 8) in order and executor.buckets[-1] == 8


def test_many_long_prompts_get_a_bucket_for_all_and_one_for_what_comes_after_them(served):
    engine, executor, order = served
    for i in range(6):
        engine.add([1 + i] * 90, SamplingParams(max_tokens=40, ignore_eos=True), request_id=str(i))
    finish(engine)
    assert {*order[4:6]} == {("step", 128), ("sample", 8)} and order[6] == ("step", 8)
    assert executor.buckets.count(1) < 5 and executor.buckets.count(8) > 20


@pytest.mark.parametrize("served", [replace(CONFIG, free_padding=True)], indirect=True)
def test_where_padding_is_free_the_step_of_prompts_serves_what_comes_after_them(served):
    engine, executor, order = served
    for i in range(6):
        engine.add([1 + i] * 90, SamplingParams(max_tokens=40, ignore_eos=True), request_id=str(i))
    finish(engine)
    assert {*order[4:]} == {("step", 128), ("sample", 8)} and executor.buckets.count(128) > 40


def test_tokens_that_are_left_are_counted(served):
    engine, _, _ = served
    engine.add([1] * 50, SamplingParams(max_tokens=2), request_id="a")
    engine.add([1] * 9, SamplingParams(max_tokens=2), request_id="b")
    engine.add([1], SamplingParams(max_tokens=2), request_id="c")
    plan = engine.scheduler.schedule(16)
    assert plan.num_tokens == 16 and engine.scheduler.num_left_tokens() == 34 + 9 + 1
    assert engine.scheduler.num_sequences == 3
    plan = engine.scheduler.schedule(128)
    assert engine.scheduler.num_left_tokens() == 0
