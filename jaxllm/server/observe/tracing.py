"""OpenTelemetry spans, one per request to the engine, with attribute names of vLLM and the GenAI conventions. Imported
only if tracing is enabled."""

from collections.abc import Iterable
from typing import Any

from jaxllm.server.observe.metrics import RequestTimings

SPAN = "llm_request"
_EXPORT_S = 3  # for a batch to be sent, retries included; shutdown waits for the last batch


class Tracing:
    """`provider` is an `opentelemetry.sdk.trace.TracerProvider`; its processors must not block."""

    def __init__(self, provider: Any, model_name: str):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model_name
        self._tracer = provider.get_tracer("jaxllm.server")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, timings: RequestTimings, request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Records a finished request. `headers` are those of its HTTP request, which may name a parent span."""
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
            attributes=_attributes(timings, request_id, self._model),
            start_time=timings.started_ns,
        )
        if timings.reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(end_time=timings.started_ns + int(timings.whole_s * 1e9))

    def close(self) -> None:
        """Sends the remaining spans. Blocks meanwhile."""
        self._provider.shutdown()


def _attributes(timings: RequestTimings, request_id: str, model_name: str) -> dict[str, Any]:
    params = timings.params
    optional = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.latency.time_to_first_token": timings.first_token_s,
        "gen_ai.latency.time_in_queue": timings.queued_s,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_s,
        "gen_ai.latency.time_in_model_decode": timings.decode_s,
        "gen_ai.latency.time_in_model_inference": timings.inference_s,
    }
    return {
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.usage.prompt_tokens": timings.num_prompt,
        "gen_ai.usage.completion_tokens": timings.num_generated,
        "gen_ai.usage.input_tokens": timings.num_prompt,
        "gen_ai.usage.output_tokens": timings.num_generated,
        "gen_ai.usage.cache_read.input_tokens": timings.num_cached,
        "gen_ai.response.finish_reasons": [timings.reason],
        "gen_ai.latency.e2e": timings.whole_s,
    } | {name: value for name, value in optional.items() if value is not None}


def open_tracing(endpoint: str, model_name: str) -> Tracing:
    """Sends spans to `endpoint` (OTLP over HTTP, as in http://localhost:4318/v1/traces) in batches from a separate
    thread, and drops spans that exceed its queue. Raises `ValueError`."""
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
