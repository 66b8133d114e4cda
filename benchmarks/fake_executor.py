"""An executor without a device: the real engine runs on it, and its tokens are made up."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jaxllm.checkpoint.pooling_config import PoolingConfig
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.commands import Command, kind_of
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.packing import SampleInput, SampleLayout
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.engine import Engine
from jaxllm.engine.pooling import Pooler
from jaxllm.sharding.mesh import make_mesh


class Arriving:
    """A result on its way to the host."""

    def __init__(self, value: np.ndarray):
        self.value = value
        self.error: Exception | None = None  # what reading it raises

    def copy_to_host_async(self) -> None:
        """It is there."""

    def block_until_ready(self) -> "Arriving":
        if self.error is not None:
            raise self.error
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.block_until_ready()
        return self.value


class NothingToCompile(CompilePlan):
    """Everything is there, whatever its name."""

    def __init__(self) -> None:
        super().__init__({})

    def ready(self, name: Hashable) -> bool:
        return True

    def wait(self, names: Sequence[Hashable], tick: Callable[[], None] = lambda: None) -> None:
        tick()


class FakeExecutor:
    """A `CommandExecutor` of an engine whose requests need no more than tokens. `draw` makes those of the samples."""

    def __init__(self, config: EngineConfig, draw: Callable[[SampleInput], np.ndarray], *, page_bytes: int = 1):
        self.config, self.draw, self.page_bytes = config, draw, page_bytes
        self.compile_plan, self.mesh, self.abstract_params = NothingToCompile(), make_mesh(None), {}
        self.leaves: list[Any] = []

    def offer_params(self, version: int, params: Any) -> None:
        """There are none."""

    def lacks_params(self) -> bool:
        return False

    def apply(self, commands: Sequence[Command]) -> list[Any]:
        """See `Executor.apply`."""
        results: list[Any] = []
        for command in commands:
            found = self.apply_one(command)
            assert len(found) == kind_of(command).num_results
            results += map(Arriving, found)
        return results

    def apply_one(self, command: Command) -> Sequence[np.ndarray]:
        """The results of a command."""
        if command.kind == "sample":
            return [self.draw(self.samples_of(command))]
        return [command.arrays[0][:3]] if command.kind == "step" else []

    def samples_of(self, command: Command) -> SampleInput:
        """What a command of the samplers asks for."""
        assert isinstance(command.name, tuple)
        _, samples = command.name
        return SampleLayout(samples, self.config.max_num_seqs).unpack(command.arrays[-1])

    def close(self) -> None:
        self.compile_plan.close()


def fake_engine(config: EngineConfig, vocab: int, draw: Callable[[SampleInput], np.ndarray]) -> Engine:
    """The real engine, for a model of `vocab` tokens that no device computes."""
    pooling = PoolingConfig(pooling="last", normalize=True, max_length=config.max_model_len)
    pooler = Pooler(config=pooling, width=1)
    return Engine(Runner(FakeExecutor(config, draw), config, vocab), vocab=vocab, eos_ids=(), pooler=pooler)
