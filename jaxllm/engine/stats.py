"""What an engine tells of itself."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.shards import Shards

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepCounter:
    """How many steps had up to `STEP_TOKENS[i]` tokens, and more than the one before; the last: more than all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_TOKENS) + 1)
        self.num_tokens = 0
        self.seconds = self.wait_s = 0.0  # of steps, and of them those in which the host waited for the device

    def count(self, num_tokens: int) -> None:
        self.counts[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.num_tokens += num_tokens


@dataclass(frozen=True)
class EngineStats:
    """What an engine holds now, and what it has done so far: all shards together."""

    num_blocks: int  # pages of the pool; where layers have different windows, a block takes several
    block_size: int  # tokens
    blocks_used: int
    blocks_shared: int  # of those, used by several sequences
    blocks_cached: int  # free, and found again by a prompt that begins as they do
    peak_blocks_used: int
    wasted_slots: int  # tokens' places in used blocks that hold no token yet
    blocks_copied: int  # on the first write to a shared block
    blocks_swapped_out: int
    blocks_swapped_in: int
    blocks_on_host: int  # of sequences that wait to be swapped in
    num_running: int
    num_waiting: int
    num_waiting_preempted: int  # of those, have run before
    num_free_slots: int
    num_preemptions: int  # of sequences
    num_swapped: int  # of those, swapped to host memory; the others are recomputed
    num_prompt_tokens: int  # of requests admitted so far
    num_cached_tokens: int  # of those, found in the prefix cache
    num_not_finite: int  # requests that ended as the model gave NaN or infinity
    step_counts: list[int]  # steps by size, as `StepCounter` has them
    num_step_tokens: int
    step_s: float  # seconds of all steps
    device_wait_s: float  # of those, the host waited for the device
    num_executables: int  # in the compile plan
    num_compiled: int
    num_failed_executables: int  # of those, failed to compile twice: the engine does without them
    compile_s: float

    @property
    def is_compiled(self) -> bool:
        """Whether nothing is left to compile."""
        return self.num_compiled + self.num_failed_executables >= self.num_executables


def read_stats(
    scheduler: Scheduler | Shards, compile_plan: CompilePlan, peak_blocks_used: int, steps: StepCounter
) -> EngineStats:
    """Of all shards together. O(running), however large the pool is."""

    def total(of: Callable[[Scheduler], int]) -> int:
        return sum(map(of, scheduler.shards))

    num_swapped = total(lambda shard: shard.preemption.num_swapped)
    queues = [shard.waiting for shard in scheduler.shards]
    if isinstance(scheduler, Shards):
        queues.append(scheduler.waiting)
    return EngineStats(
        num_blocks=total(lambda shard: shard.pool.num_pages),
        block_size=scheduler.shards[0].pool.block_size,
        blocks_used=scheduler.num_used,
        blocks_shared=total(lambda shard: shard.pool.num_shared),
        blocks_cached=total(lambda shard: shard.pool.num_cached),
        peak_blocks_used=peak_blocks_used,
        wasted_slots=total(lambda shard: shard.running_set.num_wasted_slots),
        blocks_copied=total(lambda shard: shard.num_copied),
        blocks_swapped_out=total(lambda shard: shard.preemption.num_pages_out),
        blocks_swapped_in=total(lambda shard: shard.preemption.num_pages_in),
        blocks_on_host=total(lambda shard: shard.preemption.num_host_pages),
        num_running=total(lambda shard: len(shard.running_set)),
        num_waiting=sum(map(len, queues)),
        num_waiting_preempted=sum(queue.num_returning for queue in queues),
        num_free_slots=total(lambda shard: len(shard.running_set.free_slots)),
        num_preemptions=num_swapped + total(lambda shard: shard.preemption.num_recomputed),
        num_swapped=num_swapped,
        num_prompt_tokens=total(lambda shard: shard.admission.num_prompt_tokens),
        num_cached_tokens=total(lambda shard: shard.admission.num_cached_tokens),
        num_not_finite=total(lambda shard: shard.committer.num_not_finite),
        step_counts=steps.counts.copy(),
        num_step_tokens=steps.num_tokens,
        step_s=steps.seconds,
        device_wait_s=steps.wait_s,
        num_executables=compile_plan.total,
        num_compiled=compile_plan.num_done,
        num_failed_executables=compile_plan.num_failed,
        compile_s=compile_plan.seconds,
    )
