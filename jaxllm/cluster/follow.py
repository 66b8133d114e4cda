"""What a program does on the hosts that follow."""

import logging
from typing import Any

import jax

from jaxllm.checkpoint.loader import staging_bytes
from jaxllm.cluster import jax_processes, messages
from jaxllm.cluster.follower import Connection, Follower
from jaxllm.cluster.formation import Address
from jaxllm.cluster.leader import LeaderGroup
from jaxllm.cluster.machine import machine
from jaxllm.cluster.options import Cluster
from jaxllm.engine.build import choose_mesh, open_model
from jaxllm.engine.device import device_memory
from jaxllm.engine.device.command_log import Header
from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.memory_plan import plan_engine
from jaxllm.engine.device.model_shape import with_config
from jaxllm.engine.model_source import Reading
from jaxllm.engine.recording import header_of
from jaxllm.errors import ClusterError, GroupLostError

log = logging.getLogger(__name__)

_SAME = ("jaxllm", "jax", "platform", "config_digest", "params_digest", "dtype", "mesh")  # fields of a `Header`
_FIRST_VERSION = 1  # of the parameters: the model's own


def follow(
    model: Any = None,
    *,
    cluster: Cluster,
    dtype: str = "auto",
    mesh: Any = None,
    tensor_parallel_size: int | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
    hf_overrides: dict[str, Any] | None = None,
    task: str | None = None,
    compilation_cache: Any = None,
    **of_leader: Any,
) -> None:
    """Does what the leader says until it closes its engine. The arguments are those of `build_engine`; of `of_leader`,
    the engine's sizes, the leader's are taken.

    `GroupLostError` if the group is lost; seconds later the process ends, as a step may hang that can't be interrupted.
    `ClusterError` for a group that this host can't join.
    """
    connection = Connection(cluster)
    try:
        connection.send(messages.HostIsHere(machine()))
        join = connection.expect(messages.JoinProcesses)
        jax_processes.join(Address(cluster.address.host, join.port), cluster.num_hosts, cluster.host_index)
        where = choose_mesh(mesh, tensor_parallel_size, spreads=True)
        jax_processes.check_mesh(where)
        reading = Reading(load_format, hf_overrides, True, task, quantization)
        here = join.machines.count(join.machines[cluster.host_index])
        executor = _executor(connection, (model, dtype, None, reading, where), compilation_cache, here)
        Follower(connection, executor).run()  # the program ends then: what it still compiles is not waited for
    except GroupLostError:
        raise
    except Exception as error:
        connection.fail(f"{type(error).__name__}: {error}")
        raise
    connection.close()


def _executor(connection: Connection, opened: tuple[Any, ...], compilation_cache: Any, processes_here: int) -> Executor:
    """One like the leader's, with its parameters loaded."""
    mesh = opened[-1]
    source, state, shape = open_model(*opened)
    loads = callable(source.params)
    with device_memory.sizing():
        memory = device_memory.measure(mesh, processes_here=processes_here)
        connection.send(messages.HostMemory(None if memory is None else [int(number) for number in memory]))
        header = Header.of_json(connection.expect(messages.EngineHeader).header)
        _compare(header, header_of(source, header.config, mesh, state))
        staged = staging_bytes(state) if loads else 0
        sizes = {"loading": staged, "has_params": not loads, "processes_here": processes_here}
        claim = plan_engine(shape, header.config, mesh, memory, **sizes)
    shape = with_config(shape, source.model, header.config)
    executor = Executor(shape, header.config, mesh, compilation_cache=compilation_cache, claim=claim)
    try:
        executor.offer_params(_FIRST_VERSION, source.place(state, mesh) if loads else state)
    except BaseException:
        executor.close()
        raise
    return executor


def _compare(leaders: Header, ours: Header) -> None:
    """`ClusterError` if this host has not what the leader has."""
    for name in _SAME:
        theirs, own = getattr(leaders, name), getattr(ours, name)
        if theirs != own:
            raise ClusterError(
                f"the leader has {name} {theirs!r}, this host {own!r}; give all the same model and options"
            )


def lead_or_follow(given: Cluster | str, model: Any, options: dict[str, Any]) -> LeaderGroup | None:
    """On the first host of what `LLM` takes as `cluster`, the group that it leads, or None if it is alone; any other
    host follows until the engine is closed, and then ends the program. `options` are those of `build_engine`."""
    cluster = Cluster.of(given)
    if cluster.num_hosts == 1:
        return None
    if cluster.is_leader:
        return LeaderGroup(cluster)
    joins = not jax_processes.is_joined()
    follow(model, cluster=cluster, **options)
    if joins:
        jax.distributed.shutdown()
    raise SystemExit(0)
