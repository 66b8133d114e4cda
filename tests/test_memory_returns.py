"""Requests that are over, and an `LLM` or `AsyncLLM` that nobody refers to, give their memory back at once, by
reference counting alone."""

import asyncio
import gc
import weakref

import jax
import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.engine.schedule.sequence import Sequence
from tests import on_demand
from tests.tiny import greedy, ids, prompts_of

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)


def live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture
def no_collection():
    """Memory is to come back without the collector's help."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@on_demand.as_for_users()
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "compiling"])
def test_of_an_llm(tiny, no_collection, compiled):
    before = live_bytes()
    llm = LLM(tiny.model, **SIZES)
    if compiled:
        llm.wait_compiled()
    llm.generate(ids(*prompts_of([3, 9])), greedy(3, n=2))
    stream = llm.stream(ids([1, 2, 3]), greedy(9))
    next(stream)
    stream.close()
    assert live_bytes() > before
    refs = [weakref.ref(owner) for owner in (llm, llm.engine, llm.engine.runner)]
    del llm, stream
    assert [ref() for ref in refs] == [None] * 3
    assert live_bytes() == before


def test_of_an_async_llm(tiny, no_collection):
    before = live_bytes()
    llm = AsyncLLM(tiny.model, **SIZES)

    async def collect(llm):
        return [out async for out in llm.generate(ids([1, 2, 3])[0], greedy(3))]

    assert asyncio.run(collect(llm))[-1].finished
    loop, ref = weakref.ref(llm._loop), weakref.ref(llm)
    del llm
    assert ref() is None, "an idle AsyncLLM is closed when the last reference goes"
    assert loop() is None
    assert live_bytes() == before


def test_of_requests(llm, no_collection):
    """Python's collector, which searches all objects of a process, has nothing to find."""
    prompts = prompts_of([3, 5] * 30)
    llm.rollout(prompts, SamplingParams(n=4, max_tokens=3, ignore_eos=True))
    llm.generate(ids(*prompts), greedy(3))
    llm.generate(ids(*prompts), SamplingParams(n=2, best_of=3, max_tokens=2))
    llm.score([(prompt, [[1, 2], [3]]) for prompt in prompts])
    for _ in llm.stream(ids(*prompts), greedy(4)):
        pass
    llm.generate(ids(prompts[0]), greedy(4))  # a step's plan is kept until the next
    left = [each for each in gc.get_objects() if type(each) is Sequence]  # others' objects may warn if asked
    assert len(left) <= llm.engine.config.max_num_seqs, left
