"""What /metrics says: the names that dashboards look for, phases, memory; and spans."""

import dataclasses
import json
import socket
import subprocess
import sys
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.engine.stats import STEP_TOKENS, StepCounter
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.observe import tracing
from tests.fake_server import STATS, FakeClient, request, running

VLLM_NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prompt_tokens
generation_tokens prompt_tokens_by_source prompt_tokens_cached request_success num_preemptions prefix_cache_queries
prefix_cache_hits corrupted_requests admission_rejections time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens
request_generation_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens
request_prefill_kv_computed_tokens iteration_tokens_total""".split()
PHASES = ("queue", "prefill", "decode", "inference")


def families(web) -> dict:
    text = web.send("GET", "/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict, name: str, suffix: str = "", **labels: str) -> float:
    family = found[f"jaxllm:{name}"]
    (sample,) = [
        sample
        for sample in family.samples
        if sample.name == f"jaxllm:{name}{suffix}" and labels.items() <= sample.labels.items()
    ]
    return sample.value


class Queued(FakeClient):
    """Its requests have waited for a microsecond in the engine, and found two tokens in the cache."""

    async def generate(self, *args, **kwargs):
        async for output in super().generate(*args, **kwargs):
            yield dataclasses.replace(output, queued_s=1e-6, num_cached_tokens=2)


@pytest.mark.parametrize("vllm_names", [False, True])
def test_names_and_phases(vllm_names):
    with running(Queued(), vllm_metric_names=vllm_names) as web:
        web.complete(n=2, stream=True)
        web.complete(prompt="poison", max_tokens=1)
        found = families(web)
    assert {f"jaxllm:{name}" for name in VLLM_NAMES} <= set(found)
    assert ({f"vllm:{name}" for name in VLLM_NAMES} <= set(found)) == vllm_names
    for phase in PHASES:
        assert value(found, f"request_{phase}_time_seconds", "_count") == 2
    sums = {phase: value(found, f"request_{phase}_time_seconds", "_sum") for phase in PHASES}
    assert sums["queue"] == pytest.approx(2e-6)
    assert sums["inference"] == pytest.approx(sums["prefill"] + sums["decode"])
    first = value(found, "time_to_first_token_seconds", "_sum")
    assert first == pytest.approx(sums["queue"] + sums["prefill"])
    assert value(found, "generation_tokens", "_total") == 25
    assert value(found, "request_max_num_generation_tokens", "_sum") == 13, "of the longest sample"
    prompt = value(found, "prompt_tokens", "_total")
    assert value(found, "prompt_tokens_by_source", "_total", source="local_cache_hit") == 4
    assert value(found, "prompt_tokens_by_source", "_total", source="local_compute") == prompt - 4


def test_the_engines_own():
    stats = dict(
        blocks_used=16,
        blocks_shared=3,
        blocks_cached=5,
        blocks_copied=7,
        blocks_swapped_out=11,
        blocks_swapped_in=9,
        blocks_on_host=2,
        num_preemptions=6,
        num_swapped=4,
        num_not_finite=1,
        peak_blocks_used=20,
    )
    steps = StepCounter()
    for tokens in (1, 2, 8, 9, 16384, 99999):
        steps.count(tokens)
    client = FakeClient()
    client.stats = lambda: dataclasses.replace(
        STATS, step_counts=steps.counts, num_step_tokens=steps.num_tokens, **stats
    )
    with running(client) as web:
        found = families(web)
    told = {
        name: value(found, name)
        for name in (
            "kv_cache_usage_perc",
            "kv_blocks",
            "kv_blocks_used",
            "kv_blocks_shared",
            "kv_blocks_cached",
            "kv_blocks_on_host",
            "kv_blocks_used_peak",
        )
    }
    assert list(told.values()) == [0.25, 64, 16, 3, 5, 2, 20]
    assert value(found, "kv_blocks_copied", "_total") == 7 and value(found, "nan_logits", "_total") == 1
    assert value(found, "preemptions_by_kind", "_total", kind="swap") == 4
    assert value(found, "preemptions_by_kind", "_total", kind="recompute") == 2
    assert value(found, "kv_blocks_swapped", "_total", direction="out") == 11
    name = "iteration_tokens_total"
    below = {bound: value(found, name, "_bucket", le=str(float(bound))) for bound in (1, 8, 16, 16384)}
    assert below == {1: 1, 8: 3, 16: 4, 16384: 5} and value(found, name, "_bucket", le="+Inf") == 6
    assert value(found, name, "_sum") == steps.num_tokens and len(STEP_TOKENS) + 1 == len(steps.counts)
    (info,) = found["jaxllm:cache_config_info"].samples
    assert info.labels["block_size"] == "4" and info.labels["num_gpu_blocks"] == "64" and info.value == 1


def test_series_do_not_grow_with_what_clients_send():
    def count(web) -> int:
        return web.send("GET", "/metrics").body.count(b"\n")

    with running() as web:

        def hostile(i):
            web.send("GET", f"/no/{i}")
            web.send("GET", f"/v1/models/m{i}")
            web.send(f"M{i}", "/v1/models")
            web.complete(model=f"m{i}", prompt=f"{i}", user=f"u{i}", max_tokens=i + 1)

        web.complete()
        hostile(99)
        count(web)  # which counts itself
        before = count(web)
        for i in range(20):
            hostile(i)
        assert count(web) == before


@pytest.mark.parametrize("vllm_names", [False, True])
def test_requests_are_counted_by_route_method_and_status(vllm_names):
    with running(FakeClient(says={"poison": RuntimeError("x")}), vllm_metric_names=vllm_names) as web:
        for _ in range(3):
            web.complete()
        web.complete(n=0)
        web.complete(prompt="poison")
        web.send("PUT", "/v1/completions")
        web.send("BREW", "/pot?secret")
        web.send("GET", "/v1/models/fake")
        found = families(web)
    counts = {
        (sample.labels["route"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in found["jaxllm:http_requests"].samples
        if sample.name.endswith("_total")
    }
    assert counts == {
        ("/v1/completions", "POST", "200"): 3,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/completions", "POST", "500"): 1,
        ("/v1/completions", "PUT", "405"): 1,
        ("other", "other", "404"): 1,
        ("/v1/models/{name:path}", "GET", "200"): 1,
    }
    theirs = found.get("http_requests")
    assert (theirs is not None) == vllm_names
    if theirs is not None:
        labels = {"handler": "/v1/completions", "method": "POST", "status": "4xx"}
        assert [s.value for s in theirs.samples if s.labels == labels and s.name.endswith("_total")] == [1]


def test_a_client_that_leaves_is_counted_as_such():
    client = FakeClient()
    with running(client) as web:
        client.gate.clear()
        with web.connect() as connection:
            connection.sendall(request("POST", "/v1/completions", {"model": "fake", "prompt": "Hi"}))
            web.wait(lambda: client.running)
        web.wait(lambda: b'status="499"' in web.send("GET", "/metrics").body)
        client.gate.set()


def test_why_sequences_wait_and_what_a_step_costs_the_host():
    told = {"num_waiting": 9, "num_waiting_preempted": 2, "step_s": 5.0, "device_wait_s": 3.5}
    for free, slots, blocks in ((0, 7, 0), (1, 0, 7)):
        client = FakeClient()
        client.stats = lambda free=free: dataclasses.replace(STATS, num_free_slots=free, **told)
        with running(client) as web:
            found = families(web)
        name = "num_requests_waiting_by_reason"
        reasons = [value(found, name, reason=reason) for reason in ("slots", "kv_blocks", "preempted")]
        assert reasons == [slots, blocks, 2]
        assert value(found, "step_seconds", "_total") == 5 and value(found, "step_host_seconds", "_total") == 1.5


otel = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")


@pytest.fixture
def spans():
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), otel.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.tracing = tracing.Tracing(provider, "fake")
    return exporter


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_span_for_each_request(spans):
    client = Queued(says={"poison": ("x", "error")})
    with running(client) as web:
        web.server._tracing = spans.tracing
        body = {"model": "fake", "prompt": "Hi", "temperature": 0.5, "seed": 4}
        web.post("/v1/completions", body, [("traceparent", f"00-{TRACE}-{PARENT}-01")])
        web.chat(max_tokens=3)
        web.complete(prompt="poison")
        web.complete(prompt=["a", "b"])
    first, chat, failed, *two = spans.get_finished_spans()
    assert first.name == "llm_request" and first.kind.name == "SERVER" and len(two) == 2
    assert f"{first.context.trace_id:032x}" == TRACE and f"{first.parent.span_id:016x}" == PARENT
    assert chat.parent is None and f"{chat.context.trace_id:032x}" != TRACE
    told = first.attributes
    assert told["gen_ai.request.model"] == "fake" and told["gen_ai.request.id"].startswith("cmpl-req_")
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.seed"]) == (0.5, 4)
    assert told["gen_ai.request.max_tokens"] == 16 and told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.usage.completion_tokens"] == told["gen_ai.usage.output_tokens"] == 12
    assert told["gen_ai.usage.cache_read.input_tokens"] == 2 and told["gen_ai.latency.time_in_queue"] == 1e-6
    assert told["gen_ai.latency.e2e"] >= told["gen_ai.latency.time_to_first_token"] > 0
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(told["gen_ai.latency.e2e"], abs=1e-6)
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("length",) and chat.status.is_unset
    assert failed.status.status_code.name == "ERROR"
    assert "Hi" not in json.dumps([dict(span.attributes) for span in (first, chat, failed)]), "no texts"


def test_a_broken_traceparent_begins_a_trace(spans):
    with running() as web:
        web.server._tracing = spans.tracing
        answer = web.post("/v1/completions", {"model": "fake", "prompt": "Hi"}, [("traceparent", "zz-\xff-!")])
        assert answer.status == 200
    (span,) = spans.get_finished_spans()
    assert span.parent is None


def test_a_collector_that_hangs_stops_nobody():
    """Spans leave by a thread: a listener that takes connections and says nothing holds up no answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, running() as web:
        made = tracing.open_tracing(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", "fake")
        web.server._tracing = made
        assert web.complete().status == 200
        sender = threading.Thread(target=made._provider.force_flush, args=(100,), daemon=True)
        sender.start()
        connection, _ = listener.accept()
        assert [web.complete().status for _ in range(5)] == [200] * 5, "while the sender waits for its answer"
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        answer = b""
        while b"fake" not in answer:
            answer += connection.recv(1 << 16)
        connection.close()
        web.server._tracing = None
        assert b"POST /v1/traces" in answer


@pytest.mark.parametrize("endpoint", ["localhost:4318", "file:///x", ""])
def test_a_bad_endpoint_is_refused(endpoint):
    with pytest.raises(ValueError, match="must be a URL"):
        tracing.open_tracing(endpoint, "fake")


def test_without_the_extra_the_remedy_is_told():
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from jaxllm.serve import main; sys.exit(main(['--otlp-traces-endpoint', 'http://localhost:1/v1/traces']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'jaxllm[otel]'" in done.stderr


def test_nothing_of_it_is_imported_when_it_is_off():
    code = "import sys, jaxllm.server.http.app; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_engine_counts_steps_and_times_the_queue(llm):
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    before = llm.stats()
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(2 * llm.engine.config.max_num_seqs)]
    outputs = llm.generate(prompts, params)
    after = llm.stats()
    assert sum(after.step_counts) > sum(before.step_counts)
    assert after.num_step_tokens - before.num_step_tokens == len(prompts) * (3 + 3), "the last token is not computed"
    assert 0 < outputs[0].queued_s < outputs[-1].queued_s, "the last ones wait until the first have finished"
