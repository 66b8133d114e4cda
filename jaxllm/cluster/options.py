"""How a process is told which group it belongs to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxllm.cluster.formation import Address
from jaxllm.cluster.membership import explicit_membership, find_membership
from jaxllm.cluster.secret import read_secret
from jaxllm.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A group of processes, one a host, that run one engine: `LLM(..., cluster=Cluster(...))` on every host, with the
    same other arguments.

    The first host, number 0, leads: its process gets the engine. On the others `LLM` does what the leader says until
    that closes the engine, and then ends the program (`SystemExit`). `ClusterError` for a host that is none of the
    group.
    """

    coordinator: str  # HOST:PORT of the first host, at which the others call
    num_hosts: int
    host_index: int
    bind: str | None = None  # address at which the first host listens (None: that of the coordinator)
    secret_file: str | Path | None = None  # the same secret on every host (None: JAXLLM_CLUSTER_SECRET_FILE)
    timeout_s: float = 300.0  # for all to come

    def __post_init__(self) -> None:
        explicit_membership(self.coordinator, self.num_hosts, self.host_index)

    @classmethod
    def find(cls, kind: str, *, coordinator: str | None = None, **options: Any) -> "Cluster":
        """The group that a launcher says: "tpu", "slurm", "mpi", or "auto" for the one that is there. `coordinator`
        takes the place of what it says of the first host. Raises `ClusterError`."""
        return cls(**asdict(find_membership(kind, coordinator=coordinator)), **options)

    @classmethod
    def of(cls, given: Any) -> "Cluster":
        """What `LLM` takes: a `Cluster`, or a kind as in `find`."""
        if isinstance(given, str):
            return cls.find(given)
        if not isinstance(given, cls):
            raise ClusterError(f"cluster={given!r:.100} is neither a Cluster nor one of auto, tpu, slurm and mpi")
        return given

    @property
    def address(self) -> Address:
        return Address.of(self.coordinator)

    @property
    def is_leader(self) -> bool:
        return self.host_index == 0

    def to_dict(self) -> dict[str, Any]:
        """Of texts and numbers, for another process of this host."""
        return asdict(self) | {"secret_file": None if self.secret_file is None else str(self.secret_file)}

    @classmethod
    def of_dict(cls, fields: Mapping[str, Any]) -> "Cluster":
        """What `to_dict` has made."""
        return cls(**fields)

    def secret(self) -> bytes:
        """`ClusterError` if there is none."""
        return read_secret(self.secret_file)
