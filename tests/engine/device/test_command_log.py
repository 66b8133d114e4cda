"""What an engine asks of its device, written down, makes the same again: in another executor, and from a file."""

import io
import json
import struct
import subprocess
import sys
import tracemalloc
import zlib
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputs
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import command_log
from jaxllm.engine.device.command_log import Applied, CallResults, CommandLog, FailedCall, frame_bytes, header_frame
from jaxllm.engine.device.commands import KINDS, Command, check
from jaxllm.engine.device.executor import HANDLERS
from jaxllm.engine.device.packing import StepLayout
from jaxllm.engine.device.recorder import Recorder
from jaxllm.engine.device.runner import CommandExecutor
from jaxllm.engine.replay import Replayed, compare, replay
from tests import chat_model
from tests.tiny import greedy, ids, make_llm, prompts_of

SIZES = dict(max_num_seqs=6, max_num_batched_tokens=16, block_size=4, num_blocks=40, max_model_len=128)
FEW = dict(max_num_seqs=1, max_num_batched_tokens=8)
COMMANDS = [
    Command(("step", 8), (np.arange(5, dtype=np.int32),)),
    Command("swap_out", (np.zeros(4, np.int32), np.ones(16, np.int32)), 7),
    Command("update_params", key=1, source="/models/one"),
    Command("init"),
]


BAD = Applied([Command(("admit", 1), (np.zeros((1, 3), np.int32),))])  # too small for its executable


def run_mixed(llm: LLM) -> None:
    """Samples, beams, grammars, penalties, prompt log-probabilities, forks, prefix hits, swapped blocks."""
    llm.engine.set_preemption("swap")
    prompts = prompts_of([20] * 6)
    llm.generate(ids(*prompts), greedy(30))
    assert llm.stats().num_swapped > 0
    stream = llm.stream(ids(*prompts), greedy(30))
    while llm.stats().blocks_on_host == 0:
        next(stream)
    stream.close()  # what is in host memory is given up
    llm.engine.set_preemption("auto")
    llm.generate(ids(*prompts), greedy(30))
    mixed = [
        SamplingParams(n=3, seed=1, temperature=0.9, max_tokens=6, frequency_penalty=0.5, logit_bias={3: 2.0}),
        SamplingParams(beam_width=3, max_tokens=5),
        SamplingParams(seed=2, max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-z]{6}[0-9]")),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, repetition_penalty=1.2, bad_words=["a"]),
    ]
    llm.generate(ids(*prompts_of([9, 20, 7, 11])), mixed)
    llm.embed(ids(*prompts_of([5, 30])))


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A file, and what the state was at the end."""
    folder = tmp_path_factory.mktemp("recording")
    model, path = chat_model.write_model(folder / "model"), folder / "run.commands"
    with LLM(model, record=path, kv_cache_dtype="int8", **SIZES) as llm:
        run_mixed(llm)
        state = jax.tree.map(np.asarray, llm.engine.runner.executor.executor.state)
    return path, state


@pytest.fixture(scope="module")
def shared(recording):
    with open(recording[0], "rb") as file:
        executor = Replayed(CommandLog(file).header)
    params = executor._offered[1]
    executor.compile_plan.wait_all()
    yield executor, params
    executor.close()


@pytest.fixture
def executor(shared):
    """As the recording wants it, again."""
    executor, params = shared
    executor._offered[1] = params
    return executor


def frames_of(path) -> list:
    with open(path, "rb") as file:
        return list(CommandLog(file).frames())


def rewritten(path, change) -> io.BytesIO:
    """The file with other frames: `change` takes the list."""
    with open(path, "rb") as file:
        log = CommandLog(file)
        frames = list(log.frames())
    change(frames)
    return io.BytesIO(header_frame(log.header) + b"".join(map(frame_bytes, frames)))


def test_a_run_has_commands_of_every_kind(recording):
    path, _ = recording
    assert path.stat().st_mode & 0o777 == 0o600
    seen = {command.kind for frame in frames_of(path) if isinstance(frame, Applied) for command in frame.commands}
    # A checkpoint brings scales (tests/engine/test_kv_cache_dtype.py), and shards share steps (test_data_axis.py).
    assert seen == KINDS.keys() - {"kv_scales", "step_shared"}


def test_two_executors_fed_one_stream_are_equal_to_the_bit(recording, executor):
    path, expected = recording
    with open(path, "rb") as file:
        report = compare(CommandLog(file), executor)
    assert report.is_equal and report.compared > report.steps
    for ours, theirs in zip(jax.tree.leaves(executor.state), jax.tree.leaves(expected), strict=True):
        assert np.asarray(ours).tobytes() == theirs.tobytes()


def test_the_command_replays_a_file_in_a_fresh_process(recording):
    path, _ = recording
    applied = [frame for frame in frames_of(path) if isinstance(frame, Applied)]
    commands = sum(len(frame.commands) for frame in applied)
    steps = sum(command.kind == "step" for frame in applied for command in frame.commands)
    done = subprocess.run([sys.executable, "-m", "jaxllm", "replay", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{commands} commands, {steps} steps, equal\n"), done.stderr


def test_every_step_has_been_compared(recording):
    frames = frames_of(recording[0])
    calls = [frame.commands for frame in frames if isinstance(frame, Applied)]
    with_results = {
        i
        for i, commands in enumerate(calls)
        if any(KINDS[one.kind].num_results and KINDS[one.kind].is_repeatable for one in commands)
    }
    assert {frame.call for frame in frames if isinstance(frame, CallResults)} == with_results


def test_a_replay_says_where_the_first_difference_is(recording, executor):
    def other_token(frames):
        """The first prefill has another first token."""
        commands, i = next(
            (frame.commands, i)
            for frame in frames
            if isinstance(frame, Applied)
            for i, command in enumerate(frame.commands)
            if command.name == ("step", 16)
        )
        packed = commands[i].arrays[0].copy()
        StepLayout(16, SIZES["max_num_seqs"], SIZES["block_size"]).unpack(packed).tokens[0] ^= 1
        commands[i] = commands[i]._replace(arrays=(packed,))

    found = compare(CommandLog(rewritten(recording[0], other_token)), executor)
    assert not found.is_equal and "first difference is in the results of call" in str(found)
    assert 0 < found.steps < 10


def test_a_replay_ends_where_it_knows_no_further(recording, executor):
    def unknown_bucket(frames):
        frames[4:] = [Applied([Command(("step", 7), (np.zeros(3, np.int32),))])]

    def updated(frames):
        frames[0].commands.append(Command("update_params", key=2))

    found = compare(CommandLog(rewritten(recording[0], unknown_bucket)), executor)
    assert "there is no executable ('step', 7)" in found.difference
    found = compare(CommandLog(rewritten(recording[0], updated)), executor)
    assert not found.is_equal and "0 commands, 0 steps, equal; then come parameters of version 2" in str(found)


@pytest.mark.parametrize(
    "more, says",
    [
        ([BAD, FailedCall("shapes")], None),
        ([BAD], "the last, fails"),
        ([BAD, CallResults(0, [])], "fails here, and did not when it was recorded"),
        ([FailedCall("gone")], "failed when it was recorded, and does not here: gone"),
    ],
)
def test_a_call_that_failed_fails_again(recording, executor, more, says):
    def change(frames):
        frames[2:] = more  # after parameters and an empty state

    found = compare(CommandLog(rewritten(recording[0], change)), executor)
    assert found.is_equal if says is None else says in found.difference


def test_another_model_is_refused(recording, tmp_path, tiny):
    other = chat_model.write_model(tmp_path / "other", max_position_embeddings=256)
    for model, message in (
        (str(other), "config.json"),
        (tiny.model, "not the recorded one"),
        (str(tmp_path), "config"),
    ):
        with open(recording[0], "rb") as file, pytest.raises((ValueError, OSError), match=message):
            replay(file, model)


def test_a_model_of_the_program_needs_to_be_given(tiny, tmp_path):
    path = tmp_path / "run"
    with make_llm(tiny.model, record=path, **FEW) as llm:
        llm.generate(ids([1, 2, 3]), greedy(4))
    with pytest.raises(ValueError, match="choose another file"):
        LLM(tiny.model, record=path)
    with open(path, "rb") as file:
        with pytest.raises(ValueError, match="--model"):
            replay(file)
        assert replay(file, tiny.model).is_equal


def test_a_full_disk_ends_the_recording_and_not_the_engine(monkeypatch, caplog):
    executor = create_autospec(CommandExecutor, instance=True)
    executor.apply.return_value = []
    with io.FileIO("/dev/null", "w") as null, io.FileIO("/dev/full", "w") as full:
        recorder = Recorder(executor, null, HEADER)
        monkeypatch.setattr(recorder, "_file", full)
        for _ in range(3):
            assert recorder.apply([Command("settle")]) == []
    assert [record.message for record in caplog.records] == [
        "commands are not recorded any more, as the file can't be written: [Errno 28] No space left on device"
    ]


def test_the_executor_knows_exactly_the_commands_there_are(executor):
    assert HANDLERS.keys() == KINDS.keys()
    for name in ("reboot", ("reboot", 8), 7, ()):
        with pytest.raises(ValueError, match="is no command; there are update_params, .*init, "):
            executor.apply([Command(name)])
    check(COMMANDS[0])
    for command in (Command(("step", 8)), Command("init", (np.zeros(1, np.int32),)), Command("swap_in", (np.eye(2),))):
        with pytest.raises(ValueError, match="has arrays of shapes"):
            check(command)


CONFIG = EngineConfig(max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8, block_size=4, num_blocks=4)
TEXTS = ("jaxllm", "jax", "platform", "model", "config_digest", "params_digest", "dtype", "mesh")


HEADER = command_log.Header(**dict.fromkeys(TEXTS, ""), config=CONFIG)


def log_of(*frames: bytes) -> io.BytesIO:
    return io.BytesIO(header_frame(HEADER) + b"".join(frames))


def raw(kind: bytes, text: bytes, arrays: bytes = b"", *, text_size=None, arrays_size=None) -> bytes:
    """A frame with a sound checksum, which may lie about its sizes."""
    checksum = zlib.crc32(arrays, zlib.crc32(text))
    return struct.pack("<cIIQ", kind, checksum, text_size or len(text), arrays_size or len(arrays)) + text + arrays


def test_a_file_gives_back_what_was_written():
    frames = [Applied(COMMANDS), Applied([]), FailedCall("it failed"), CallResults(0, ["ab", "cd"])]
    file = log_of(*map(frame_bytes, frames))
    first, *others = CommandLog(file).frames()
    assert others == frames[1:]
    assert [c._replace(arrays=()) for c in first.commands] == [c._replace(arrays=()) for c in COMMANDS]
    for read, written in zip(first.commands, COMMANDS, strict=True):
        for ours, theirs in zip(read.arrays, written.arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_every_cut_and_every_damaged_byte_is_noticed():
    whole = log_of(frame_bytes(Applied(COMMANDS))).getvalue()
    start = len(log_of().getvalue())
    assert len(list(CommandLog(io.BytesIO(whole)).frames())) == 1
    for cut in range(len(whole)):
        if cut != start:
            with pytest.raises(ValueError, match="no file of recorded commands|in the middle of"):
                list(CommandLog(io.BytesIO(whole[:cut])).frames())
    for at in range(len(whole)):
        with pytest.raises(ValueError):
            list(CommandLog(io.BytesIO(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])).frames())


HOSTILE = {
    "arrays past the end": raw(b"C", b"[]", arrays_size=2**62),
    "a description past the end": raw(b"C", b"[]", text_size=2**31),
    "no JSON": raw(b"C", b"{"),
    "deep JSON": raw(b"C", b"[" * 100_000),
    "huge shape": raw(b"C", json.dumps([["init", 1, "", [[2**31 - 1, 2**31 - 1, 2**31 - 1]]]]).encode()),
    "empty shape": raw(b"C", json.dumps([["copy", 1, "", [[0, 2**40]]]]).encode()),
    "negative shape": raw(b"C", json.dumps([[["step", 8], 1, "", [[-1]]]]).encode(), b"0000"),
    "text for a shape": raw(b"C", json.dumps([["copy", 1, "", ["ab"]]]).encode()),
    "no list": raw(b"C", b"7"),
    "too few fields": raw(b"C", b'[["init"]]'),
    "unknown command": raw(b"C", b'[["reboot", 1, "", []]]'),
    "a list of names": raw(b"C", b'[[["step", [8]], 1, "", [[1]]]]', b"0000"),
    "another's arrays": raw(b"C", b'[["init", 1, "", []]]', b"0000"),
    "key is no integer": raw(b"C", b'[["init", "x", "", []]]'),
    "unknown frame": raw(b"Z", b"[]"),
    "results without a call": raw(b"R", b'["x", []]'),
    "results with arrays": raw(b"R", b"[0, []]", b"0000"),
    "an error that is no text": raw(b"F", b"{}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_refused_and_allocates_nothing(name):
    file = log_of(HOSTILE[name])
    log = CommandLog(file)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="frame 1"):
            list(log.frames())
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 40 * len(HOSTILE[name])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", [[], {}, {"config": 1}, None])
def test_a_header_of_other_things_is_refused(header):
    file = io.BytesIO(command_log.MAGIC + raw(b"H", json.dumps(header).encode()))
    with pytest.raises(ValueError, match="header"):
        CommandLog(file)
    file = log_of()
    good = CommandLog(file).header.to_json()
    for change in ({"jax": 7}, {"config": {"reboot": 1}}, {"config": good["config"] | {"num_blocks": 2**40}}):
        data = command_log.MAGIC + raw(b"H", json.dumps(good | change).encode())
        with pytest.raises(ValueError):
            CommandLog(io.BytesIO(data))
