"""A server over several processes: what clients and orchestrators see when one of them dies."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chat_model import write_model
from tests.cluster.processes import free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIZES = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8, block_size=8, num_blocks=16, dtype="float32")
FORMS_S, ENDS_S = 120.0, 15.0
of_whom = pytest.mark.parametrize(("victim", "num_hosts"), [("leader", 2), ("follower", 4)])


class Served:
    """The servers of a group."""

    def __init__(self, hosts, secret, model, num_hosts=2):
        self.port, cluster = free_port(), f"127.0.0.1:{free_port()}"
        options = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        common = ["-m", "jaxllm.serve", str(model), "--coordinator", cluster, "--num-hosts", str(num_hosts), *options]
        common += ["--cluster-secret-file", str(secret), "--served-model-name", "tiny"]
        self.leader, *self.followers = (
            hosts.start(*common, "--host-index", str(i), "--port", str(self.port)) for i in range(num_hosts)
        )
        self.wait_ready()

    def get(self, path: str) -> tuple[int, dict]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:  # noqa: S310 - as below
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, {}

    def wait_ready(self) -> None:
        until(lambda: self.get("/ready")[0] == 200, FORMS_S, f"ready:\n{self.leader.text}")

    def ask(self, max_tokens: int = 8, **fields) -> dict:
        """A completion of a prompt that is the same each time."""
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=200) as answer:  # noqa: S310 - to ourselves
            return json.load(answer)

    def down(self) -> str:
        """The reason that /health gives, which it must within two seconds."""
        until(lambda: self.get("/health")[0] == 503, 2.0, f"/health says so:\n{self.leader.text}")
        return self.get("/health")[1]["reason"]

    def child(self, index: int) -> int:
        if index:
            return self.followers[index - 1].child("jaxllm.cluster.member")
        return self.leader.child("engine_process")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def texts(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@of_whom
def test_a_member_that_dies_idle(hosts, secret, model, num_hosts, victim):
    served = Served(hosts, secret, model, num_hosts)
    index = 0 if victim == "leader" else num_hosts // 2
    want, pid = texts(served.ask()), served.child(index)
    os.kill(pid, signal.SIGKILL)
    assert (f"host {index} (127.0.0.1) has gone" if index else "the engine's process ended") in served.down()
    assert texts(served.ask()) == want, "who asks meanwhile is served afterwards"
    served.wait_ready()
    assert served.child(index) not in (0, pid)
    served.leader.process.send_signal(signal.SIGTERM)
    assert served.leader.wait(30) == 0
    assert [follower.wait(ENDS_S) for follower in served.followers] == [0] * (num_hosts - 1)


def test_requests_that_had_not_begun_are_served_and_others_hear_why(hosts, secret, model):
    served, index = Served(hosts, secret, model), 1
    alone = texts(served.ask(48))
    with ThreadPoolExecutor(8) as pool:
        started = threading.Event()

        def ask(i):
            try:
                answer = served.ask(48)
                started.set()
                return texts(answer)
            except urllib.error.HTTPError as error:
                return json.load(error)["error"]["message"]

        asked = [pool.submit(ask, i) for i in range(8)]  # two run at once
        started.wait(60)
        os.kill(served.child(index), signal.SIGKILL)
        answers = [one.result(200) for one in asked]
    served_ones = [answer for answer in answers if answer == alone]
    others = [answer for answer in answers if answer != alone]
    assert len(others) <= 2 and len(served_ones) >= 6, answers
    assert all(f"host {index}" in message or "engine" in message for message in others)


@of_whom
def test_a_member_that_hangs_is_killed_and_started_again(hosts, secret, model, num_hosts, victim):
    served = Served(hosts, secret, model, num_hosts)
    want, pid = texts(served.ask()), served.child(0 if victim == "leader" else num_hosts // 2)
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert "silent" in served.down()
    until(lambda: not os.path.exists(f"/proc/{pid}"), ENDS_S, "the hung process has gone")
    assert time.monotonic() - start < ENDS_S
    served.wait_ready()
    assert texts(served.ask()) == want


def test_a_host_of_four_that_comes_back(hosts, secret, model):
    """The supervisor itself is killed, as a host that fails: its successor finds the group again."""
    served = Served(hosts, secret, model, 4)
    want = texts(served.ask())
    lost = served.followers[1]
    command = lost.process.args[1:]
    lost.close()
    assert "host 2 (127.0.0.1) has gone" in served.down()
    hosts.start(*command)
    served.wait_ready()
    assert texts(served.ask()) == want
    served.leader.process.send_signal(signal.SIGTERM)
    assert served.leader.wait(30) == 0
    for follower in (served.followers[0], served.followers[2], hosts.processes[-1]):
        assert follower.wait(ENDS_S) == 0
