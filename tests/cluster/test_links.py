"""The leader's connections, with followers that are sockets of the test."""

import socket
import time

from jaxllm.cluster import links
from jaxllm.cluster.handshake import FrameKeys
from tests.cluster.processes import until


def test_a_follower_that_reads_nothing_is_found_silent(monkeypatch):
    """Also where there is no room for a beat any more: nobody waits for it."""
    monkeypatch.setattr(links, "SILENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as follower:
        leader, _ = server.accept()
        leader.setblocking(False)
        for _ in range(5):  # as what was sent moves on into the other side's buffer
            while _fills(leader, bytes(1 << 16)) or _fills(leader, b"x"):
                pass
            time.sleep(0.2)
        leader.setblocking(True)
        group = links.Links([links.Link(1, leader, FrameKeys(bytes(32), bytes(32)))])
        reasons = []
        group.on_lost = reasons.append
        until(lambda: reasons, 10, "the group is lost")
        assert "has been silent" in reasons[0]
        follower.close()
        group.close()


def _fills(connection: socket.socket, data: bytes) -> bool:
    try:
        return bool(connection.send(data))
    except BlockingIOError:
        return False
