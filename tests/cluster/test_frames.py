"""Frames of the stream between two members: what is damaged, left out, repeated or somebody else's is noticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cluster import messages
from jaxllm.cluster.frames import BEAT, FrameReader, frame
from jaxllm.engine.device.commands import Command
from jaxllm.errors import ClusterError

KEY, BODIES = bytes(32), [b"first", b"", b"x" * 3000]
STREAM = b"".join(frame(KEY, i, body) for i, body in enumerate(BODIES))


def read(stream: bytes, *, pieces: int = 1) -> list[bytes]:
    reader, step = FrameReader(KEY, "the leader"), -(-len(stream) // pieces)
    return [body for at in range(0, len(stream), step) for body in reader.feed(stream[at : at + step])]


@given(st.integers(1, len(STREAM)))
@settings(max_examples=50)
def test_however_the_stream_is_cut(pieces):
    assert read(STREAM, pieces=pieces) == BODIES


@given(st.integers(0, len(STREAM) - 1), st.integers(1, 255))
@settings(max_examples=200)
def test_no_damaged_frame_is_read(at, change):
    damaged = bytearray(STREAM)
    damaged[at] ^= change
    reader, found = FrameReader(KEY, "the leader"), []
    try:
        found += reader.feed(bytes(damaged))
    except ClusterError as error:
        assert "the leader" in str(error)
    assert found == BODIES[: len(found)] and len(found) < len(BODIES)


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [1, 0]])
def test_frames_come_once_and_in_their_order(order):
    with pytest.raises(ClusterError, match=r"frame \d+ of \d+ bytes came from the leader, and \d was expected"):
        read(b"".join(frame(KEY, i, b"body") for i in order))


def test_a_stranger_makes_no_frame():
    with pytest.raises(ClusterError, match="frame 0 from the leader is damaged"):
        read(frame(bytes(31) + b"1", 0, b"body"))


def test_beats_may_be_left_out_and_repeated():
    beat = frame(KEY, BEAT, messages.BEAT)
    assert read(beat + frame(KEY, 0, b"one") + beat * 2 + frame(KEY, 1, b"two")) == [
        messages.BEAT,
        b"one",
        messages.BEAT,
        messages.BEAT,
        b"two",
    ]


def test_a_length_alone_takes_no_memory():
    reader = FrameReader(KEY, "the leader")
    with pytest.raises(ClusterError, match="of 4294967295 bytes"):
        list(reader.feed((0).to_bytes(8, "little") + b"\xff" * 4 + bytes(16)))


def test_commands_come_as_they_were_sent():
    sent = [
        Command(("step", 8), (np.arange(5, dtype=np.int32),)),
        Command("swap_out", (np.zeros(4, np.int32), np.ones(16, np.int32)), 7),
        Command("update_params", key=1, source="/models/one"),
    ]
    got = messages.decode_from_leader(messages.encode_commands(sent))
    assert [(c.name, c.key, c.source) for c in got] == [(c.name, c.key, c.source) for c in sent]
    for ours, theirs in zip(sent, got, strict=True):
        assert all(map(np.array_equal, ours.arrays, theirs.arrays))


def test_messages_come_as_they_were_sent():
    for message in (
        messages.JoinProcesses(80, ["a", "b"]),
        messages.WantExecutables([("step", 8), "init"], True),
        messages.EndOfGroup("why", False),
    ):
        assert messages.encode(messages.decode_from_leader(messages.encode(message))) == messages.encode(message)
    for message in (messages.HostCompiled([["step", 8]]), messages.HostFailed("why"), messages.HostMemory(None)):
        assert messages.decode_from_follower(messages.encode(message)) == message


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_no_body_runs_anything(body):
    for decode in (messages.decode_from_leader, messages.decode_from_follower):
        try:
            decode(b"C" + body)
            decode(b"M" + body)
        except Exception as error:  # noqa: BLE001 - the kinds are what is tested
            assert isinstance(error, messages.UNREADABLE), error
