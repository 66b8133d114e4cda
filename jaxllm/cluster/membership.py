"""
Who is in a group of hosts and which of them this is: from options, Google's TPUs, Slurm or Open MPI.

It reads the environment and, on TPU VMs, the metadata server. It knows no device and connects to no other host.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.cluster.node_list import expand_node_list
from jaxllm.cluster.tpu_metadata import instance_attribute, on_google_cloud
from jaxllm.errors import ClusterError

DEFAULT_PORT = 8577
_Told = tuple[str | None, int, int]  # host 0 if it is known, how many there are, which this is
_BY_HAND = "--coordinator HOST:PORT, --num-hosts N and --host-index I"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who is in a group of processes, one a host, and which of them this is."""

    coordinator: str  # HOST:PORT of host 0 (IPv6 in brackets), where the leader listens for the others
    num_hosts: int
    host_index: int  # 0: the leader


def explicit_membership(coordinator: str, num_hosts: int, host_index: int) -> Membership:
    """What options say, checked. Raises `ClusterError`."""
    split_address(coordinator)
    if num_hosts < 1:
        raise ClusterError(f"--num-hosts is {num_hosts}: it counts all hosts of the group, host 0 too, so at least 1")
    if not 0 <= host_index < num_hosts:
        raise ClusterError(
            f"--host-index {host_index} is none of a group of {num_hosts}: give each host another one of "
            f"0 to {num_hosts - 1}; 0 is the host of --coordinator"
        )
    return Membership(coordinator=coordinator, num_hosts=num_hosts, host_index=host_index)


def find_membership(
    kind: str, environ: Mapping[str, str] = os.environ, *, port: int = DEFAULT_PORT, coordinator: str | None = None
) -> Membership:
    """
    What a launcher says: `kind` is tpu, slurm, mpi, or auto for the one of these that is there.

    `coordinator`: HOST:PORT to use in place of the address that the launcher knows for host 0. Raises `ClusterError`.
    """
    kind = _detected(environ) if kind == "auto" else kind
    if kind not in _KINDS:
        raise ClusterError(f"--cluster {kind} is unknown: it is one of auto, {', '.join(_KINDS)}")
    first_host, num_hosts, host_index = _KINDS[kind](environ)
    if coordinator is None:
        if first_host is None:
            raise ClusterError(
                f"--cluster {kind}: the launcher does not tell where rank 0 runs, only, at most, where it runs itself; "
                "add --coordinator HOST:PORT with the host of rank 0"
            )
        coordinator = join_address(first_host, port)
    return explicit_membership(coordinator, num_hosts, host_index)


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT -> host, without the brackets of IPv6, and port. Raises `ClusterError`."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([^\s\[\]:/]+)):(\d{1,5})", address)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ClusterError(
            f"{address!r} is no HOST:PORT: give a name or an address and a port of 1 to 65535, as in "
            f"10.0.0.1:{DEFAULT_PORT}, or [fd00::1]:{DEFAULT_PORT} with IPv6"
        )
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Host and port -> HOST:PORT, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _detected(environ: Mapping[str, str]) -> str:
    """The kind of launcher whose traces are there."""
    found = {
        "tpu": "TPU_WORKER_HOSTNAMES" in environ,
        "slurm": "SLURM_JOB_ID" in environ,
        "mpi": "OMPI_COMM_WORLD_SIZE" in environ,
    }
    kinds = [kind for kind, is_there in found.items() if is_there]
    if not kinds and on_google_cloud(environ) and instance_attribute("agent-worker-number", environ) is not None:
        kinds = ["tpu"]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise ClusterError(
            f"--cluster auto: this could be {' or '.join(kinds)}; say which, as in --cluster {kinds[-1]}"
        )
    raise ClusterError(
        "--cluster auto: neither a TPU slice (TPU_WORKER_HOSTNAMES, or a TPU VM's metadata), nor Slurm (SLURM_JOB_ID), "
        f"nor Open MPI (OMPI_COMM_WORLD_SIZE) is there; give {_BY_HAND}"
    )


def _tpu(environ: Mapping[str, str]) -> _Told:
    """From GKE's variables, or else from the metadata server."""
    if "TPU_WORKER_HOSTNAMES" in environ:
        _refuse_slices(environ.get("MEGASCALE_NUM_SLICES"))
        hosts = _required(environ, "TPU_WORKER_HOSTNAMES", "tpu").split(",")
        index = _number(environ, "TPU_WORKER_ID", "tpu")
    else:
        slices = re.search(r"^MEGASCALE_NUM_SLICES:(.*)$", instance_attribute("tpu-env", environ) or "", re.MULTILINE)
        _refuse_slices(environ.get("MEGASCALE_NUM_SLICES") or (slices and slices[1]))
        names = ("worker-network-endpoints", "agent-worker-number")
        told = {name: instance_attribute(name, environ) for name in names}
        told = {name: value for name, value in told.items() if value is not None}
        # An endpoint is a host, or NAME:ID:ADDRESS in older TPU VMs.
        hosts = [endpoint.split(":")[-1] for endpoint in _required(told, names[0], "tpu").split(",")]
        index = _number(told, names[1], "tpu")
    hosts = [host.strip() for host in hosts]
    if "" in hosts or len(set(hosts)) < len(hosts):
        raise ClusterError(f"--cluster tpu needs one process a host, and these are the hosts: {', '.join(hosts)}")
    return hosts[0], len(hosts), index


def _refuse_slices(told: str | None) -> None:
    num_slices = (told or "1").strip(" '\"")
    if num_slices != "1":
        raise ClusterError(
            f"this job has {num_slices} TPU slices (MEGASCALE_NUM_SLICES), and a group is of the hosts of one: "
            "start a server on each slice, in jobs of their own"
        )


def _slurm(environ: Mapping[str, str]) -> _Told:
    """From the variables of a job step, with one task a node."""
    if "SLURM_STEP_NODELIST" not in environ:
        raise ClusterError(
            "--cluster slurm: this process is in no job step (there is no SLURM_STEP_NODELIST); start it on every node "
            "with srun --ntasks-per-node=1"
        )
    nodes = expand_node_list(environ["SLURM_STEP_NODELIST"])
    num_tasks, index = (_number(environ, name, "slurm") for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
    if num_tasks != len(nodes):
        raise ClusterError(
            f"--cluster slurm: the step has {num_tasks} tasks on {len(nodes)} nodes, but one process drives all "
            "devices of a node; start it with srun --ntasks-per-node=1"
        )
    here = environ.get("SLURMD_NODENAME")
    if here and index < len(nodes) and nodes[index] != here:
        raise ClusterError(
            f"--cluster slurm: task {index} runs on {here}, and node {index} of the step is {nodes[index]}; "
            "start it with srun --distribution=block"
        )
    return nodes[0], len(nodes), index


def _mpi(environ: Mapping[str, str]) -> _Told:
    """From Open MPI's variables, which tell where mpirun runs: rank 0 is there too, unless it sees otherwise."""
    size, index = (_number(environ, f"OMPI_COMM_WORLD_{name}", "mpi") for name in ("SIZE", "RANK"))
    if (on_this_host := environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) != "1":
        raise ClusterError(
            f"--cluster mpi: {on_this_host} ranks run on this host, but one process drives all devices of a host; "
            "start them with mpirun --map-by ppr:1:node"
        )
    launcher = _mpi_launcher(environ)
    is_elsewhere = launcher is not None and index == 0 and not _is_here(launcher)
    return None if is_elsewhere else launcher, size, index


def _mpi_launcher(environ: Mapping[str, str]) -> str | None:
    """The host where mpirun runs: Open MPI 4 tells its addresses, Open MPI 5 its name."""
    # JOB;tcp://10.0.0.1,10.1.0.1:PORT or JOB;tcp6://[fd00::1,fd00::2]:PORT, or both
    uri = re.search(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri:
        return uri[1] or uri[2]
    name = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    return name and name[1]


def _is_here(host: str) -> bool:
    """Whether `host` is a name or an address of this machine, where a socket could listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(address)
    except OSError:
        return False
    return True


def _required(told: Mapping[str, str], name: str, kind: str) -> str:
    if not told.get(name):
        raise ClusterError(f"--cluster {kind}: there is no {name}, which its launcher sets; give {_BY_HAND}")
    return told[name]


def _number(told: Mapping[str, str], name: str, kind: str) -> int:
    text = _required(told, name, kind).strip()
    if not re.fullmatch(r"\d{1,9}", text):
        raise ClusterError(f"--cluster {kind}: {name} is {text!r}, no number; give {_BY_HAND}")
    return int(text)


_KINDS = {"tpu": _tpu, "slurm": _slurm, "mpi": _mpi}
