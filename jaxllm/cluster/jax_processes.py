"""JAX over the processes of a group."""

import socket

import jax

from jaxllm.cluster.formation import Address
from jaxllm.errors import ClusterError

_BEAT_S = 30  # JAX's own watch, which aborts the process without a reason: ours comes first
_START_S, _END_S = 120, 10


def free_port(host: str) -> int:
    """One at which nobody listens on this host's address."""
    family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as found:
        found.bind(where)
        return found.getsockname()[1]


def is_joined() -> bool:
    """Whether the program has called `jax.distributed.initialize` already."""
    return jax.distributed.is_initialized()


def join(coordinator: Address, num_hosts: int, index: int, bind: str | None = None) -> None:
    """Makes the devices of all hosts JAX's devices. `ClusterError` if it can't."""
    if is_joined():
        if (jax.process_count(), jax.process_index()) != (num_hosts, index):
            raise ClusterError(
                f"the program has joined JAX's processes as {jax.process_index()} of {jax.process_count()}, and the "
                f"group wants {index} of {num_hosts}; give the same to both"
            )
        return
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and nothing comes of it
    listens_at = None if index else str(Address(bind or coordinator.host, coordinator.port))
    try:
        jax.distributed.initialize(
            str(coordinator),
            num_hosts,
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=_START_S,
            heartbeat_timeout_seconds=_BEAT_S,
            shutdown_timeout_seconds=_END_S,
            coordinator_bind_address=listens_at,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"JAX's processes did not find each other at {coordinator}: {error}. LLM(cluster=...) must come before "
            "anything else uses JAX; and hosts must reach each other at all ports"
        ) from error


def check_mesh(mesh: jax.sharding.Mesh) -> None:
    """`ClusterError` unless every process has devices of `mesh`."""
    found = {device.process_index for device in mesh.devices.flat}
    if missing := sorted(set(range(jax.process_count())) - found):
        sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ClusterError(
            f"the mesh {sizes!r} has no device of hosts {missing}; let it have all {jax.device_count()} devices of the "
            f"group, {jax.local_device_count()} a host, or leave those hosts out"
        )
