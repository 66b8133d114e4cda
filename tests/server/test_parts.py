"""Parts of the server that sockets don't show: the clock, the mailbox, the log, the metrics' text."""

import asyncio
import logging
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.engine.mailbox import Mailbox
from jaxllm.errors import ModelFormatError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.config import ServerConfig
from jaxllm.server.served_model import read_model
from jaxllm.silence import SilenceMeter
from tests.chat_model import save_tokenizer
from tests.fake_server import FakeClient, running


def test_what_is_read_of_a_model(tmp_path):
    folder = save_tokenizer(tmp_path / "model", "{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 5}')
    model = read_model(ServerConfig(served_model_names=("a",)), str(folder))
    assert model.defaults == {"temperature": 0.6, "top_k": 20} and model.template_source == "{{ messages }}"
    model = read_model(ServerConfig(chat_template="vicuna"), str(folder))
    assert "USER" in model.template_source and model.chat_template == model.template_source
    with pytest.raises(ValueError, match="no-such"):
        read_model(ServerConfig(chat_template="no-such"), str(folder))
    with pytest.raises(
        ModelFormatError, match="nowhere is not a directory; give a local directory in Hugging Face format"
    ):
        read_model(ServerConfig(), str(folder / "nowhere"))


def test_a_suspended_machine_is_no_silence(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jaxllm.silence.time.monotonic", lambda: now[0])
    meter = SilenceMeter()
    for _ in range(10):
        now[0] += 0.2
        meter.tick()
    assert meter.silent_s == pytest.approx(2.0)
    now[0] += 1000
    meter.tick()
    assert meter.silent_s == pytest.approx(3.0)
    meter.heard()
    assert meter.silent_s == 0


def test_a_mailbox_joins_what_is_unread():
    def delta(text, **fields):
        piece = CompletionOutput(index=0, text=text, token_ids=[len(text)], logprobs=None)
        return RequestOutput(request_id="x", prompt=None, prompt_token_ids=[], outputs=[piece], **fields)

    async def main():
        mailbox = Mailbox(is_delta=True)
        mailbox.put(delta("a", prompt_logprobs=[None, {}]))
        mailbox.put(delta("bc"))
        mailbox.put(delta("d", finished=True))
        joined = await mailbox.get()
        assert joined.outputs[0].text == "abcd" and joined.outputs[0].token_ids == [1, 2, 1]
        assert joined.finished and joined.prompt_logprobs == [None, {}]
        mailbox.put(delta("e"))
        mailbox.put(ValueError("gone"))
        with pytest.raises(ValueError, match="gone"):
            await mailbox.get()

    asyncio.run(main())


def test_the_log_holds_no_prompts_and_no_keys(caplog):
    caplog.set_level(logging.INFO)
    client = FakeClient(says={"poison": ("x", "error")})
    with running(client, api_keys=("key-to-hide",)) as web:
        headers = [("Authorization", "Bearer key-to-hide")]
        for body in ({"prompt": "words-to-hide"}, {"prompt": "words-to-hide poison"}, {"prompt": "words-to-hide" * 99}):
            web.post("/v1/completions", {"model": "fake"} | body, headers)
        web.send("GET", "/v1/models", headers=[("Authorization", "Bearer wrong\x0bkey-to-hide")])
        web.send("GET", "/words-to-hide", headers=headers)
    assert "to-hide" not in caplog.text


def test_unknown_fields_are_named_when_debugging(caplog):
    with running() as web:
        caplog.set_level(logging.DEBUG, logger="jaxllm.server.openai.decoding")
        assert web.complete(no_such_field=1).status == 200
    assert "'no_such_field'" in caplog.text


def test_two_requests_with_one_id():
    client = FakeClient()
    with running(client) as web:
        client.gate.clear()
        answers = []
        body = {"model": "fake", "prompt": "Hi"}
        threads = [
            threading.Thread(
                target=lambda: answers.append(web.post("/v1/completions", body, [("X-Request-Id", "same")]))
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        web.wait(lambda: len(client.running) == 2)
        client.gate.set()
        for thread in threads:
            thread.join()
    assert [answer.json["choices"][0]["text"] for answer in answers] == ["Hello, world"] * 2
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2


@pytest.mark.parametrize("vllm_names", [False, True])
def test_metrics_can_be_read(vllm_names):
    with running(vllm_metric_names=vllm_names) as web:
        web.complete(stream=True)
        answer = web.send("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    (sample,) = families["jaxllm:generation_tokens"].samples[:1]
    assert sample.value == 12 and sample.labels == {"model_name": "fake", "engine": "0"}
    assert families["jaxllm:inter_token_latency_seconds"].type == "histogram"
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds", "prefix_cache_hits"):
        assert f"jaxllm:{name}" in families
        assert (f"vllm:{name}" in families) == vllm_names
