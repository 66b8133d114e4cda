"""The process of a follower, which its supervisor starts: `python -m jaxllm.cluster.member DESCRIPTOR`."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from jaxllm.errors import GroupLostError, JaxLLMError
from jaxllm.stderr import say

BEAT_S = 0.25
EXIT_LOST, EXIT_REFUSED = 1, 2  # another start may do; or would not
MAX_OPTIONS_BYTES = 1 << 20


def main(descriptor: int) -> int:
    """Returns the exit status."""
    from jaxllm.cli.environment import logging_level

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging_level(), format="%(levelname)s follower: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    supervisor = socket.socket(fileno=descriptor)
    options = msgspec.msgpack.decode(supervisor.recv(MAX_OPTIONS_BYTES))
    for run in (_beat, _watch):
        threading.Thread(target=run, args=(supervisor,), daemon=True).start()
    try:
        _follow(options)
    except GroupLostError:  # the log says so already
        return EXIT_LOST
    except (ValueError, OSError, JaxLLMError) as error:
        say(f"error: {error}")
        return EXIT_REFUSED
    except Exception:
        logging.getLogger(__name__).exception("this host failed")
        return EXIT_LOST
    return 0


def _follow(options: dict[str, Any]) -> None:
    from jaxllm.cli.common import setup_compilation_cache, setup_device_memory
    from jaxllm.cluster.options import Cluster

    setup_device_memory(options.get("gpu_memory_utilization"))
    setup_compilation_cache()
    cluster = Cluster.of_dict(options.pop("cluster"))
    from jaxllm.cluster.follow import follow  # imports jax

    follow(cluster=cluster, **options)


def _beat(supervisor: socket.socket) -> None:
    while True:
        supervisor.send(b".")
        time.sleep(BEAT_S)


def _watch(supervisor: socket.socket) -> None:
    """Without a supervisor this process has no purpose."""
    supervisor.recv(1)
    os._exit(EXIT_LOST)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(status)  # neither a compilation nor JAX's other processes are waited for
