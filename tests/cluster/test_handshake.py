"""Leader and follower make sure of each other, and neither of anybody else."""

import socket
import threading

import pytest

from jaxllm.cluster import handshake
from jaxllm.cluster.secret import read_secret
from jaxllm.errors import ClusterError

SECRET, SESSION = b"a secret of this group", bytes(range(32))


def meet(secret: bytes, verdict: int = handshake.TAKEN, *, index: int = 1, theirs: bytes = SECRET) -> list:
    """What comes of both sides: keys or an error, the leader's first."""
    found = [None, None]

    def lead(connection):
        with connection:
            try:
                candidate = handshake.meet(connection, SECRET)
                found[0] = handshake.answer(connection, SECRET, SESSION, candidate, verdict)
            except ClusterError as error:
                found[0] = error

    ours, others = socket.socketpair()
    thread = threading.Thread(target=lead, args=(ours,))
    thread.start()
    with others:
        try:
            found[1] = handshake.introduce(others, secret, index, 3)
        except ClusterError as error:
            found[1] = error
    thread.join()
    return found


def test_both_get_the_same_keys():
    leader, follower = meet(SECRET)
    assert leader == follower and len(set(leader)) == 2
    other, _ = meet(SECRET, index=2)
    assert other.commands == leader.commands and other.reports != leader.reports


def test_another_secret_is_refused_on_both_sides():
    leader, follower = meet(b"some other secret")
    assert "does not know the group's secret" in str(leader)
    assert "secret is another than this host's" in str(follower)


@pytest.mark.parametrize(
    ("verdict", "words"), [(handshake.WRONG_NUMBER, "--num-hosts"), (handshake.WRONG_INDEX, "no place for host 1")]
)
def test_who_is_not_wanted_hears_why(verdict, words):
    _, follower = meet(SECRET, verdict)
    assert words in str(follower)


def test_a_leader_that_does_not_know_the_secret_is_not_followed():
    ours, others = socket.socketpair()

    def pretend():
        with ours:
            ours.sendall(handshake.MAGIC + bytes(32))
            handshake.receive_exactly(ours, 32 + 8 + 32)
            ours.sendall(bytes([handshake.TAKEN]) + SESSION + bytes(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with others, pytest.raises(ClusterError, match="secret is another"):
        handshake.introduce(others, SECRET, 1, 2)
    thread.join()


def test_another_service_is_no_leader():
    ours, others = socket.socketpair()
    with ours, others:
        ours.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
        with pytest.raises(ClusterError, match="no leader of this version"):
            handshake.introduce(others, SECRET, 1, 2)


def test_an_answer_serves_once():
    """What a follower said to one challenge proves nothing to another."""
    said = []
    for sent in (None, said):
        ours, others = socket.socketpair()
        with ours, others:
            result = []
            thread = threading.Thread(target=lambda: result.append(_met(ours)))  # noqa: B023 - it ends in this turn
            thread.start()
            challenge = handshake.receive_exactly(others, len(handshake.MAGIC) + 32)
            if sent is None:
                answer = bytes(32) + (1).to_bytes(4, "little") + (2).to_bytes(4, "little")
                said.append(answer + handshake._proof(SECRET, b"follower", challenge + answer))
            others.sendall(said[0])
            thread.join()
        assert isinstance(result[0], handshake.Candidate if sent is None else ClusterError)


def _met(connection):
    try:
        return handshake.meet(connection, SECRET)
    except ClusterError as error:
        return error


def test_secrets(tmp_path):
    file = tmp_path / "secret"
    file.write_text("  0123456789abcdef0123\n")
    assert read_secret(file) == b"0123456789abcdef0123"
    assert read_secret(None, {"JAXLLM_CLUSTER_SECRET_FILE": str(file)}) == b"0123456789abcdef0123"
    with pytest.raises(ClusterError, match="openssl rand"):
        read_secret(None, {})
    with pytest.raises(ClusterError, match="can't be read"):
        read_secret(tmp_path / "none")
    file.write_text("short")
    with pytest.raises(ClusterError, match="has 5 bytes; 16 are the least"):
        read_secret(file)
