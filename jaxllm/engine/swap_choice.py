"""Chooses between swapping a victim of preemption out and computing it again."""

from jaxllm.engine.device.runner import Runner


class SwapChoice:
    """Whether a victim of preemption is swapped out, or computed again. `kind` is as in `EngineConfig`."""

    def __init__(self, runner: Runner, kind: str):
        self.kind, self._runner = kind, runner

    def __call__(self, num_pages: int, num_tokens: int) -> bool:
        if self.kind == "auto":
            return self._runner.knows_bandwidth() and self._runner.costs.prefers_swap(num_pages, num_tokens)
        return self.kind == "swap"
