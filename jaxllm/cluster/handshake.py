"""How a follower and the leader make sure of each other: by proofs that both know the secret, which neither sends.

The leader greets with a random challenge; the follower answers with one of its own, with who it is, and its proof; the
leader says whether it takes it, with its own proof. Both proofs cover both challenges: neither can be used again.
"""

import os
import socket
import struct
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from jaxllm.cluster.frames import receive_exactly
from jaxllm.errors import ClusterError

MAGIC = b"jaxllm group 1\n"
SESSION_BYTES = 32
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_WHO = struct.Struct("<II")  # its index, and how many hosts it thinks there are
TAKEN, WRONG_SECRET, WRONG_NUMBER, WRONG_INDEX = range(4)  # what the leader answers


class NoPlaceError(ClusterError):
    """The leader has another host with this index, which may have gone without its noticing yet."""


class FrameKeys(NamedTuple):
    """Of the frames between the leader and a follower."""

    commands: bytes  # from the leader; the same for all followers
    reports: bytes  # from this follower


class Candidate(NamedTuple):
    """Who knows the secret, and says that it is this follower."""

    index: int
    num_hosts: int
    said: bytes  # by both, for the leader's proof


def meet(connection: socket.socket, secret: bytes) -> Candidate:
    """The leader's side. `ClusterError` for who does not know the secret, OSError if the connection breaks."""
    challenge = MAGIC + os.urandom(_CHALLENGE_BYTES)
    connection.sendall(challenge)
    answer = receive_exactly(connection, _CHALLENGE_BYTES + _WHO.size + _PROOF_BYTES)
    said, proof = challenge + answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not compare_digest(proof, _proof(secret, b"follower", said)):
        connection.sendall(bytes([WRONG_SECRET]) + bytes(SESSION_BYTES + _PROOF_BYTES))
        raise ClusterError("it does not know the group's secret")
    index, num_hosts = _WHO.unpack_from(answer, _CHALLENGE_BYTES)
    return Candidate(index, num_hosts, said)


def answer(connection: socket.socket, secret: bytes, session: bytes, candidate: Candidate, verdict: int) -> FrameKeys:
    """Tells a candidate what the leader makes of it. `session` is random, and of this group alone."""
    said = candidate.said + bytes([verdict]) + session
    connection.sendall(bytes([verdict]) + session + _proof(secret, b"leader", said))
    return _keys(secret, session, candidate.index)


def introduce(connection: socket.socket, secret: bytes, index: int, num_hosts: int) -> FrameKeys:
    """The follower's side. `ClusterError` if the leader does not take it, or is none; OSError if the connection breaks
    before that is said."""
    challenge = receive_exactly(connection, len(MAGIC) + _CHALLENGE_BYTES)
    if not challenge.startswith(MAGIC):
        raise ClusterError("what listens there is no leader of this version of jaxllm; check HOST:PORT")
    answer = os.urandom(_CHALLENGE_BYTES) + _WHO.pack(index, num_hosts)
    said = challenge + answer
    connection.sendall(answer + _proof(secret, b"follower", said))
    told = receive_exactly(connection, 1 + SESSION_BYTES + _PROOF_BYTES)
    verdict, session, proof = told[0], told[1:-_PROOF_BYTES], told[-_PROOF_BYTES:]
    is_leader = compare_digest(proof, _proof(secret, b"leader", said + told[:-_PROOF_BYTES]))
    if verdict == WRONG_SECRET or not is_leader:
        raise ClusterError("the leader's secret is another than this host's; give both the same file")
    if verdict == WRONG_NUMBER:
        raise ClusterError(f"the leader's group is not of {num_hosts} hosts; give all the same --num-hosts")
    if verdict == WRONG_INDEX:
        raise NoPlaceError(
            f"the leader has no place for host {index}: another has that --host-index, or it is not one from 1 to "
            f"{num_hosts - 1}"
        )
    return _keys(secret, session, index)


def _proof(secret: bytes, side: bytes, said: bytes) -> bytes:
    return _keyed(secret, b"jaxllm proof " + side + b"\0" + said)


def _keys(secret: bytes, session: bytes, index: int) -> FrameKeys:
    reports = _keyed(secret, b"jaxllm reports\0" + session + index.to_bytes(4, "little"))
    return FrameKeys(_keyed(secret, b"jaxllm commands\0" + session), reports)


def _keyed(secret: bytes, text: bytes) -> bytes:
    key = blake2b(secret, digest_size=32).digest()  # a key has 64 bytes at most
    return blake2b(text, digest_size=_PROOF_BYTES, key=key).digest()
