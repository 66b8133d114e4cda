"""States what an engine takes of its devices and of the host, and what others have, before any of it is taken."""

import logging
from typing import NamedTuple

from jax.sharding import Mesh

from jaxllm.engine.config import GPU_MEMORY_UTILIZATION, MEM_FRACTION_VARIABLES, EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.device_memory import Claim, DeviceMemory
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.host_memory import free_bytes, machine_bytes
from jaxllm.errors import OutOfMemoryError

log = logging.getLogger(__name__)


class MemoryPlan(NamedTuple):
    """Bytes that an engine takes of each device, and of the host beside them."""

    params: int
    pool: int
    step: int  # for a step, the slots, and blocks that move
    swap: int  # of the host, as blocks are swapped out
    loading: int  # of the host, while parameters load
    has_params: bool = False  # whether they lie there already

    @classmethod
    def of(
        cls, shape: ModelShape, config: EngineConfig, mesh: Mesh, *, loading: int = 0, has_params: bool = False
    ) -> "MemoryPlan":
        pool = config.num_blocks * memory.block_bytes(shape, config, mesh)
        step = memory.beside_pool(shape, config, mesh)
        return cls(memory.leaf_bytes(shape.leaves), pool, step, config.swap_bytes, loading, has_params)

    @property
    def device(self) -> int:
        return self.params + self.pool + self.step

    def claim(self, mesh: Mesh) -> Claim:
        """Of what stays: a step's temporary memory comes and goes."""
        return Claim(mesh, 0 if self.has_params else self.params, self.pool)

    def check_host(
        self, config: EngineConfig, device: DeviceMemory | None, num_devices: int, processes_here: int
    ) -> None:
        """Raises `OutOfMemoryError` where the host has not free what the parameters take while they load, or the swap
        space beside all else that is taken of it, if it was asked for: the default's is taken as far as there is."""
        free = most = free_bytes() // processes_here
        if device is not None and device.is_host:
            free -= (self.device - self.params * self.has_params + device.claimed) * num_devices
        elif self.loading > most:
            raise OutOfMemoryError(
                f"loading takes up to {self.loading / 1e9:.2f} GB of the host's memory for each process, of which "
                f"{most / 1e9:.2f} GB are free; free some, or take a machine with more"
            )
        left = max(0, free - self.loading)
        if config.swap_space is not None and self.swap > left:
            raise OutOfMemoryError(
                f"swap_space={config.swap_space:g} GiB does not fit: of {most / 1e9:.2f} GB of the host's memory that "
                f"are free for this process, {left / 1e9:.2f} GB are left beside what else the engine takes of it; "
                "give less, or leave it out"
            )

    def tell(self, config: EngineConfig, mesh: Mesh, device: DeviceMemory | None) -> None:
        """Logs what is taken, and what there is."""
        log.info(
            "each device: %.2f GB for parameters, %.2f GB for the KV pool of %d blocks, %.2f GB for a step and slots: "
            "%.2f GB in all",
            *(self.params / 1e9, self.pool / 1e9, config.num_blocks, self.step / 1e9, self.device / 1e9),
        )
        if device is None:
            log.info("the devices do not say how much memory they have")
        elif device.is_host:
            log.info(
                "each of %d devices has %.2f GB of the machine's memory, of which %.2f GB are in use by all programs, "
                "and other engines of this process will take %.2f GB",
                *(len(mesh.local_devices), device.total / 1e9, device.in_use / 1e9, device.claimed / 1e9),
            )
        else:
            self._tell_accelerator(config, device)
        log.info(
            "the host: %.2f GB at most for swapped blocks, %.2f GB at most while parameters load; %.2f of %.2f GB are "
            "free",
            *(self.swap / 1e9, self.loading / 1e9, free_bytes() / 1e9, machine_bytes() / 1e9),
        )

    def _tell_accelerator(self, config: EngineConfig, device: DeviceMemory) -> None:
        own = self.params * self.has_params
        numbers = device.total, device.usable(config.gpu_memory_utilization), device.in_use - own, device.claimed
        log.info(
            "of the %.2f GB of each device the process may use %.2f GB; other arrays of this process have %.2f GB, and "
            "other engines of it will take %.2f GB; what other processes use is not known here",
            *(max(0, number) / 1e9 for number in numbers),
        )
        wanted = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        if device.limit < int(device.total * wanted):
            log.warning(
                "JAX may allocate %.0f %% of the device, less than gpu_memory_utilization=%g: set %s=%g before JAX "
                "starts",
                *(100 * device.limit / device.total, wanted, MEM_FRACTION_VARIABLES[0], wanted),
            )


def plan_engine(
    shape: ModelShape,
    config: EngineConfig,
    mesh: Mesh,
    device: DeviceMemory | None,
    *,
    loading: int = 0,
    has_params: bool = False,
    processes_here: int = 1,
) -> Claim:
    """Says what the engine takes, and claims it. Raises `OutOfMemoryError` for what the host, which `processes_here` of
    the group share, has no room for."""
    plan = MemoryPlan.of(shape, config, mesh, loading=loading, has_params=has_params)
    plan.tell(config, mesh, device)
    plan.check_host(config, device, len(mesh.local_devices), processes_here)
    return plan.claim(mesh)
