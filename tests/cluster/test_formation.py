"""The members of a group come together, whoever else calls."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxllm.cluster import formation
from jaxllm.cluster.formation import Address, call, gather
from tests.cluster.processes import Strangers

SECRET, WAIT_S, FOREVER_S = b"a secret of this group", 60.0, 600.0


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


def address_of(listener: socket.socket) -> Address:
    return Address(*listener.getsockname())


def test_who_says_nothing_keeps_no_follower_out(monkeypatch, listener, pool):
    """More callers than there are places hold the line as long as they may, and call again when they may not."""
    monkeypatch.setattr(formation, "_MEET_S", FOREVER_S)
    gathering = pool.submit(gather, listener, SECRET, 3, WAIT_S)
    with Strangers(listener.getsockname()[1], 40):
        followers = [pool.submit(call, address_of(listener), SECRET, index, 3, WAIT_S) for index in (1, 2)]
        group = gathering.result(WAIT_S)
    assert sorted(link.index for link in group._links) == [1, 2]
    for follower in followers:
        follower.result()[0].close()
    group.close()


def test_who_says_little_at_a_time_is_let_go(monkeypatch, listener, pool):
    """A byte now and then buys no more time."""
    monkeypatch.setattr(formation, "_MEET_S", 0.5)
    gathering = pool.submit(gather, listener, SECRET, 2, WAIT_S)
    with socket.create_connection(listener.getsockname()) as caller, pytest.raises(OSError):  # noqa: PT011 - whatever it is called
        for _ in range(71):  # one byte less than what a follower says
            time.sleep(0.2)
            caller.sendall(b"x")
    connection, _ = call(address_of(listener), SECRET, 1, 2, WAIT_S)
    gathering.result(WAIT_S).close()
    connection.close()
