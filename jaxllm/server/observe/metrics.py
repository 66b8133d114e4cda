"""Prometheus metrics with vLLM's names under the prefix `jaxllm:`. Label values come from closed sets only."""

import time
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.observe.access import RequestRecord
from jaxllm.server.observe.engine_metrics import LABELS, PREFIX, EngineCollector
from jaxllm.server.openai.prepare import GenerationJob

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_BETWEEN = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_N = (1, 2, 5, 10, 20)
FINISHED = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit")
REJECTED = ("max_num_queued_reqs", "max_body_memory", "max_waiting_grammars", "max_logprobs")


def _token_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, ... up to the context."""
    buckets = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]
    return [bucket for bucket in buckets if bucket <= most] or [1]


class Metrics:
    """The server's own metrics, and the engine's, which each scrape reads from `client`."""

    def __init__(self, model_name: str, client: EngineClient, *, vllm_names: bool = False):
        self._vllm_names = vllm_names
        self.rate = Rate()  # of generated tokens
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        tokens = _token_buckets(1 << 20)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ran.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        self._by_source = self._counter("prompt_tokens_by_source", "Where prompts' KV came from.", "source", SOURCES)
        self.aborted = self._counter("requests_aborted", "Requests whose client went away.")
        self._finished = self._counter("request_success", "Requests that ended.", "finished_reason", FINISHED)
        self._rejected = self._counter("admission_rejections", "Requests refused on arrival.", "reason", REJECTED)
        self.first_token_s = self._histogram("time_to_first_token_seconds", "From arrival to first token.", _FIRST)
        self.between_s = self._histogram("inter_token_latency_seconds", "Between tokens of a stream.", _BETWEEN)
        self.per_token_s = self._histogram(
            "request_time_per_output_token_seconds", "Per token of a request, after the first.", _BETWEEN
        )
        self.whole_s = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self.queue_s = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _WHOLE)
        self.prefill_s = self._histogram("request_prefill_time_seconds", "First step to first token.", _WHOLE)
        self.decode_s = self._histogram("request_decode_time_seconds", "From the first token to the last.", _WHOLE)
        self.inference_s = self._histogram("request_inference_time_seconds", "First step to last token.", _WHOLE)
        self.num_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", tokens
        )
        self.most_generated = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a request's samples.", tokens
        )
        self.num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.num_generated = self._histogram("request_generation_tokens", "Tokens generated for a request.", tokens)
        self.params_n = self._histogram("request_params_n", "The parameter n.", _N)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)
        self.loop_lag_s = Gauge(
            f"{PREFIX}event_loop_lag_seconds", "How late the server's event loop runs.", registry=self._registry
        )
        self._requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests.", (*LABELS, "route", "method", "status"), registry=self._registry
        )
        # vLLM's web framework counts them by these names, without its prefix.
        self._vllm_registry = CollectorRegistry()
        self._vllm_requests = Counter(
            "http_requests", "HTTP requests.", ("method", "status", "handler"), registry=self._vllm_registry
        )
        self._registry.register(EngineCollector(client, self._labels))

    def _counter(self, name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Any:
        names = LABELS if label is None else (*LABELS, label)
        counter = Counter(PREFIX + name, help, names, registry=self._registry)
        if label is None:
            return counter.labels(*self._labels)
        return {value: counter.labels(*self._labels, value) for value in values}

    def _histogram(self, name: str, help: str, buckets: Any) -> Histogram:
        return Histogram(PREFIX + name, help, LABELS, registry=self._registry, buckets=buckets).labels(*self._labels)

    def ended(self, timings: "RequestTimings") -> None:
        self._prompt_ended(timings.reason, timings.num_prompt, timings.num_cached, timings.whole_s)
        self.num_generated.observe(timings.num_generated)
        self.most_generated.observe(timings.most_generated)
        self.params_n.observe(timings.params.n)
        self.params_max_tokens.observe(timings.params.max_tokens or 0)
        if timings.decode_s is not None:
            self.decode_s.observe(timings.decode_s)
            self.inference_s.observe(timings.inference_s)
            if timings.num_generated > 1:
                self.per_token_s.observe(timings.decode_s / (timings.num_generated - 1))

    def pooled(self, reason: str, num_prompt: int, num_cached: int, *, whole_s: float, queued_s: float) -> None:
        """A prompt without a text ended, for a `reason` of `FINISHED`; durations in seconds."""
        self._prompt_ended(reason, num_prompt, num_cached, whole_s)
        self.aborted.inc(reason == "abort")
        if reason == "stop":
            self.queue_s.observe(queued_s)
            self.prefill_s.observe(max(0.0, whole_s - queued_s))

    def _prompt_ended(self, reason: str, num_prompt: int, num_cached: int, whole_s: float) -> None:
        num_computed = num_prompt - num_cached
        self._finished[reason].inc()
        self.prompt_tokens.inc(num_prompt)
        self.cached_tokens.inc(num_cached)
        self._by_source["local_cache_hit"].inc(num_cached)
        self._by_source["local_compute"].inc(num_computed)
        self.num_prompt.observe(num_prompt)
        self.num_computed.observe(num_computed)
        self.whole_s.observe(whole_s)

    def rejected(self, reason: str = "max_num_queued_reqs") -> None:
        self._rejected[reason].inc()

    def answered(self, record: RequestRecord) -> None:
        """Counts an HTTP request."""
        self._requests.labels(*self._labels, record.route, record.method, str(record.status)).inc()
        self._vllm_requests.labels(record.method, f"{record.status // 100}xx", record.route).inc()

    def render(self) -> bytes:
        text = generate_latest(self._registry)
        if not self._vllm_names:
            return text
        return text + text.replace(PREFIX.encode(), b"vllm:") + generate_latest(self._vllm_registry)


class RequestTimings(NamedTuple):
    """A finished request to the engine; durations in seconds, None if it never had a token."""

    params: SamplingParams
    started_ns: int  # since 1970
    reason: str  # of `FINISHED`
    num_prompt: int
    num_cached: int
    num_generated: int  # of all samples
    most_generated: int  # of the longest
    whole_s: float
    first_token_s: float | None
    queued_s: float | None
    decode_s: float | None  # from the first token to the last

    @property
    def prefill_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.queued_s

    @property
    def inference_s(self) -> float | None:
        return None if self.first_token_s is None else self.prefill_s + self.decode_s


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


class RequestObserver:
    """Follows one request to the engine and reports it to the metrics when it ends."""

    def __init__(self, metrics: Metrics, job: GenerationJob):
        self._metrics, self._job = metrics, job
        self._start, self._started_ns = time.monotonic(), time.time_ns()
        self._first = self._last = self._queued_s = 0.0
        self._num_tokens = self._num_cached = 0
        self._lengths: dict[int, int] = {}  # tokens of each sample
        self.reason: str | None = None  # None: the client left before the end

    def saw(self, output: RequestOutput) -> None:
        now, count = time.monotonic(), 0
        for completion in output.outputs:
            count += len(completion.token_ids)
            self._lengths[completion.index] = self._lengths.get(completion.index, 0) + len(completion.token_ids)
        self._num_cached = output.num_cached_tokens
        if count:
            self._tokens(now, count, output.queued_s)
        if output.finished:
            reasons = {completion.finish_reason for completion in output.outputs}
            self.reason = next((reason for reason in ("error", "abort", "length") if reason in reasons), "stop")

    def _tokens(self, now: float, count: int, queued_s: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens.inc(count)
        metrics.rate.add(count)
        if not self._num_tokens:
            self._first, self._queued_s = now, min(queued_s, now - self._start)
            metrics.first_token_s.observe(now - self._start)
            metrics.queue_s.observe(self._queued_s)
            metrics.prefill_s.observe(now - self._start - self._queued_s)
        elif self._job.params.stream_interval == 1:
            for _ in range(count):  # several tokens arrived together
                metrics.between_s.observe((now - self._last) / count)
        self._num_tokens, self._last = self._num_tokens + count, now

    def end(self) -> "RequestTimings":
        """Ends the request and updates the metrics."""
        if self.reason is None:
            self._metrics.aborted.inc()
        has_tokens = self._num_tokens > 0
        timings = RequestTimings(
            params=self._job.params,
            started_ns=self._started_ns,
            reason=self.reason or "abort",
            num_prompt=len(self._job.token_ids),
            num_cached=self._num_cached,
            num_generated=self._num_tokens,
            most_generated=max(self._lengths.values(), default=0),
            whole_s=time.monotonic() - self._start,
            first_token_s=self._first - self._start if has_tokens else None,
            queued_s=self._queued_s if has_tokens else None,
            decode_s=self._last - self._first if has_tokens else None,
        )
        self._metrics.ended(timings)
        return timings
