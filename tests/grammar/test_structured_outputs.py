"""Structured outputs: every text has the form that was asked for, and nothing else about a request changes."""

import asyncio
import json
import re
from contextlib import aclosing

import jax
import jsonschema
import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputs
from jaxllm.engine.device.packing import sample_ladder
from tests.chat_model import backend
from tests.engine.test_step_contract import fail_once
from tests.tiny import Tiny, clean, drain, ids, make_llm, prompts_of

VOCAB = 270  # of which the tokenizer has 263
EOS = 257
MASKING = ("logits", "alter", "sample_full")  # the executables that a step with grammars samples by
PROMPTS = prompts_of([9, 14, 5, 12, 17, 3, 8, 11], vocab=256, seed=5)
PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "ok"],
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
}


def is_json(schema):
    return lambda text: jsonschema.validate(json.loads(text), schema) is None


FORMS = {
    "json": (StructuredOutputs(json=PERSON, disable_any_whitespace=True), is_json(PERSON)),
    "spaced json": (
        StructuredOutputs(json=json.dumps({"enum": [[1, 2], {"a": None}]})),
        lambda text: json.loads(text) in ([1, 2], {"a": None}),
    ),
    "json object": (StructuredOutputs(json_object=True), is_json({"type": "object"})),
    "regex": (StructuredOutputs(regex=r"[a-c]{3}-\d+(x|y)"), lambda text: re.fullmatch(r"[a-c]{3}-\d+(x|y)", text)),
    "choice": (StructuredOutputs(choice=["yes", "no", "n.b.", "où?"]), ["yes", "no", "n.b.", "où?"].__contains__),
    "lark": (StructuredOutputs(grammar='start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"\(*x\)*", text)),
    "gbnf": (StructuredOutputs(grammar='root ::= "x" | "[" root "]"'), lambda text: re.fullmatch(r"\[*x\]*", text)),
}
WAYS = {
    "greedy": dict(temperature=0.0),
    "samples": dict(n=3, temperature=1.5),
    "best": dict(n=1, best_of=3),
    "beams": dict(n=3, beam_width=3),
    "everything": dict(
        n=2, top_k=50, repetition_penalty=1.2, presence_penalty=0.5, logprobs=2, min_tokens=2, logit_bias={40: 1.0}
    ),
    "stop strings": dict(n=2, stop=["zq"], prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def model():
    return Tiny(vocab=VOCAB, max_len=256)


@pytest.fixture(scope="module")
def shared(model):
    llm = make_llm(model.model, tokenizer=backend())
    llm.engine.intake.eos_ids = frozenset({EOS})
    llm.engine.intake.grammars._eos_ids = [EOS]
    yield llm
    llm.close()


@pytest.fixture
def llm(shared):
    shared.engine.scheduler.pool.forget_keys()
    yield shared
    drain(shared)
    clean(shared)


def asking(form, max_tokens=60, **fields) -> SamplingParams:
    wanted = form if isinstance(form, StructuredOutputs) else FORMS[form][0]
    return SamplingParams(structured_outputs=wanted, max_tokens=max_tokens, **{"seed": 3} | fields)


def check(llm, form, completion, eos_ids=(EOS,)) -> bool:
    """Whether the text is complete; if it is not, it must be the beginning of such a one."""
    wanted, is_right = FORMS[form]
    if completion.finish_reason == "stop":
        assert completion.stop_reason is None and is_right(completion.text), completion
        return True
    assert completion.finish_reason == "length", completion
    matcher = llm.engine.intake.grammars.compile(wanted).matcher()
    assert matcher.inner.validate_tokens(completion.token_ids) == len(completion.token_ids)
    return False


@pytest.mark.parametrize("form", FORMS)
def test_every_text_has_the_form(llm, form):
    params = [asking(form, **fields) for fields in WAYS.values()]
    outputs = llm.generate(ids(*PROMPTS[: len(params)]), params)
    complete = [check(llm, form, completion) for out in outputs for completion in out.outputs]
    assert [len(out.outputs) for out in outputs] == [1, 3, 1, 3, 2, 2]
    assert any(complete), "none of them came to an end"
    assert not any(out.error for out in outputs)


def test_the_embedded_model():
    schema = PERSON | {"properties": PERSON["properties"] | {"name": {"enum": ["Tim", "Lily"]}}}
    params = [asking(StructuredOutputs(json=schema), temperature=1.5, n=2), asking("choice")]
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=64)
    with LLM(**sizes) as llm:
        person, choice = llm.generate(["Once upon a time", "Yes or no?"], params)
        texts = [completion.text for completion in person.outputs if completion.finish_reason == "stop"]
        assert texts and all(is_json(schema)(text) for text in texts)
        assert check(llm, "choice", choice.outputs[0])


def test_samples_differ_and_each_follows_its_own(llm):
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(regex="[a-z]{12}"), n=6))
    texts = [completion.text for completion in out.outputs]
    assert len(set(texts)) == 6 and all(re.fullmatch("[a-z]{12}", text) for text in texts)


def test_the_end(llm):
    """A form that is complete ends at once, with its last token in the text; one that may go on ends by the model."""
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(choice=["yes"])))
    completion = out.outputs[0]
    assert (completion.text, len(completion.token_ids), completion.finish_reason) == ("yes", 3, "stop")
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(choice=["yes"]), max_tokens=3))
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("yes", "stop")
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(choice=["yes"]), max_tokens=2))
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("ye", "length")
    eager = {"logit_bias": {EOS: 100.0}, "temperature": 0.0}
    for fields in ({}, {"ignore_eos": True}, {"beam_width": 2}):
        (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(regex="aa*"), **eager | fields))
        completion = out.outputs[0]
        assert (completion.text, completion.finish_reason, completion.token_ids[-1]) == ("a", "stop", EOS)
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(regex="a*"), min_tokens=5, **eager))
    assert out.outputs[0].text == "aaaaa"
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(choice=[""]), **eager))
    assert (out.outputs[0].text, out.outputs[0].token_ids) == ("", [EOS])


def test_stop_strings_and_allowed_tokens(llm):
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(regex="(ab){10}"), stop="ba"))
    assert (out.outputs[0].text, out.outputs[0].stop_reason) == ("a", "ba")
    a, b = llm.tokenizer.encode("ab", add_special_tokens=False)
    (out,) = llm.generate(ids(PROMPTS[0]), asking(StructuredOutputs(regex="[a-z]{9}"), allowed_token_ids=[a, b]))
    assert re.fullmatch("[ab]{9}", out.outputs[0].text)


@pytest.mark.parametrize("fields", [{}, {"beam_width": 2}, {"logprobs": 1}], ids=str)
def test_what_leaves_no_token_fails_alone(llm, fields):
    (a,) = llm.tokenizer.encode("a", add_special_tokens=False)
    params = [asking(StructuredOutputs(regex="b+"), allowed_token_ids=[a], **fields), asking("choice")]
    stuck, other = llm.generate(ids(*PROMPTS[:2]), params)
    assert stuck.outputs[0].finish_reason == "error" and "structured_outputs" in stuck.error
    assert check(llm, "choice", other.outputs[0])


@pytest.mark.parametrize("fields", [{}, {"beam_width": 2, "n": 2}, {"n": 3}], ids=str)
def test_an_empty_mask_fails_alone(fields):
    """The model lacks the tokens of the tokenizer that the grammar needs."""
    small = Tiny(vocab=96, max_len=64)
    with make_llm(small.model, tokenizer=backend(), max_num_seqs=4) as llm:
        wanted = StructuredOutputs(regex="aa(é|ü)")
        llm.engine.add(PROMPTS_96[0], asking(wanted, **fields), request_id="stuck", stream=True)
        llm.engine.add(PROMPTS_96[1], SamplingParams(temperature=0.0, max_tokens=9), request_id="other")
        done = {}
        while llm.engine.has_work():
            done |= {out.request_id: out for out in llm.engine.step() if out.finished}
            llm.engine.scheduler.check()
        assert ("structured_outputs" if "beam_width" in fields else "no token of the model's") in done["stuck"].error
        assert {completion.finish_reason for completion in done["stuck"].outputs} == {"error"}
        assert len(done["other"].outputs[0].token_ids) == 9
        clean(llm)


PROMPTS_96 = prompts_of([9, 5], vocab=60, seed=5)


def test_log_probabilities_are_the_models(llm):
    (out,) = llm.generate(ids(PROMPTS[1]), asking("choice", logprobs=0))
    tokens = out.outputs[0].token_ids
    told = [row[token].logprob for row, token in zip(out.outputs[0].logprobs, tokens, strict=True)]
    (scored,) = llm.generate(ids(PROMPTS[1] + tokens), SamplingParams(max_tokens=1, prompt_logprobs=0))
    expected = [row[token].logprob for row, token in zip(scored.prompt_logprobs[-len(tokens) :], tokens, strict=True)]
    np.testing.assert_allclose(told, expected, atol=1e-4)


def test_beam_search_takes_a_form(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=9, structured_outputs=FORMS["choice"][0])
    (out,) = llm.beam_search(ids(PROMPTS[0]), params)
    texts = [llm.tokenizer.decode(sequence.tokens[len(PROMPTS[0]) :]) for sequence in out.sequences]
    assert len(texts) == 2 and all(FORMS["choice"][1](text) for text in texts)


def test_neighbours_are_as_alone_and_never_wait(llm):
    free = SamplingParams(seed=4, max_tokens=12, ignore_eos=True)
    alone = [llm.generate(ids(prompt), free)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
    bound = asking(StructuredOutputs(regex="[a-z]{12}"))
    (bound_alone,) = llm.generate(ids(PROMPTS[3]), bound)
    llm.engine.scheduler.pool.forget_keys()
    for i, prompt in enumerate(PROMPTS[:3]):
        llm.engine.add(prompt, free, request_id=f"free{i}", stream=True)
    llm.engine.add(PROMPTS[3], bound, request_id="bound", stream=True)
    lengths, done = [], {}
    while llm.engine.has_work():
        news = {out.request_id: out for out in llm.engine.step()}
        done |= {name: out for name, out in news.items() if out.finished}
        if "free0" in news:
            lengths.append(len(news["free0"].outputs[0].token_ids))
        llm.engine.scheduler.check()
    assert lengths == list(range(1, 13)), "one that follows no grammar missed a step"
    assert [done[f"free{i}"].outputs[0].token_ids for i in range(3)] == alone
    assert done["bound"].outputs[0].token_ids == bound_alone.outputs[0].token_ids


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_preemption(llm, way):
    llm.engine.set_preemption(way)
    before = llm.stats()
    shapes = [dict(n=2), dict(beam_width=3, n=3), {}, dict(best_of=3)] * 2
    wanted = StructuredOutputs(regex=r"[a-z]{38}(\d|\d\d)")
    outputs = llm.generate(ids(*PROMPTS), [asking(wanted, **fields) for fields in shapes])
    for out in outputs:
        assert all(re.fullmatch(wanted.regex, completion.text) for completion in out.outputs), out.error
    after = llm.stats()
    assert after.num_preemptions > before.num_preemptions
    assert (after.num_swapped > before.num_swapped) == (way == "swap")
    llm.engine.set_preemption("auto")


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("when", [1, 4, 7])
def test_a_failed_step(llm, monkeypatch, when, after):
    fail_once(llm, when, monkeypatch, after=after)
    forms = ["json", "regex", "choice"]
    params = [asking(form, **fields) for form, fields in zip(forms, (dict(n=2), dict(beam_width=2), {}), strict=True)]
    for form, out in zip(forms, llm.generate(ids(*PROMPTS[:3]), params), strict=True):
        assert out.error is None
        for completion in out.outputs:
            check(llm, form, completion)


def test_an_abort(llm):
    llm.engine.add(PROMPTS[0], asking(StructuredOutputs(regex="[a-z]{30}")), request_id="a")
    llm.engine.add(PROMPTS[1], asking("choice"), request_id="b")
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.abort("a").outputs[0].finish_reason == "abort"
    done = [out for _ in range(40) if llm.engine.has_work() for out in llm.engine.step() if out.finished]
    assert check(llm, "choice", done[0].outputs[0])


def test_nothing_compiles_after_the_start(llm):
    llm.wait_compiled()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    try:
        params = [asking(form, **fields) for form, fields in zip(FORMS, list(WAYS.values()) * 2, strict=False)]
        llm.generate(ids(*PROMPTS[: len(params)]), params)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert llm.stats().num_compiled == llm.stats().num_executables
    names = llm.engine.runner.compile_plan.names
    sizes = {kind: [size for name, *rest in map(_pair, names) if name == kind for size in rest] for kind in MASKING}
    config = llm.engine.config
    assert sizes == dict.fromkeys(MASKING, list(sample_ladder(config.max_num_seqs, config.min_bucket)))


def _pair(name):
    return name if isinstance(name, tuple) else (name,)


def test_a_stream(llm):
    texts = [out.outputs[0].text for _, out in llm.stream(ids(PROMPTS[0]), asking("json"))]
    assert len(texts) > 5 and all(b.startswith(a.rstrip("\ufffd")) for a, b in zip(texts, texts[1:], strict=False))


BAD = {
    "regex": dict(regex="[a"),
    "look-ahead": dict(regex="(?=a)b"),
    "schema": dict(json={"type": "nonsense"}),
    "keyword": dict(json={"not": {"type": "string"}}),
    "reference": dict(json={"$ref": "#/nope"}),
    "lark": dict(grammar="start: foo"),
    "gbnf": dict(grammar="root ::= ("),
    "json": dict(grammar='{"grammars": 7'),
    "slow": dict(regex="(a{1000}){1000}"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars_are_refused_at_the_door(llm, name):
    params = asking(StructuredOutputs(**BAD[name]))
    with pytest.raises(ValueError, match=r"grammar|structured_outputs|regular expression"):
        llm.generate(ids(*PROMPTS[:2]), [asking("choice"), params])
    with pytest.raises(ValueError):
        llm.engine.add(PROMPTS[0], params, request_id="bad")
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json": {}}, "exactly one"),
        ({"json": [1]}, "JSON schema"),
        ({"json": "{"}, "not JSON"),
        ({"json": {"enum": [float("nan")]}}, "JSON schema"),
        ({"regex": ""}, "non-empty"),
        ({"json": {"a": ...}}, "JSON schema"),
        ({"choice": []}, "at least one"),
        ({"choice": [1]}, "one string"),
        ({"choice": "yes"}, "list"),
        ({"choice": ["x"] * 50_001}, "at most"),
        ({"grammar": 7}, "non-empty"),
        ({"regex": "a" * (1 << 20) + "a"}, "characters"),
        ({"json_object": 1}, "True or False"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json"),
        ({"json": {}, "disable_any_whitespace": 1}, "True or False"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_structured_outputs_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**fields)


def test_deep_schemas_are_refused():
    schema = {}
    for _ in range(64):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="64 levels"):
        StructuredOutputs(json=schema)
    with pytest.raises(ValueError, match="64 levels|not JSON"):
        StructuredOutputs(json='{"items":' * 100_000 + "{}" + "}" * 100_000)


def test_a_dict_will_do():
    assert SamplingParams(structured_outputs={"regex": "a"}) == asking(StructuredOutputs(regex="a"), 16, seed=None)
    with pytest.raises(ValueError, match="has no 'regexp'"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(ValueError, match="exactly one"):
        SamplingParams(structured_outputs={})


def test_additional_properties():
    schema = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"enum": [{"type": "object"}]}}}
    closed = json.loads(StructuredOutputs(json=schema, disable_additional_properties=True).json)
    assert closed["additionalProperties"] is closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"] == {"enum": [{"type": "object"}]}


@pytest.mark.parametrize("tokenizer", [None, "letters"])
def test_who_has_no_fast_tokenizer_is_told(tiny, tokenizer):
    from tests.engine.test_step_contract import Letters

    with make_llm(tiny.model, tokenizer=None if tokenizer is None else Letters()) as llm:
        with pytest.raises(ValueError, match="fast tokenizer"):
            llm.generate(ids([1, 2]), asking("choice"))


def test_async_requests_share_an_engine(model):
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_blocks=64)
    llm = AsyncLLM(model.model, tokenizer=backend(), **sizes)

    async def text(form):
        async for out in llm.generate({"prompt_token_ids": PROMPTS[0]}, asking(form)):
            last = out
        return last.outputs[0]

    async def refused():
        with pytest.raises(ValueError, match="not sound"):
            await text(StructuredOutputs(regex="[a"))

    async def left():
        stream = llm.generate({"prompt_token_ids": PROMPTS[1]}, asking("json object"))
        async with aclosing(stream):
            await anext(stream)

    async def main():
        return await asyncio.gather(text("choice"), text("regex"), refused(), left())

    try:
        choice, regex, *_ = asyncio.run(main())
        assert FORMS["choice"][1](choice.text)
        assert regex.finish_reason == "length" or FORMS["regex"][1](regex.text)
    finally:
        llm.close()
