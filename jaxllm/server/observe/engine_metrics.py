"""The engine's statistics as Prometheus metrics, read when the metrics are scraped."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from jaxllm.engine.metrics import BY_LABEL, CONFIG, CONFIG_INFO, COUNTERS, GAUGES, GAUGES_BY_LABEL, STEPS, step_buckets
from jaxllm.engine.stats import EngineStats
from jaxllm.server.engine.client import EngineClient

PREFIX = "jaxllm:"
LABELS = ("model_name", "engine")


class EngineCollector:
    """`labels` are the values of `LABELS`. While the model is loading, families have no samples."""

    def __init__(self, client: EngineClient, labels: tuple[str, str]):
        self._client, self._labels = client, labels

    def collect(self) -> Iterator[Any]:
        stats = self._client.stats()
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, help, value in table:
                family = kind(PREFIX + name, help, labels=LABELS)
                if stats is not None:
                    family.add_metric(self._labels, value(stats))
                yield family
        for kind, table in ((GaugeMetricFamily, GAUGES_BY_LABEL), (CounterMetricFamily, BY_LABEL)):
            for name, help, label, values in table:
                family = kind(PREFIX + name, help, labels=(*LABELS, label))
                for label_value, value in values.items() if stats is not None else ():
                    family.add_metric((*self._labels, label_value), value(stats))
                yield family
        yield self._steps(stats)
        yield self._config()

    def _steps(self, stats: EngineStats | None) -> HistogramMetricFamily:
        family = HistogramMetricFamily(PREFIX + STEPS, "Tokens of a step.", labels=LABELS)
        if stats is not None:
            family.add_metric(self._labels, list(step_buckets(stats).items()), sum_value=stats.num_step_tokens)
        return family

    def _config(self) -> GaugeMetricFamily:
        names = [label for label, _ in CONFIG]
        family = GaugeMetricFamily(PREFIX + CONFIG_INFO, "Sizes of the engine; 1.", labels=(*LABELS, *names))
        info = self._client.info
        if info is not None:
            values = [str(getattr(info.config, field)) for _, field in CONFIG]
            family.add_metric((*self._labels, *values), 1)
        return family
