"""Embeddings, classes, scores and rankings over sockets, with an engine that is scripted, and with a real one."""

import asyncio
import base64
import dataclasses

import numpy as np
import openai
import pytest

from jaxllm import AsyncLLM, PoolingParams
from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.engine.in_process import InProcessClient
from jaxllm.server.engine.process_client import ProcessClient
from jaxllm.server.pooling import jobs
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import TEMPLATE, write_model
from tests.fake_server import CONFIG, VOCAB, FakeClient, running

INFO = EngineInfo(CONFIG, VOCAB, "embed", 4)
CLASSES = EngineInfo(CONFIG, VOCAB, "classify", 3, ("bad", "fair", "good"))
RERANKS = EngineInfo(CONFIG, VOCAB, "classify", 1)


@pytest.fixture(scope="module")
def shared():
    with running(FakeClient(info=INFO)) as web:
        yield web


@pytest.fixture
def web(shared):
    shared.client.info, shared.client.says = INFO, {}
    shared.client.seen.clear()
    return shared


def post(web, path="/v1/embeddings", **fields):
    return web.post(path, {"model": "fake"} | fields)


def ids(web, text) -> list[int]:
    return web.server.model.tokenizer.encode(text)


def test_one_text(web):
    answer = post(web, input="Hi")
    assert answer.status == 200
    body = answer.json
    (row,) = body["data"]
    assert (body["object"], body["model"], row["object"], row["index"]) == ("list", "fake", "embedding", 0)
    assert row["embedding"] == [sum(ids(web, "Hi"))] * 4
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == len(ids(web, "Hi"))


@pytest.mark.parametrize(
    ("given", "tokens"),
    [(["Hi", "Ho ho"], None), ([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]]), (["Hi"] * 300, None)],
)
def test_several_inputs_keep_their_order(web, given, tokens):
    """Three hundred are more than the server has places for at once: an HTTP request's prompts take turns."""
    wanted = [ids(web, text) for text in given] if tokens is None else tokens
    rows = post(web, input=given).json["data"]
    assert [row["index"] for row in rows] == list(range(len(wanted)))
    assert [row["embedding"][0] for row in rows] == [sum(one) for one in wanted]
    assert web.server.limit.num_admitted == 0


def test_base64_is_little_endian_float32(web):
    web.client.says = {"Hi": [0.5, -1.25, 3e-7, 9.0]}
    (row,) = post(web, input="Hi", encoding_format="base64").json["data"]
    found = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
    assert found.tolist() == np.asarray([0.5, -1.25, 3e-7, 9.0], np.float32).tolist()


def test_parameters_reach_the_engine(web):
    fields = {"dimensions": 2, "use_activation": False, "truncate_prompt_tokens": 3, "cache_salt": "s", "priority": 0}
    assert post(web, input="Hi there", **fields).status == 200
    ((_, params, _),) = web.client.seen
    assert params == PoolingParams(
        task="embed", dimensions=2, use_activation=False, truncate_prompt_tokens=3, cache_salt="s"
    )


def test_no_special_tokens(web):
    post(web, input="Hi", add_special_tokens=False)
    assert web.client.seen[0][0] == web.server.model.tokenizer.encode("Hi", add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "missing"),
        ("/v1/embeddings", {"input": []}, "input", "length >= 1"),
        ("/v1/embeddings", {"input": ["Hi", 5]}, "input", "mixes"),
        ("/v1/embeddings", {"input": [[]]}, "input", "no tokens"),
        ("/v1/embeddings", {"input": [VOCAB]}, "input", "not an integer in"),
        ("/v1/embeddings", {"input": "Hi", "dimensions": 0}, "dimensions", ">= 1"),
        ("/v1/embeddings", {"input": "Hi", "encoding_format": "hex"}, "encoding_format", "hex"),
        ("/v1/embeddings", {"input": "Hi", "normalize": True}, "normalize", "use_activation"),
        ("/v1/embeddings", {"input": "Hi", "messages": [{}]}, "messages", "send their text as input"),
        ("/v1/embeddings", {"input": "x " * 200}, "input", "This model's maximum context length is 256 tokens"),
        ("/v1/embeddings", {"input": ["Hi"] * 2049}, "input", "more than the 2048"),
        ("/v1/score", {"text_1": "a"}, "text_1", "give text_1 and text_2, or queries and documents"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "as many of each"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "a", "documents": "b"}, "text_1", "give text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "length >= 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "put it into the query"),
        ("/pooling", {"input": "Hi", "task": "plugin"}, "task", "plugin"),
    ],
)
def test_what_is_refused(web, path, fields, param, message):
    answer = post(web, path, **fields)
    assert answer.status == 400 and answer.error["param"] == param, answer.error
    assert message in answer.error["message"]
    assert not web.client.seen


def test_what_the_engine_refuses_is_the_clients_fault(web):
    web.client.says = {"Hi": ValueError("dimensions=3 is for models whose embeddings may be cut")}
    answer = post(web, input=["Ho", "Hi"], dimensions=3)
    assert answer.status == 400 and "may be cut" in answer.error["message"]
    web.wait(lambda: not web.client.running)


def test_a_failure_of_the_engines_own_tells_nothing(web):
    web.client.says = {"Hi": RuntimeError("secret")}
    answer = post(web, input="Hi")
    assert answer.status == 500 and "secret" not in answer.error["message"]


def test_scores_are_cosines_where_the_model_embeds(web):
    web.client.says = {"one": [1, 0, 0, 0], "two": [0.6, 0.8, 0, 0]}
    rows = post(web, "/v1/score", text_1="one", text_2=["one", "two"]).json["data"]
    assert [row["object"] for row in rows] == ["score"] * 2
    np.testing.assert_allclose([row["score"] for row in rows], [1, 0.6], atol=1e-6)
    assert len(web.client.seen) == 2, "each text is embedded once"


def test_a_ranking_is_sorted_and_cut(web):
    web.client.says = {"q": [1, 0, 0, 0], "far": [0, 1, 0, 0], "near": [1, 0.1, 0, 0], "same": [2, 0, 0, 0]}
    fields = {"query": "q", "documents": ["far", {"text": "near"}, "same"]}
    body = post(web, "/v1/rerank", **fields).json
    assert [one["index"] for one in body["results"]] == [2, 1, 0]
    assert body["results"][1]["document"] == {"text": "near"} and body["id"].startswith("rerank-")
    assert body["usage"]["total_tokens"] > 0
    for path in ("/rerank", "/v2/rerank"):
        body = post(web, path, **fields, top_n=1, return_documents=False).json
        assert body["results"] == [{"index": 2, "relevance_score": 1.0}]


def test_documents_count_with_their_first_tokens(web):
    post(web, "/v1/rerank", query="a b c d", documents=["a b c d e"], max_tokens_per_doc=3)
    assert [len(tokens) for tokens, *_ in web.client.seen] == [len(ids(web, "a b c d")), 3]


def test_classes(web):
    web.client.info = CLASSES
    web.client.says = {"Hi": [0.1, 0.2, 0.7], "Ho": [0.8, 0.1, 0.1]}
    rows = post(web, "/classify", input=["Hi", "Ho"]).json["data"]
    assert [(row["label"], row["num_classes"]) for row in rows] == [("good", 3), ("bad", 3)]
    np.testing.assert_allclose(rows[0]["probs"], [0.1, 0.2, 0.7], atol=1e-6)
    answer = post(web, "/score", text_1="a", text_2="b")
    assert answer.status == 400 and "knows 3 classes" in answer.error["message"]


def test_pairs_are_read_at_once_and_bounded_together(web, monkeypatch):
    """One text may be in all pairs of a small body."""
    web.client.info = RERANKS
    monkeypatch.setattr(jobs, "MAX_PAIR_TOKENS", 100)
    monkeypatch.setattr(Tokenizer, "encode_pair", lambda self, first, second, most=None: [5] * len(first + second))
    body = post(web, "/v1/rerank", query="q" * 20, documents=["ab", "abcd"]).json
    assert [one["relevance_score"] for one in body["results"]] == [120.0, 110.0]
    answer = post(web, "/v1/rerank", query="q" * 20, documents=["ab"] * 9)
    assert answer.status == 400 and "the first 5 of 9 pairs have 110 tokens" in answer.error["message"]
    long = post(web, "/v1/rerank", query="q" * (256 * 32 + 1), documents=["ab"])
    assert long.error["code"] == "context_length_exceeded"


def test_an_unknown_model_and_a_full_server(web):
    assert post(web, model="other", input="Hi").status == 404
    web.server.limit.is_draining = True
    try:
        assert post(web, input="Hi").status == 503
    finally:
        web.server.limit.is_draining = False


def test_a_client_that_leaves_gives_its_places_back(web):
    web.client.gate.clear()
    try:
        connection = web.connect()
        body = b'{"model": "fake", "input": ["Hi", "Ho", "Ha"]}'
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        web.wait(lambda: len(web.client.running) == 2)  # as many as the engine runs at once
        connection.close()
        web.wait(lambda: not web.client.running and web.server.limit.num_admitted == 0)
    finally:
        web.client.gate.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


SIZES = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=64, block_size=4)


@pytest.fixture(scope="module")
def llm(folder):
    llm = AsyncLLM(folder, **SIZES)
    yield llm
    llm.close()


def embedded(llm, prompt) -> np.ndarray:
    async def main():
        async for output in llm.encode(prompt):
            return output.outputs.data

    return asyncio.run(main())


def test_openais_client_gets_what_the_library_makes(llm):
    with (
        running(InProcessClient(llm), template=TEMPLATE) as web,
        openai.OpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0, timeout=200) as client,
    ):
        texts = ["Hello", "x y z " * 5, "Hello"]
        answer = client.embeddings.create(model="fake", input=texts)  # base64 unless told otherwise
        for text, row in zip(texts, answer.data, strict=True):
            np.testing.assert_allclose(row.embedding, embedded(llm, text), atol=1e-6)
        plain = client.embeddings.create(model="fake", input=texts, encoding_format="float")
        np.testing.assert_allclose(plain.data[1].embedding, answer.data[1].embedding, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="hf_overrides"):
            client.embeddings.create(model="fake", input="Hello", dimensions=4)
        metrics = web.send("GET", "/metrics").body.decode()
        assert 'request_success_total{engine="0",finished_reason="stop",model_name="fake"} 6.0' in metrics
    assert llm.stats().blocks_used == 0


def test_an_engine_in_another_process_says_the_same(folder, llm):
    async def main():
        client = ProcessClient({"model": str(folder)} | SIZES)
        try:
            await client.start()
            assert dataclasses.replace(client.info, config=CONFIG) == EngineInfo(CONFIG, llm.vocab, "embed", 16)
            first = client.pool([5, 6, 7], PoolingParams(), request_id="a")
            outputs = await asyncio.gather(first, client.pool([9], PoolingParams(use_activation=False), request_id="b"))
            with pytest.raises(ValueError, match="hf_overrides"):
                await client.pool([1], PoolingParams(dimensions=3), request_id="c")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await client.pool([1] * 60, PoolingParams(), request_id="d")
            return outputs
        finally:
            await client.close()

    first, second = asyncio.run(main())
    np.testing.assert_allclose(first.outputs.data, embedded(llm, {"prompt_token_ids": [5, 6, 7]}), atol=1e-6)
    assert np.linalg.norm(second.outputs.data) != pytest.approx(1, abs=1e-3)
