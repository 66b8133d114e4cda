"""`AsyncLLM`: concurrent streams, cancellation, errors, closing."""

import asyncio

import pytest

from jaxllm import AsyncLLM
from jaxllm.errors import EngineDeadError
from tests.tiny import greedy, ids, prompts_of

PROMPTS = prompts_of([1, 7, 20, 40, 3, 5])
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)


@pytest.fixture(scope="module")
def async_llm(tiny):
    llm = AsyncLLM(tiny.model, **SIZES)
    yield llm
    llm.close()
    llm._engine.scheduler.check()


async def collect(llm, prompt, params, **options) -> list:
    return [out async for out in llm.generate(ids(prompt)[0], params, **options)]


async def idle(llm) -> None:
    while llm._engine.has_work():
        await asyncio.sleep(0.01)


def test_concurrent_streams(async_llm, tiny):
    async def main():
        return await asyncio.gather(*(collect(async_llm, prompt, greedy(9)) for prompt in PROMPTS))

    for prompt, outputs in zip(PROMPTS, asyncio.run(main()), strict=True):
        lengths = [len(out.outputs[0].token_ids) for out in outputs]
        assert lengths == sorted(set(lengths)) and lengths[-1] == 9
        assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
        tiny.assert_greedy(prompt, outputs[-1].outputs[0].token_ids)


def test_leaving_or_cancelling_aborts_and_frees_the_blocks(async_llm):
    async def main():
        stream = async_llm.generate(ids(PROMPTS[1])[0], greedy(80))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(async_llm, PROMPTS[2], greedy(60)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(async_llm)

    asyncio.run(main())
    assert async_llm.stats().blocks_used == 0


def test_abort_by_id_ends_the_stream(async_llm):
    async def main():
        outputs = []
        async for out in async_llm.generate(ids(PROMPTS[3])[0], greedy(50), request_id="mine"):
            outputs.append(out)
            async_llm.abort("mine")
        return outputs

    last = asyncio.run(main())[-1]
    assert last.finished and last.outputs[0].finish_reason in ("abort", "length")


def test_errors_reach_the_caller_and_nobody_else(async_llm, tiny):
    async def main():
        good = asyncio.create_task(collect(async_llm, PROMPTS[2], greedy(8), request_id="same"))
        with pytest.raises(ValueError, match="no tokens"):
            await collect(async_llm, [], greedy(3))
        with pytest.raises(ValueError, match="is in use"):
            await collect(async_llm, [1], greedy(3), request_id="same")
        return await good

    tiny.assert_greedy(PROMPTS[2], asyncio.run(main())[-1].outputs[0].token_ids)


def test_a_loop_that_is_gone_leaves_nothing_running(async_llm):
    loop = asyncio.new_event_loop()
    stream = async_llm.generate(ids(PROMPTS[0])[0], greedy(80))
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(idle(async_llm))
    assert async_llm.stats().blocks_used == 0
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(anext(stream))


def test_a_dead_engine_ends_every_stream(tiny, monkeypatch):
    llm = AsyncLLM(tiny.model, **SIZES)

    async def main():
        stream = llm.generate(ids(PROMPTS[1])[0], greedy(80))
        await anext(stream)

        def broken():
            raise EngineDeadError("the device is gone")

        monkeypatch.setattr(llm._engine, "step", broken)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await collect(llm, [1], greedy(1))

    asyncio.run(main())
    llm.close()


def test_closing_ends_every_stream(tiny):
    llm = AsyncLLM(tiny.model, **SIZES)

    async def main():
        stream = llm.generate(ids(PROMPTS[1])[0], greedy(80))
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDeadError, match="closed"):
            async for _ in stream:
                pass

    asyncio.run(main())
