"""The engine's process: its socket, its requests, its death, its silence; with an engine that is none."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxllm import SamplingParams, StructuredOutputs
from jaxllm.errors import EngineDeadError, JaxLLMError, RequestEndedError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.server.engine import engine_process, wire
from jaxllm.server.engine.client import EngineCommand
from jaxllm.server.engine.process_client import ProcessClient
from tests.fake_engine_process import BUG, COMPILING, GARBLED, POISON, REFUSED, SLOW
from tests.fake_server import STATS

ROOT = Path(__file__).parents[3]
MODULE = "tests.fake_engine_process"


def params(max_tokens=5, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **fields)


def run(test, **options) -> None:
    """`test` with a client of a fresh process, of which nothing is left afterwards."""

    async def main():
        client = ProcessClient(options, module=MODULE)
        try:
            await client.start()
            async with asyncio.timeout(60):
                await test(client)
        finally:
            await client.close()
        assert client.pid is None or not is_running(client.pid)

    asyncio.run(main())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def collect(client, token=9, request_id="a", **fields) -> list:
    stream = client.generate([token, 7], params(**fields), request_id=request_id)
    return [output async for output in stream]


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_requests_run_side_by_side():
    async def test(client):
        assert client.info.vocab == 4096 and client.info.config.max_model_len == 256
        results = await asyncio.gather(*(collect(client, request_id=f"r{i}", max_tokens=5 + i) for i in range(8)))
        for i, outputs in enumerate(results):
            text = "".join(output.outputs[0].text for output in outputs)
            assert text == "abcdefghijklm"[: 5 + i]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert {output.request_id for output in outputs} == {f"r{i}"}
        await until(lambda: client.stats().num_running == 0)

    run(test)


def test_commands():
    async def test(client):
        assert not await client.command(EngineCommand("reset_prefix_cache"))
        assert await client.command(EngineCommand("sleep"))
        assert await client.command(EngineCommand("wake_up", tags=["weights"]))
        assert not await client.command(EngineCommand("wake_up"))
        running = asyncio.create_task(collect(client, max_tokens=1000))
        await until(lambda: client.stats().num_running)
        with pytest.raises(ValueError, match="1 requests run"):
            await client.command(EngineCommand("sleep"))
        client.abort_all()
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        for _ in range(2):
            await client.command(EngineCommand("reset_prefix_cache"))
        with pytest.raises(RuntimeError, match="a bug"):
            await client.command(EngineCommand("sleep"))

    run(test)


def test_commands_to_an_engine_that_dies():
    async def test(client):
        slow = asyncio.create_task(collect(client, SLOW))
        await until(lambda: client.stats().num_running)
        waiting = asyncio.create_task(client.command(EngineCommand("sleep")))
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        for task in (slow, waiting):
            with pytest.raises(EngineDeadError):
                await task
        with pytest.raises(EngineDeadError):
            await client.command(EngineCommand("wake_up"))

    run(test)


def test_only_this_user_can_reach_the_socket(tmp_path):
    async def test(client):
        assert (tmp_path / "told").read_text() == "0o700 0o600"

    run(test, told=str(tmp_path / "told"))


def test_a_folder_for_temporary_files_that_is_too_long_for_a_socket(tmp_path, monkeypatch):
    async def test(client):
        assert await collect(client)
        assert (tmp_path / "told").read_text() == "0o700 0o600"

    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run(test, told=str(tmp_path / "told"))


def test_what_was_sent_is_left_out():
    async def test(client):
        first, *others = await collect(client, prompt_logprobs=1)
        assert first.prompt_logprobs == [None, None] and first.prompt is None and first.prompt_token_ids == []
        assert all(output.prompt_logprobs is None for output in others)

    run(test)


def test_leaving_aborts():
    async def test(client):
        stream = client.generate([9], params(max_tokens=100_000), request_id="a")
        await anext(stream)
        await until(lambda: client.stats().num_running == 1)
        await stream.aclose()
        await until(lambda: client.stats().num_running == 0)
        task = asyncio.create_task(collect(client, max_tokens=100_000))
        await until(lambda: client.stats().num_running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.stats().num_running == 0)

    run(test)


def test_abort_ends_a_stream():
    async def test(client):
        outputs = []
        async for output in client.generate([9], params(max_tokens=100_000), request_id="a"):
            outputs.append(output)
            client.abort("a")
        assert outputs[-1].outputs[0].finish_reason == "abort"

    run(test)


def test_a_refused_and_a_poisoned_request_are_alone():
    async def test(client):
        good = asyncio.create_task(collect(client, request_id="good", max_tokens=50))
        with pytest.raises(ValueError, match="no place"):
            await collect(client, REFUSED, "bad")
        with pytest.raises(RuntimeError, match="failed to take it"):
            await collect(client, BUG, "bug")
        (output,) = await collect(client, POISON, "poison")
        assert output.error == "it failed"
        assert (await good)[-1].finished

    run(test)


@pytest.mark.parametrize(
    ("regex", "kind", "message"), [("bad", ValueError, "not sound"), ("broken", RuntimeError, "failed to take it")]
)
def test_a_refused_grammar_is_alone(regex, kind, message):
    async def test(client):
        good = asyncio.create_task(collect(client, request_id="good", structured_outputs=StructuredOutputs(regex="a")))
        with pytest.raises(kind, match=message):
            await collect(client, request_id="bad", structured_outputs=StructuredOutputs(regex=regex))
        assert (await good)[-1].finished

    run(test)


def test_a_slow_grammar_holds_up_nobody():
    async def test(client):
        slow = StructuredOutputs(regex="slow")
        waiting = asyncio.create_task(collect(client, request_id="slow", structured_outputs=slow))
        left = asyncio.create_task(collect(client, request_id="left", structured_outputs=slow, max_tokens=100_000))
        await asyncio.sleep(0)  # both are sent
        assert len(await collect(client, request_id="quick")) and not waiting.done()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert (await waiting)[-1].finished
        await until(lambda: client.stats().num_running == 0)

    run(test)


def test_a_slow_reader_gets_several_deltas_in_one():
    async def test(client):
        stream = client.generate([9], params(max_tokens=40), request_id="a")
        await anext(stream)
        await asyncio.sleep(1.0)
        second = await anext(stream)
        assert len(second.outputs[0].text) > 5
        rest = [output async for output in stream]
        assert len(rest) < 35

    run(test)


def test_a_killed_engine_ends_every_stream_at_once():
    async def test(client):
        tasks = [asyncio.create_task(collect(client, request_id=f"r{i}", max_tokens=100_000)) for i in range(32)]
        await until(lambda: client.stats().num_running == 32)
        os.kill(client.pid, signal.SIGKILL)
        start = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not client.health().is_alive
        assert time.monotonic() - start < 2
        with pytest.raises(EngineDeadError):
            await collect(client)

    run(test)


def test_an_engine_that_dies_says_why():
    async def test(client):
        good = asyncio.create_task(collect(client, request_id="good", max_tokens=100_000))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await collect(client, token=2, request_id="bad")
        with pytest.raises(EngineDeadError):
            await good

    run(test)


def test_an_engine_that_talks_nonsense_is_dead():
    async def test(client):
        with pytest.raises(EngineDeadError, match="can't be read"):
            await collect(client, GARBLED, max_tokens=100_000)
        assert not client.health().is_alive

    run(test)


def test_silence():
    async def test(client):
        assert client.health().silent_s == 0
        task = asyncio.create_task(collect(client, max_tokens=100_000))
        await until(lambda: client.stats().num_running == 1)
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: client.health().silent_s > 1.5)
        assert client.health().is_alive
        client.fail_all("it hangs")
        with pytest.raises(RequestEndedError, match="it hangs"):
            await task
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: client.health().silent_s == 0 and client.stats().num_running == 0)
        assert (await collect(client))[-1].finished

    run(test)


def test_a_long_step_is_silence_and_a_compilation_is_none():
    async def test(client):
        task = asyncio.create_task(collect(client, COMPILING, max_tokens=1))
        most = 0.0
        while not task.done():
            most = max(most, client.health().silent_s)
            await asyncio.sleep(0.05)
        assert most < 2.5, "3 s of compiling"
        task = asyncio.create_task(collect(client, SLOW, max_tokens=1))
        await until(lambda: client.health().silent_s > 1.5)
        await task
        await until(lambda: client.health() == (True, 0, pytest.approx(client.health().patience_s), None))
        assert client.health().patience_s > 10, "it is known to take long"

    run(test)


def test_loading_is_no_silence():
    async def main():
        client = ProcessClient({"load_s": 3}, module=MODULE)
        start = asyncio.create_task(client.start())
        most, unknown = 0.0, 0  # seconds; times that nothing was known of the engine
        while not start.done():
            most = max(most, client.health().silent_s)
            unknown += client.info is None
            await asyncio.sleep(0.05)
        assert start.exception() is None and most < 2.5 and unknown and client.info is not None
        await client.close()

    asyncio.run(main())


def test_a_model_that_cannot_be_served():
    with pytest.raises(JaxLLMError, match="max_model_len=0 is no length") as caught:
        run(None, wrong=True)
    assert not isinstance(caught.value, EngineDeadError)


def test_a_process_that_ends_before_it_calls():
    async def main():
        client = ProcessClient({}, module="tests.no_such_module")
        with pytest.raises(EngineDeadError, match="ended with status 1"):
            await client.start()
        await client.close()

    asyncio.run(main())


def test_a_server_that_stops_while_its_engine_loads(capfd):
    async def main():
        client = ProcessClient({"load_s": 300}, module=MODULE)
        start = asyncio.create_task(client.start())
        await until(lambda: client._writer is not None)
        start.cancel()
        await client.close()
        assert client._process.returncode == 1  # it was not killed

    asyncio.run(main())
    assert capfd.readouterr().err == ""


def test_a_server_that_stops_before_its_engine_calls(tmp_path):
    command = [sys.executable, "-m", "jaxllm.server.engine.engine_process", str(tmp_path / "engine")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_lives_once_all_is_compiled_is_left_to_itself(monkeypatch):
    """Python's collector would search it again and again, while each stream stands still."""
    beats, frozen = iter([1, 2, 2, 2]), []
    with socket.socket(socket.AF_UNIX) as unused:
        process = engine_process.EngineProcess(unused)

    def stats():
        if (num := next(beats, None)) is None:
            raise InterruptedError
        return replace(STATS, num_executables=3, num_compiled=num, num_failed_executables=1)

    process.loop = SimpleNamespace(silent_s=0.0, patience_s=1.0, engine=SimpleNamespace(stats=stats))
    monkeypatch.setattr(engine_process.gc, "freeze", lambda: frozen.append(process.outbox.qsize()))
    monkeypatch.setattr(engine_process, "BEAT_S", 0.0)
    with pytest.raises(InterruptedError):
        process.beat()
    assert frozen == [2]


ORPHAN = """
import asyncio, os
from jaxllm.server.engine.process_client import ProcessClient

async def main():
    client = ProcessClient({}, module="tests.fake_engine_process")
    await client.start()
    print(client.pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_no_orphans():
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, end = int(done.stdout), time.monotonic() + 30
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    running = is_running(pid)
    if running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not running


@pytest.mark.parametrize(
    "given",
    [
        SamplingParams(),
        params(),
        SamplingParams(
            n=2,
            best_of=3,
            temperature=0.5,
            stop=["a", "b"],
            seed=2**64 - 1,
            logit_bias={3: 1.5},
            stop_token_ids=[1],
            bad_words=["x"],
            allowed_token_ids=[1, 2],
            logprobs=3,
            prompt_logprobs=2,
            max_tokens=None,
        ),
        SamplingParams(beam_width=3, length_penalty=-1.0, early_stopping="never", temperature=0.0),
        SamplingParams(logprob_token_ids=[1, 2], skip_special_tokens=False, output_kind=RequestOutputKind.FINAL_ONLY),
    ],
    ids=range(5),
)
def test_parameters_arrive_as_they_were(given):
    sent = wire.frame(wire.Add("id", [1, 2], wire.pack_params(given), -3))
    message = wire.from_server.decode(sent[wire.HEAD_BYTES :])
    assert wire.unpack_params(message.params) == given and message.priority == -3


def test_outputs_that_are_too_large_for_a_frame_end_nobody_elses(monkeypatch):
    small, large = (
        RequestOutput(request_id=name, prompt=None, prompt_token_ids=[1] * length, outputs=[])
        for name, length in (("a", 3), ("b", 3000))
    )
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)
    frames = engine_process.frames(wire.Outputs([small, large]))
    told = [wire.from_engine.decode(data[wire.HEAD_BYTES :]) for data in frames]
    assert [output.request_id for output in told[0].outputs] == ["a"]
    assert told[1:] == [wire.Refused("b", "its output is too large; ask for less at once")]


def test_frames_have_a_limit():
    with pytest.raises(ConnectionError, match="broken"):
        wire.frame_length(b"\xff\xff\xff\xff")
