"""One engine over several processes, each with a device of its own: nothing is mocked."""

import os
import signal
import socket
import threading
import time

import pytest

from tests.cluster.processes import free_port

ENDS_S = 15.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def alone():
    """What one device makes of the mixed work."""
    from tests.cluster.processes import Hosts

    hosts = Hosts()
    found = hosts.program(index=None).event("outputs", 200)
    hosts.close()
    return found


@pytest.mark.parametrize(
    ("num_hosts", "mesh"),
    [
        (2, "tensor=2"),
        pytest.param(2, "data=2", marks=pytest.mark.slow),
        pytest.param(4, "tensor=4", marks=pytest.mark.slow),
        pytest.param(4, "data=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_device(hosts, secret, alone, num_hosts, mesh):
    engine = {"mesh": mesh} | ({"num_blocks": 12, "max_num_seqs": 3} if "data" in mesh else {})
    leader, *followers = hosts.group(secret, num_hosts=num_hosts, engine=engine)
    assert leader.event("outputs", 250) == alone
    assert leader.event("preemptions") > 0 and leader.event("swapped") > 0
    assert leader.wait(30) == 0
    for follower in followers:
        assert follower.wait(ENDS_S) == 0 and "the leader was closed" in follower.text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["idle", "endless", "compiling"])
def test_a_member_that_dies_ends_the_others(hosts, secret, victim, when):
    group = hosts.group(secret, work="idle" if when == "compiling" else when)
    group[0].event({"idle": "idle", "endless": "steps", "compiling": "built"}[when])
    if when == "idle":
        time.sleep(20)  # until everything is compiled
    os.kill(group[victim].process.pid, signal.SIGKILL)
    start, survivor = time.monotonic(), group[1 - victim]
    assert survivor.wait(ENDS_S) != 0 and time.monotonic() - start < ENDS_S
    # JAX aborts followers of a leader that is gone, and may be quicker than our own watch.
    words = "host 1 (127.0.0.1) has gone" if victim else ("the leader has gone", "leader task was preempted/died")
    assert any(word in survivor.text for word in ([words] if victim else words)), survivor.text
    if victim and when == "endless":
        assert "GroupLostError" in survivor.text or "EngineDeadError" in survivor.text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_hangs_ends_the_others(hosts, secret, victim):
    group = hosts.group(secret, work="endless")
    group[0].event("steps")
    os.kill(group[victim].process.pid, signal.SIGSTOP)
    survivor = group[1 - victim]
    assert survivor.wait(ENDS_S) != 0
    assert "has been silent for 8 s" in survivor.text
    os.kill(group[victim].process.pid, signal.SIGCONT)
    assert group[victim].wait(ENDS_S) != 0, "it finds the others gone"


@pytest.mark.slow
def test_of_four_members_all_end_with_the_reason(hosts, secret):
    group = hosts.group(secret, num_hosts=4, work="endless")
    group[0].event("steps", 200)
    os.kill(group[2].process.pid, signal.SIGKILL)
    for process in (group[0], group[1], group[3]):
        assert process.wait(ENDS_S) != 0
        assert "host 2 (127.0.0.1) has gone" in process.text


@pytest.mark.slow
def test_what_a_follower_lacks_is_not_used(hosts, secret, alone):
    leader, follower = hosts.group(secret, lacks={1: [["step", 16]]}, work="early")
    assert leader.event("outputs", 200) == alone
    assert leader.wait(30) == 0 and follower.wait(ENDS_S) == 0


@pytest.mark.slow
def test_a_follower_that_lacks_what_every_step_needs_ends_the_group(hosts, secret):
    leader, follower = hosts.group(secret, lacks={1: ["init"]}, work="endless")
    assert leader.wait(120) == 1 and follower.wait(ENDS_S) == 0
    assert "this compiler has a defect" in leader.text


class Proxy:
    """Between followers and their leader, on a port of its own. `spoil` changes what comes of the leader."""

    def __init__(self, port: int, spoil):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._leader, self._spoil = self._listener.getsockname()[1], port, spoil
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            caller, _ = self._listener.accept()
            try:
                leader = socket.create_connection(("127.0.0.1", self._leader))
            except OSError:
                caller.close()
                continue
            threading.Thread(target=self._pass, args=(caller, leader, bytes), daemon=True).start()
            threading.Thread(target=self._pass, args=(leader, caller, self._spoil), daemon=True).start()

    def _pass(self, source, target, change):
        try:
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        except OSError:
            pass
        finally:
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


@pytest.mark.slow
def test_a_divergent_frame_ends_the_group(hosts, secret):
    spoils = threading.Event()

    def spoil(data):
        if spoils.is_set() and len(data) > 200:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    port = free_port()
    proxy = Proxy(port, spoil)
    common = {"num_hosts": 2, "secret_file": str(secret), "work": "endless"}
    leader = hosts.program(index=0, coordinator=f"127.0.0.1:{port}", **common)
    follower = hosts.program(index=1, coordinator=f"127.0.0.1:{proxy.port}", **common)
    leader.event("steps")
    spoils.set()
    assert follower.wait(ENDS_S) != 0 and leader.wait(ENDS_S) != 0
    for process in (leader, follower):
        assert "from the leader is damaged: its checksum is another" in process.text


def test_another_secret_and_strangers(hosts, secret, tmp_path):
    """The leader waits for the right follower, whoever else calls; who has another secret is told so."""
    other = tmp_path / "other"
    other.write_text("some other secret, of nobody here")
    port = free_port()
    common = {"num_hosts": 2, "coordinator": f"127.0.0.1:{port}", "work": "idle"}
    leader = hosts.program(index=0, secret_file=str(secret), **common)
    wrong = hosts.program(index=1, secret_file=str(other), **common)
    assert wrong.wait(60) != 0 and "the leader's secret is another than this host's" in wrong.text
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)):
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(said)
    hosts.program(index=1, secret_file=str(secret), **common)
    leader.event("idle")
    assert leader.text.count("was not taken") >= 3
    with pytest.raises(OSError):  # noqa: PT011 - nobody listens any more
        socket.create_connection(("127.0.0.1", port))
