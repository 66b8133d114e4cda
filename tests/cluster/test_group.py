"""One engine over several processes, each with a device of its own: nothing is mocked."""

import os
import signal
import socket
import threading
import time

import pytest

from tests.cluster.processes import Hosts, Strangers, free_port

ENDS_S = 15.0
SMALL = dict(max_num_seqs=1, max_num_batched_tokens=8)  # few executables
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def alone():
    """What one device makes of the works, by their names."""
    hosts = Hosts()
    process = hosts.program(index=None)
    found = {"outputs": process.event("outputs", 200), "few": process.event("few")}
    hosts.close()
    return found


def all_end(processes, words, *, within_s=ENDS_S):
    """Each within that time from now, for a reason that has one of `words`."""
    end = time.monotonic() + within_s
    for process in processes:
        assert process.wait(max(0.1, end - time.monotonic())) != 0
        assert any(word in process.text for word in words), process.text


@pytest.mark.parametrize(
    ("num_hosts", "mesh"),
    [
        (2, "tensor=2"),
        pytest.param(2, "data=2", marks=pytest.mark.slow),
        pytest.param(4, "data=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_device(hosts, secret, alone, num_hosts, mesh):
    engine = {"mesh": mesh} | ({"num_blocks": 12, "max_num_seqs": 3} if "data" in mesh else {})
    leader, *followers = hosts.group(secret, num_hosts=num_hosts, engine=engine)
    assert leader.event("outputs", 250) == alone["outputs"]
    assert leader.event("preemptions") > 0 and leader.event("swapped") > 0
    assert leader.wait(30) == 0
    for follower in followers:
        assert follower.wait(ENDS_S) == 0 and "the leader was closed" in follower.text


@pytest.mark.slow
def test_a_group_that_slurm_tells_of(hosts, secret, alone):
    """`LLM(cluster="slurm")`, with what srun tells its tasks; each node has a loopback address of its own."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.44.0.[1-2]", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"JAXLLM_CLUSTER_SECRET_FILE": str(secret)}
    leader, follower = (
        hosts.program(
            launcher="slurm",
            work="few",
            environ=step | {"SLURM_PROCID": str(task), "SLURMD_NODENAME": f"127.44.0.{task + 1}"},
        )
        for task in range(2)
    )
    assert leader.event("few") == alone["few"]
    assert leader.wait(30) == 0 and follower.wait(ENDS_S) == 0


# A leader that is lost is nothing else to three followers than to one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "victim", "num_hosts"),
    [
        ("idle", "leader", 2),
        ("idle", "follower", 4),
        ("endless", "leader", 2),
        ("endless", "follower", 2),
        ("endless", "follower", 4),
        ("compiling", "leader", 2),
        ("compiling", "follower", 4),
    ],
)
def test_a_member_that_dies_ends_the_others(hosts, secret, num_hosts, victim, when):
    is_compiling = when == "compiling"
    work = "idle" if is_compiling else when
    group = hosts.group(secret, num_hosts=num_hosts, work=work, engine=SMALL, compiles_all=is_compiling)
    group[0].event({"idle": "idle", "endless": "steps", "compiling": "built"}[when])
    index = 0 if victim == "leader" else num_hosts // 2
    os.kill(group[index].process.pid, signal.SIGKILL)
    # JAX aborts followers of a leader that is gone, and may be quicker than our own watch.
    words = (
        [f"host {index} (127.0.0.1) has gone"] if index else ["the leader has gone", "leader task was preempted/died"]
    )
    all_end([process for process in group if process is not group[index]], words)
    if index and when == "endless" and num_hosts == 2:  # of more, the leader may wait for one that lives, and hang
        assert "GroupLostError" in group[0].text or "EngineDeadError" in group[0].text


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "num_hosts"), [("leader", 2), ("follower", 4)])
def test_a_member_that_hangs_ends_the_others(hosts, secret, num_hosts, victim):
    group = hosts.group(secret, num_hosts=num_hosts, work="endless", engine=SMALL)
    group[0].event("steps")
    hung = group[0 if victim == "leader" else num_hosts // 2]
    os.kill(hung.process.pid, signal.SIGSTOP)
    all_end([process for process in group if process is not hung], ["has been silent for 8 s"])
    os.kill(hung.process.pid, signal.SIGCONT)
    assert hung.wait(ENDS_S) != 0, "it finds the others gone"


@pytest.mark.slow
def test_what_a_follower_lacks_is_not_used(hosts, secret, alone):
    lacks = {1: [["step", 16]]}
    leader, follower = hosts.group(secret, num_hosts=2, lacks=lacks, work="early", compiles_all=True)
    assert leader.event("few", 200) == alone["few"]
    assert leader.wait(30) == 0 and follower.wait(ENDS_S) == 0


@pytest.mark.slow
def test_a_follower_that_lacks_what_every_step_needs_ends_the_group(hosts, secret):
    lacks = {2: ["init"]}
    leader, *followers = hosts.group(secret, num_hosts=4, lacks=lacks, work="endless", engine=SMALL)
    assert leader.wait(120) == 1 and "this compiler has a defect" in leader.text
    for follower in followers:
        assert follower.wait(ENDS_S) == 0 and "the leader was closed" in follower.text


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
    ports = [port, Proxy(port, spoil).port]
    common = {"secret_file": str(secret), "work": "endless", "engine": SMALL}
    group = [hosts.program(index=i, coordinator=f"127.0.0.1:{ports[i]}", **common) for i in range(2)]
    group[0].event("steps")
    spoils.set()
    all_end(group, ["from the leader is damaged: its checksum is another"])


def test_another_secret_and_strangers(hosts, secret, tmp_path):
    """The leader waits for the right followers, whoever else calls; who has another secret is told so."""
    other = tmp_path / "other"
    other.write_text("some other secret, of nobody here")
    port = free_port()
    common = {"coordinator": f"127.0.0.1:{port}", "work": "endless", "engine": SMALL}
    leader = hosts.program(index=0, secret_file=str(secret), **common)
    wrong = hosts.program(index=1, secret_file=str(other), **common)
    assert wrong.wait(60) != 0 and "the leader's secret is another than this host's" in wrong.text
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)):
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(said)
    with Strangers(port, 40):
        hosts.program(index=1, secret_file=str(secret), **common)
        leader.event("steps")
    assert leader.text.count("was not taken") >= 3
    with pytest.raises(OSError):  # noqa: PT011 - nobody listens any more
        socket.create_connection(("127.0.0.1", port))
