"""What the command stream costs a leader's step loop for each decode step: from commands to when it may go on.

Followers are processes of this machine that read, check and parse what they get, and compute nothing.
"""

import secrets
import statistics
import subprocess
import sys
import time
from typing import Any

from jaxllm.cluster import messages
from jaxllm.cluster.formation import Address, call, gather, listen
from jaxllm.cluster.frames import BEAT, FrameReader, frame
from jaxllm.cluster.jax_processes import free_port
from jaxllm.cluster.links import BEAT_S, Links
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.packing import SampleLayout, StepLayout

_HOST, _BLOCK_SIZE, _TIMEOUT_S = "127.0.0.1", 16, 60.0
_PAUSE_S = 0.005  # between steps, in which followers read


def measure(num_followers: int, running: list[int], steps: int) -> list[dict[str, Any]]:
    """Microseconds of a step for each number of running requests."""
    secret, address = secrets.token_hex(32), Address(_HOST, free_port(_HOST))
    command = [sys.executable, "-m", "benchmarks.followers", secret, str(address.port), str(num_followers)]
    followers = [subprocess.Popen([*command, str(index)]) for index in range(1, num_followers + 1)]
    try:
        with listen(address, None) as listener:
            links = gather(listener, secret.encode(), num_followers + 1, _TIMEOUT_S)
        found = [_measure_one(links, n, steps) for n in running]
        links.close()
    finally:
        for follower in followers:
            follower.terminate()
            follower.wait()
    return found


def _measure_one(links: Links, running: int, steps: int) -> dict[str, Any]:
    step, samples = StepLayout(running, running, _BLOCK_SIZE), SampleLayout(running, running)
    times, encoding, size = [], [], 0
    for _ in range(steps):
        commands = [
            Command(("step", running), (step._padding.copy(),)),
            Command(("sample", running), (samples._padding.copy(),)),
        ]
        start = time.perf_counter()
        body = messages.encode_commands(commands)
        encoded = time.perf_counter()
        links.send(body)
        times.append(time.perf_counter() - start)
        encoding.append(encoded - start)
        size = len(body)
        time.sleep(_PAUSE_S)
    median, most = statistics.median(times), statistics.quantiles(times, n=10)[-1]
    return {
        "running": running,
        "bytes": size,
        "step_us": round(1e6 * median, 1),
        "step_p90_us": round(1e6 * most, 1),
        "encoding_us": round(1e6 * statistics.median(encoding), 1),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = ["running  bytes  step us  p90 us  of it encoding us"]
    form = "{running:7d} {bytes:6d} {step_us:8.1f} {step_p90_us:7.1f} {encoding_us:18.1f}"
    return "\n".join(lines + [form.format(**one) for one in found])


def follow(secret: str, port: int, num_followers: int, index: int) -> None:
    """What each follower's process does, until it is ended."""
    connection, keys = call(Address(_HOST, port), secret.encode(), index, num_followers + 1, _TIMEOUT_S)
    reader, beat, beat_at = FrameReader(keys.commands, "the leader"), frame(keys.reports, BEAT, messages.BEAT), 0.0
    with connection:
        while data := connection.recv(1 << 16):
            for body in reader.feed(data):
                messages.decode_from_leader(body)
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + BEAT_S
                connection.sendall(beat)


if __name__ == "__main__":
    given = sys.argv[1:]
    follow(given[0], *(int(one) for one in given[1:]))
