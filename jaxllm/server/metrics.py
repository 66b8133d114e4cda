"""Prometheus metrics, by vLLM's names under a prefix of our own. Label values come from closed sets only."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from jaxllm.engine.stats import EngineStats
from jaxllm.outputs import RequestOutput
from jaxllm.server.client import EngineClient
from jaxllm.server.prepare import Job

PREFIX = "jaxllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN = (.0005, .001, .002, .004, .006, .008, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5,
            10, 20, 40, 80)  # fmt: skip
_WHOLE = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_N = (1, 2, 5, 10, 20)
FINISHED = ("stop", "length", "abort", "error")
REJECTED = ("max_num_queued_reqs",)

_GAUGES = (  # of the engine: name, help, value
    ("num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait for a place in it.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", lambda s: s.blocks_used / s.num_blocks),
    ("kv_blocks_on_host", "KV blocks in host memory.", lambda s: s.blocks_on_host),
    ("num_executables", "Executables in the compile plan.", lambda s: s.num_executables),
    ("num_compiled", "Of those, compiled.", lambda s: s.num_compiled),
)
_COUNTERS = (
    ("num_preemptions", "Sequences preempted.", lambda s: s.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("prefix_cache_hits", "Of those, found.", lambda s: s.num_cached_tokens),
    ("compile_seconds", "Seconds spent compiling.", lambda s: s.compile_s),
)


def _token_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, ... up to the context."""
    buckets = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]
    return [bucket for bucket in buckets if bucket <= most] or [1]


class Metrics:
    """`client` is asked for the engine's when someone asks for the metrics."""

    def __init__(self, model_name: str, client: EngineClient, *, vllm_names: bool = False):
        self._vllm_names = vllm_names
        self.rate = Rate()  # of generated tokens
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        tokens = _token_buckets(1 << 20)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ran.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        self.aborted = self._counter("requests_aborted", "Requests whose client went away.")
        self._finished = self._counter("request_success", "Requests that ended.", "finished_reason", FINISHED)
        self._rejected = self._counter("admission_rejections", "Requests refused at the door.", "reason", REJECTED)
        self.first_token_s = self._histogram("time_to_first_token_seconds", "From arrival to first token.", _FIRST)
        self.between_s = self._histogram("inter_token_latency_seconds", "Between tokens of a stream.", _BETWEEN)
        self.per_token_s = self._histogram(
            "request_time_per_output_token_seconds", "After the first, of a request.", _BETWEEN
        )
        self.whole_s = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self.num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.num_generated = self._histogram("request_generation_tokens", "Tokens generated for a request.", tokens)
        self.params_n = self._histogram("request_params_n", "The parameter n.", _N)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)
        self.loop_lag_s = Gauge(
            f"{PREFIX}event_loop_lag_seconds", "How late the server's event loop runs.", registry=self._registry
        )
        self._registry.register(_EngineCollector(client, self._labels))

    def _counter(self, name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Any:
        names = _LABELS if label is None else (*_LABELS, label)
        counter = Counter(PREFIX + name, help, names, registry=self._registry)
        if label is None:
            return counter.labels(*self._labels)
        return {value: counter.labels(*self._labels, value) for value in values}

    def _histogram(self, name: str, help: str, buckets: Any) -> Histogram:
        return Histogram(PREFIX + name, help, _LABELS, registry=self._registry, buckets=buckets).labels(*self._labels)

    def finished(self, reason: str) -> None:
        self._finished[reason].inc()

    def rejected(self, reason: str = "max_num_queued_reqs") -> None:
        self._rejected[reason].inc()

    def render(self) -> bytes:
        text = generate_latest(self._registry)
        return text + text.replace(PREFIX.encode(), b"vllm:") if self._vllm_names else text


class _EngineCollector:
    def __init__(self, client: EngineClient, labels: tuple[str, str]):
        self._client, self._labels = client, labels

    def collect(self) -> Any:
        stats: EngineStats | None = self._client.stats()
        tables = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
        for kind, table in tables:
            for name, help, value in table:
                family = kind(PREFIX + name, help, labels=_LABELS)
                if stats is not None:
                    family.add_metric(self._labels, value(stats))
                yield family


class Rate:
    """Events a second, over the last whole seconds."""

    SECONDS = 3

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by second

    def add(self, count: int) -> None:
        now = int(time.monotonic())
        if now not in self._counts:
            self._counts = {second: n for second, n in self._counts.items() if second >= now - self.SECONDS}
        self._counts[now] = self._counts.get(now, 0) + count

    def per_s(self) -> float:
        now = int(time.monotonic())
        return sum(self._counts.get(second, 0) for second in range(now - self.SECONDS, now)) / self.SECONDS


class Outcome:
    """The course of one request to the engine, which the metrics learn when it ends."""

    def __init__(self, metrics: Metrics, job: Job):
        self._metrics, self._job = metrics, job
        self._start = time.monotonic()
        self._first = self._last = 0.0
        self._num_tokens = self._num_cached = 0
        self.reason: str | None = None  # None: it was left before its end

    def saw(self, output: RequestOutput) -> None:
        now, count = time.monotonic(), sum(len(completion.token_ids) for completion in output.outputs)
        self._num_cached = output.num_cached_tokens
        if count:
            self._metrics.generation_tokens.inc(count)
            self._metrics.rate.add(count)
            if not self._num_tokens:
                self._first = now
                self._metrics.first_token_s.observe(now - self._start)
            elif self._job.params.stream_interval == 1:
                for _ in range(count):  # several at once came together
                    self._metrics.between_s.observe((now - self._last) / count)
            self._num_tokens, self._last = self._num_tokens + count, now
        if output.finished:
            reasons = {completion.finish_reason for completion in output.outputs}
            self.reason = next((reason for reason in ("error", "abort", "length") if reason in reasons), "stop")

    def end(self) -> None:
        metrics, params, now = self._metrics, self._job.params, time.monotonic()
        if self.reason is None:
            metrics.aborted.inc()
        metrics.finished(self.reason or "abort")
        metrics.prompt_tokens.inc(len(self._job.token_ids))
        metrics.cached_tokens.inc(self._num_cached)
        metrics.num_prompt.observe(len(self._job.token_ids))
        metrics.num_generated.observe(self._num_tokens)
        metrics.params_n.observe(params.n)
        metrics.params_max_tokens.observe(params.max_tokens or 0)
        metrics.whole_s.observe(now - self._start)
        if self._num_tokens > 1:
            metrics.per_token_s.observe((self._last - self._first) / (self._num_tokens - 1))
