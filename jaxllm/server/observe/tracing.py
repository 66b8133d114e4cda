"""OpenTelemetry spans, one for each request to the engine, with vLLM's and the GenAI conventions' attribute names.
Nothing here is imported unless spans are wanted."""

from collections.abc import Iterable
from typing import Any

from jaxllm.server.observe.metrics import RequestTimings

SPAN = "llm_request"
_EXPORT_S = 3  # for a batch to be sent, retries included; the end of the server waits for the last one


class Tracing:
    """`provider` is an `opentelemetry.sdk.trace.TracerProvider`; its processors must not block."""

    def __init__(self, provider: Any, model_name: str):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model_name
        self._tracer = provider.get_tracer("jaxllm.server")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, course: RequestTimings, request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """A request is over. `headers` are those of its HTTP request: it is a child of the span that they name."""
        from opentelemetry.trace import SpanKind, StatusCode

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_attributes(course, request_id, self._model),
            start_time=course.started_ns,
        )
        if course.reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(end_time=course.started_ns + int(course.whole_s * 1e9))

    def close(self) -> None:
        """Sends what is left. Blocks while it does."""
        self._provider.shutdown()


def _attributes(course: RequestTimings, request_id: str, model_name: str) -> dict[str, Any]:
    params = course.params
    optional = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.latency.time_to_first_token": course.first_token_s,
        "gen_ai.latency.time_in_queue": course.queued_s,
        "gen_ai.latency.time_in_model_prefill": course.prefill_s,
        "gen_ai.latency.time_in_model_decode": course.decode_s,
        "gen_ai.latency.time_in_model_inference": course.inference_s,
    }
    return {
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.usage.prompt_tokens": course.num_prompt,
        "gen_ai.usage.completion_tokens": course.num_generated,
        "gen_ai.usage.input_tokens": course.num_prompt,
        "gen_ai.usage.output_tokens": course.num_generated,
        "gen_ai.usage.cache_read.input_tokens": course.num_cached,
        "gen_ai.response.finish_reasons": [course.reason],
        "gen_ai.latency.e2e": course.whole_s,
    } | {name: value for name, value in optional.items() if value is not None}


def open_tracing(endpoint: str, model_name: str) -> Tracing:
    """Sends spans to `endpoint` (OTLP over HTTP, as in http://localhost:4318/v1/traces), in batches and from a thread
    of its own; when that can't keep up, they are dropped. Raises `ValueError`."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp_traces_endpoint={endpoint!r} must be a URL, as in http://localhost:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"traces need an extra ({error}): pip install 'jaxllm[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "jaxllm"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)))
    return Tracing(provider, model_name)
