"""Both ways of sending to several sockets: by a thread of the native library, and by threads of Python."""

import os
import socket
import threading

import pytest

from jaxllm.cluster.sender import NativeSender, ThreadSender, open_sender
from jaxllm.pallas_kernels import native
from tests.cluster.processes import until

WAY = {
    "native": pytest.param(NativeSender, marks=pytest.mark.skipif(not native.exists(), reason="not built")),
    "threads": ThreadSender,
}


@pytest.fixture(params=WAY.values(), ids=WAY)
def way(request):
    return request.param


@pytest.fixture
def pairs():
    found = [socket.socketpair() for _ in range(3)]
    yield found
    for pair in found:
        for end in pair:
            if end.fileno() >= 0:
                end.shutdown(socket.SHUT_RDWR)  # ends a send that waits for room
                end.close()


def read(connection, count):
    data = bytearray()
    while len(data) < count and (more := connection.recv(1 << 20)):
        data += more
    return bytes(data)


def test_all_get_the_same_bytes_in_their_order(way, pairs):
    frames = [os.urandom(size) for size in (1, 100, 3_000_000, 2, 500_000, 7)]
    whole = b"".join(frames)
    sender = way([ours for ours, _ in pairs])
    found = {}
    readers = [
        threading.Thread(target=lambda i=i, theirs=theirs: found.update({i: read(theirs, len(whole))}))
        for i, (_, theirs) in enumerate(pairs)
    ]
    for reader in readers:
        reader.start()
    for frame in frames:
        assert sender.push(frame) >= 0
    sender.finish(30.0)
    for reader in readers:
        reader.join(30)
    assert list(found.values()) == [whole] * 3


def test_one_that_reads_nothing_keeps_no_other_waiting(way, pairs):
    sender = way([ours for ours, _ in pairs])
    frame = os.urandom(4_000_000)
    sender.push(frame)
    for _, theirs in pairs[1:]:
        theirs.settimeout(30)
        assert read(theirs, len(frame)) == frame
    assert sender.push(b"more") >= len(frame), "they are not all sent"
    assert read(pairs[1][1], 4) == b"more"
    sender.finish(0.0)
    assert [sender.error(i) for i in range(3)] == [None] * 3


def test_where_nothing_can_be_sent_is_said_and_the_others_go_on(way, pairs):
    sender = way([ours for ours, _ in pairs])
    pairs[1][1].close()
    sender.push(b"some")
    until(lambda: sender.error(1), 30, "an error")
    assert "pipe" in sender.error(1).lower()
    until(lambda: sender.push(b"") == 0, 30, "what the dead one lacks is not kept")
    sender.push(b"more")
    assert read(pairs[2][1], 8) == b"somemore"
    assert sender.error(0) is None
    sender.finish(30.0)


def test_after_finish_nothing_is_sent(way, pairs):
    sender = way([ours for ours, _ in pairs])
    sender.push(b"some")
    sender.finish(30.0)
    sender.push(b"more")
    pairs[0][0].shutdown(socket.SHUT_WR)
    assert read(pairs[0][1], 8) == b"some"


def test_without_the_library_it_says_so(monkeypatch, caplog, pairs):
    monkeypatch.setattr(native, "exists", lambda: False)
    sender = open_sender([ours for ours, _ in pairs])
    assert "the native library is not built" in caplog.text
    sender.push(b"some")
    sender.finish(30.0)
    assert read(pairs[0][1], 4) == b"some"
