"""An engine's statistics by name: for the server's `/metrics`, and for `LLM.get_metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.stats import STEP_TOKENS, EngineStats

GAUGES = (  # name, help, value
    ("num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests waiting for a place in the running batch.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda s: s.blocks_used / s.num_blocks),
    ("kv_blocks", "KV blocks in total.", lambda s: s.num_blocks),
    ("kv_blocks_used", "KV blocks in use.", lambda s: s.blocks_used),
    ("kv_blocks_shared", "KV blocks used by several sequences.", lambda s: s.blocks_shared),
    ("kv_blocks_cached", "Free KV blocks in the prefix cache.", lambda s: s.blocks_cached),
    ("kv_blocks_used_peak", "Peak number of KV blocks in use.", lambda s: s.peak_blocks_used),
    ("kv_blocks_on_host", "KV blocks in host memory.", lambda s: s.blocks_on_host),
    ("kv_slots_wasted", "Token places in used KV blocks without a token.", lambda s: s.wasted_slots),
    ("num_executables", "Executables in the compile plan.", lambda s: s.num_executables),
    ("num_compiled", "Compiled executables of the compile plan.", lambda s: s.num_compiled),
    ("num_failed_executables", "Executables that failed to compile.", lambda s: s.num_failed_executables),
)
GAUGES_BY_LABEL = (  # name, help, label, its values
    (
        "num_requests_waiting_by_reason",
        "Sequences that wait for a place in the batch, for KV blocks, or to come back after a preemption.",
        "reason",
        {
            "slots": lambda s: 0 if s.num_free_slots else s.num_waiting - s.num_waiting_preempted,
            "kv_blocks": lambda s: s.num_waiting - s.num_waiting_preempted if s.num_free_slots else 0,
            "preempted": lambda s: s.num_waiting_preempted,
        },
    ),
)
COUNTERS = (
    ("num_preemptions", "Sequences preempted.", lambda s: s.num_preemptions),
    ("kv_blocks_copied", "KV blocks copied on the first write to a shared one.", lambda s: s.blocks_copied),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("nan_logits", "Sequences that ended because the model returned NaN or infinity.", lambda s: s.num_not_finite),
    ("corrupted_requests", "The same under vLLM's name.", lambda s: s.num_not_finite),
    ("compile_seconds", "Seconds spent compiling.", lambda s: s.compile_s),
    ("step_seconds", "Seconds of steps.", lambda s: s.step_s),
    (
        "step_host_seconds",
        "Seconds of steps in which the host did not wait for the device.",
        lambda s: s.step_s - s.device_wait_s,
    ),
)
BY_LABEL = (  # name, help, label, its values
    (
        "preemptions_by_kind",
        "Sequences preempted.",
        "kind",
        {"swap": lambda s: s.num_swapped, "recompute": lambda s: s.num_preemptions - s.num_swapped},
    ),
    (
        "kv_blocks_swapped",
        "KV blocks moved to host memory and back.",
        "direction",
        {"out": lambda s: s.blocks_swapped_out, "in": lambda s: s.blocks_swapped_in},
    ),
)
CONFIG = (  # label of cache_config_info, field of EngineConfig
    ("block_size", "block_size"),
    ("num_gpu_blocks", "num_blocks"),
    ("cache_dtype", "kv_cache_dtype"),
    ("enable_prefix_caching", "enable_prefix_caching"),
    ("gpu_memory_utilization", "gpu_memory_utilization"),
    ("max_model_len", "max_model_len"),
    ("max_num_seqs", "max_num_seqs"),
)
STEPS = "iteration_tokens_total"  # a histogram: tokens of a step
CONFIG_INFO = "cache_config_info"  # a gauge that is 1, with `CONFIG` as its labels
_OF_VLLM = frozenset(  # vLLM has them by these names; the rest are ours
    (
        *(
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_waiting_by_reason",
            "kv_cache_usage_perc",
            "num_preemptions",
        ),
        *("prefix_cache_queries", "prefix_cache_hits", "corrupted_requests", STEPS, CONFIG_INFO),
    )
)


@dataclass
class Metric:
    """A number of an engine, as vLLM's `get_metrics` gives it."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int  # only grows


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    values: list[int]  # counters; only speculative decoding has one in vLLM


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> how many were at most that; the last is "+Inf"


def read_metrics(stats: EngineStats, config: EngineConfig, labels: dict[str, str]) -> list[Metric]:
    """`stats` under their names; `labels` are those of all."""
    return list(_metrics(stats, config, labels))


def _metrics(stats: EngineStats, config: EngineConfig, labels: dict[str, str]) -> Iterator[Metric]:
    for name, _, value in GAUGES:
        yield Gauge(_full(name), labels.copy(), float(value(stats)))
    for name, _, label, values in GAUGES_BY_LABEL:
        for label_value, value in values.items():
            yield Gauge(_full(name), labels | {label: label_value}, float(value(stats)))
    for name, _, value in COUNTERS:
        yield Counter(_full(name), labels.copy(), int(value(stats)))
    for name, _, label, values in BY_LABEL:
        for label_value, value in values.items():
            yield Counter(_full(name), labels | {label: label_value}, value(stats))
    buckets = step_buckets(stats)
    yield Histogram(_full(STEPS), labels.copy(), buckets["+Inf"], float(stats.num_step_tokens), buckets)
    info = {label: str(getattr(config, field)) for label, field in CONFIG}
    yield Gauge(_full(CONFIG_INFO), labels | info, 1.0)


def step_buckets(stats: EngineStats) -> dict[str, int]:
    """Upper bound of a step's tokens -> how many steps had at most that."""
    bounds, total, buckets = [*map(str, map(float, STEP_TOKENS)), "+Inf"], 0, {}
    for bound, count in zip(bounds, stats.step_counts, strict=True):
        total += count
        buckets[bound] = total
    return buckets


def _full(name: str) -> str:
    return f"vllm:{name}" if name in _OF_VLLM else f"jaxllm:{name}"
