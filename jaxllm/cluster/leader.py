"""The leader's side of a group: an executor whose commands all members apply."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jaxtyping import Array

from jaxllm.cluster import jax_processes, messages
from jaxllm.cluster.formation import Address, gather, listen
from jaxllm.cluster.machine import machine
from jaxllm.cluster.options import Cluster
from jaxllm.engine.device.command_log import Header
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.device_memory import DeviceMemory, least
from jaxllm.engine.device.runner import CommandExecutor
from jaxllm.errors import GroupLostError
from jaxllm.models.transformer import Params

log = logging.getLogger(__name__)

EXIT_S = 5.0  # for a program to end by itself once its group is lost
_VERDICT_S = 1.0  # for a member's death to be heard, where it made a step fail here
_OWN = 1  # the version of the parameters that every member has by itself


class LeaderGroup:
    """The group as its leader has it, from when all are there."""

    def __init__(self, cluster: Cluster, on_lost: Callable[[str], None] | None = None):
        """Waits for the followers, then for JAX's processes. `on_lost` is called with the reason for which the group
        ended, in a thread of its own; without one the process ends `EXIT_S` later, as it may hang in a step that can't
        be interrupted. Raises `ClusterError`."""
        num_hosts, address = cluster.num_hosts, cluster.address
        secret = cluster.secret()
        with listen(address, cluster.bind) as listener:
            host = listener.getsockname()[0]
            log.info("waiting for %d more hosts at %s", num_hosts - 1, Address(host, address.port))
            self.links = gather(listener, secret, num_hosts, cluster.timeout_s)
        self.links.on_lost = on_lost or _end_soon
        self._joined = not jax_processes.is_joined()  # by us
        try:
            machines = [machine(), *self.links.machines()]
            self.processes_here = machines.count(machines[0])
            port = jax_processes.free_port(host) if self._joined else 0
            self.links.send(messages.encode(messages.JoinProcesses(port, machines)))
            jax_processes.join(Address(address.host, port), num_hosts, 0, bind=host)
        except BaseException as error:
            self.fail(error)
            raise
        log.info("%d hosts with %d devices are one group", num_hosts, jax.device_count())

    @contextmanager
    def building(self) -> Iterator[None]:
        """An engine; the followers are told if that fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def least_memory(self, own: DeviceMemory | None) -> DeviceMemory | None:
        """What every member's devices have; None if one does not know."""
        found = [own, *(_device_memory(each) for each in self.links.memories())]
        known = [memory for memory in found if memory is not None]
        return least(known) if len(known) == len(found) else None

    def lead(self, executor: CommandExecutor, header: Header) -> "Leader":
        """`executor`, whose commands all members apply, to executors as `header` describes them."""
        self.links.send(messages.encode(messages.EngineHeader(header.to_json())))
        return Leader(executor, self)

    def fail(self, error: BaseException) -> None:
        """Tells the followers that there will be no engine; the program, which knows, goes on."""
        self.links.on_lost = lambda reason: None
        self.links.lose(f"the leader can't build the engine: {error}")

    def close(self) -> None:
        """Lets the followers go."""
        self.links.close()
        if self._joined and self.links.lost is None:
            jax.distributed.shutdown()


class Leader:
    """An executor that has every command applied by all members, each on its devices, before its own applies it."""

    def __init__(self, executor: CommandExecutor, group: LeaderGroup):
        self.executor, self.group = executor, group
        self.compile_plan, self.mesh, self.page_bytes = executor.compile_plan, executor.mesh, executor.page_bytes
        self.abstract_params = executor.abstract_params
        self.compile_plan.join(group.links)
        self._has_state = False

    @property
    def leaves(self) -> list[Array]:
        """See `CommandExecutor`."""
        return self.executor.leaves

    def offer_params(self, version: int, params: Params) -> None:
        """See `Executor.offer_params`."""
        assert version == _OWN, "each member has those that it has loaded, and no others"
        self.executor.offer_params(version, params)

    def lacks_params(self) -> bool:
        """See `Executor.lacks_params`."""
        return self.executor.lacks_params()

    def apply(self, commands: Sequence[Command]) -> list[Any]:
        """See `Executor.apply`. `GroupLostError` if a member is lost; a step that fails anywhere ends the group."""
        if any(command.kind == "init" for command in commands):
            if self._has_state:
                raise self._lost("a step failed on the leader")
            self._has_state = True
        self.group.links.send(messages.encode_commands(commands))
        try:
            return self.executor.apply(commands)
        except Exception as error:
            raise self._lost(f"the leader failed: {error}") from error

    def _lost(self, reason: str) -> GroupLostError:
        """Ends the group. Where a member's death made a step fail here, that is the reason."""
        end = time.monotonic() + _VERDICT_S
        while self.group.links.lost is None and time.monotonic() < end:
            time.sleep(0.01)
        self.group.links.lose(reason)
        return GroupLostError(f"the group is lost: {self.group.links.lost}")

    def close(self) -> None:
        """See `Executor.close`."""
        self.executor.close()
        self.group.close()


def _device_memory(told: messages.HostMemory) -> DeviceMemory | None:
    if told.memory is None:
        return None
    total, limit, in_use, claimed, is_host, swap = told.memory
    return DeviceMemory(total, limit, in_use, claimed, bool(is_host), swap)


def _end_soon(reason: str) -> None:
    time.sleep(EXIT_S)
    log.critical("the process ends, as its group is lost: %s", reason)
    os._exit(1)
