"""The options of an engine over several hosts."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from jaxllm.errors import ClusterError

if TYPE_CHECKING:
    from jaxllm.cluster.options import Cluster

KINDS = ("auto", "tpu", "slurm", "mpi")
_PLAIN = ("coordinator", "num_hosts", "host_index")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them to a parser. The same command runs on every host."""
    group = parser.add_argument_group(
        "several hosts", "One engine over the devices of all hosts. The same command runs on each; the first one leads."
    )
    add = group.add_argument
    add("--cluster", choices=KINDS, help="which hosts there are, and which this is, from what started the command")
    add("--coordinator", metavar="HOST:PORT", help="the first host's address, at which the others call")
    add("--num-hosts", type=int, metavar="N", help="without --cluster: how many hosts there are")
    add("--host-index", type=int, metavar="N", help="without --cluster: which host this is, from 0, the first")
    add("--bind", metavar="ADDR", help="address at which the first host listens (default: that of the coordinator)")
    add(
        "--cluster-secret-file",
        metavar="FILE",
        help="with the same secret on each (default: JAXLLM_CLUSTER_SECRET_FILE)",
    )


def cluster_of(arguments: argparse.Namespace) -> "Cluster | None":
    """The group that the options describe; None without any. `ClusterError` for what is none."""
    from jaxllm.cluster.options import Cluster

    given = [name for name in _PLAIN if getattr(arguments, name) is not None]
    if arguments.cluster is None and not given:
        for name in ("bind", "cluster_secret_file"):
            if getattr(arguments, name) is not None:
                raise ClusterError(f"{_flag(name)} is for several hosts; say which with --cluster or --coordinator")
        return None
    options = {"bind": arguments.bind, "secret_file": arguments.cluster_secret_file}
    if arguments.cluster is not None:
        if known := [name for name in given if name != "coordinator"]:
            raise ClusterError(f"--cluster finds out what {_flag(known[0])} says; give one or the other")
        return Cluster.find(arguments.cluster, coordinator=arguments.coordinator, **options)
    if missing := [name for name in _PLAIN if name not in given]:
        raise ClusterError(f"{_flag(given[0])} needs {_flag(missing[0])} too; give {', '.join(map(_flag, _PLAIN))}")
    return Cluster(**{name: getattr(arguments, name) for name in _PLAIN}, **options)


def keep_stdout() -> None:
    """Has what libraries in C++ print on standard output, as gloo does, go to standard error: whoever reads the output
    gets what the command writes, and nothing else."""
    sys.stdout.flush()
    ours = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
