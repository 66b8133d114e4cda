"""The engine's statistics as Prometheus metrics, read when the metrics are scraped."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from jaxllm.engine.stats import STEP_TOKENS, EngineStats
from jaxllm.server.engine.client import EngineClient

PREFIX = "jaxllm:"
LABELS = ("model_name", "engine")

_GAUGES = (  # name, help, value
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
_COUNTERS = (
    ("num_preemptions", "Sequences preempted.", lambda s: s.num_preemptions),
    ("kv_blocks_copied", "KV blocks copied on the first write to a shared one.", lambda s: s.blocks_copied),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("nan_logits", "Sequences that ended because the model returned NaN or infinity.", lambda s: s.num_not_finite),
    ("corrupted_requests", "The same under vLLM's name.", lambda s: s.num_not_finite),
    ("compile_seconds", "Seconds spent compiling.", lambda s: s.compile_s),
)
_BY_LABEL = (  # name, help, label, its values
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
_CONFIG = (  # label of cache_config_info, field of EngineConfig
    ("block_size", "block_size"),
    ("num_gpu_blocks", "num_blocks"),
    ("enable_prefix_caching", "enable_prefix_caching"),
    ("gpu_memory_utilization", "gpu_memory_utilization"),
    ("max_model_len", "max_model_len"),
    ("max_num_seqs", "max_num_seqs"),
)


class EngineCollector:
    """`labels` are the values of `LABELS`. While the model is loading, families have no samples."""

    def __init__(self, client: EngineClient, labels: tuple[str, str]):
        self._client, self._labels = client, labels

    def collect(self) -> Iterator[Any]:
        stats = self._client.stats()
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, help, value in table:
                family = kind(PREFIX + name, help, labels=LABELS)
                if stats is not None:
                    family.add_metric(self._labels, value(stats))
                yield family
        for name, help, label, values in _BY_LABEL:
            family = CounterMetricFamily(PREFIX + name, help, labels=(*LABELS, label))
            for label_value, value in values.items() if stats is not None else ():
                family.add_metric((*self._labels, label_value), value(stats))
            yield family
        yield self._steps(stats)
        yield self._config()

    def _steps(self, stats: EngineStats | None) -> HistogramMetricFamily:
        family = HistogramMetricFamily(PREFIX + "iteration_tokens_total", "Tokens of a step.", labels=LABELS)
        if stats is not None:
            bounds, total, buckets = [*map(str, map(float, STEP_TOKENS)), "+Inf"], 0, []
            for bound, count in zip(bounds, stats.step_counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(self._labels, buckets, sum_value=stats.num_step_tokens)
        return family

    def _config(self) -> GaugeMetricFamily:
        names = [label for label, _ in _CONFIG]
        family = GaugeMetricFamily(PREFIX + "cache_config_info", "Sizes of the engine; 1.", labels=(*LABELS, *names))
        info = self._client.info
        if info is not None:
            values = [str(getattr(info.config, field)) for _, field in _CONFIG]
            family.add_metric((*self._labels, *values), 1)
        return family
