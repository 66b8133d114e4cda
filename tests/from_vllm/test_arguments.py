"""The tables of vLLM's arguments: they know all of them, nothing that asks for something is ignored, and the interfaces
have them."""

import dataclasses
import inspect
import logging
import types
import typing

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, SamplingParams, sampling_params
from jaxllm.base_llm import BaseLLM
from jaxllm.from_vllm.dtypes import dtype_name
from jaxllm.from_vllm.engine_arguments import ENGINE_ARGUMENTS, RENAMED, translate_engine_arguments
from jaxllm.from_vllm.request_arguments import (
    ADD_REQUEST_ARGUMENTS,
    CHAT_ARGUMENTS,
    GENERATE_ARGUMENTS,
    SAMPLING_FIELDS,
    VllmChatArguments,
    VllmGenerateArguments,
    check_request_arguments,
)
from jaxllm.from_vllm.rules import Hint, Only
from jaxllm.from_vllm.typed import VllmEngineArguments
from tests.from_vllm import table
from tests.from_vllm.vllm_names import ENGINE_ARGS, SAMPLING_PARAMS

OURS = [name for name in inspect.signature(BaseLLM.__init__).parameters if name not in ("self", "vllm")]


def test_every_argument_of_vllm_is_known():
    assert not [name for name in ENGINE_ARGS if name not in OURS and name not in ENGINE_ARGUMENTS]
    assert not set(OURS) & set(ENGINE_ARGUMENTS)
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not [name for name in SAMPLING_PARAMS if name not in fields and name not in SAMPLING_FIELDS]


def test_type_checkers_know_what_the_tables_have():
    assert set(typing.get_type_hints(VllmEngineArguments)) == set(ENGINE_ARGUMENTS)
    assert set(typing.get_type_hints(VllmGenerateArguments)) == set(GENERATE_ARGUMENTS)
    assert set(typing.get_type_hints(VllmChatArguments)) == set(CHAT_ARGUMENTS)


@pytest.mark.parametrize("name", ENGINE_ARGUMENTS)
def test_nothing_that_asks_for_something_is_ignored(name, caplog):
    rule, asks = ENGINE_ARGUMENTS[name], types.SimpleNamespace(backend="mine")
    assert translate_engine_arguments("LLM", {name: None}, {}) == {}
    if isinstance(rule, Only):
        with pytest.raises(ValueError, match=f"^{name}=.* is not supported: .{{10}}"):
            translate_engine_arguments("LLM", {name: asks}, {})
        for value in () if callable(rule.accepted) else rule.accepted:
            assert translate_engine_arguments("LLM", {name: value}, {}) == {}
    elif isinstance(rule, Hint):
        with caplog.at_level(logging.INFO, "jaxllm"):
            assert translate_engine_arguments("LLM", {name: asks}, {}) == {}
        assert f"{name}=" in caplog.text and rule.note in caplog.text
    else:
        assert translate_engine_arguments("LLM", {name: 5}, {}) == {rule.ours: 5} and rule.ours in OURS


def test_zero_and_one_are_no_flags():
    for value in (True, 2, 1.5):
        with pytest.raises(ValueError, match="data_parallel_rank=.* is not supported"):
            translate_engine_arguments("LLM", {"data_parallel_rank": value}, {})
    with pytest.raises(ValueError, match="enable_lora=1 is not supported"):
        translate_engine_arguments("LLM", {"enable_lora": 1}, {})


@pytest.mark.parametrize("theirs", RENAMED)
def test_two_names_of_one_thing_exclude_each_other(theirs):
    with pytest.raises(ValueError, match=f"{theirs}=5 and {RENAMED[theirs]}=6 are the same thing; give one"):
        translate_engine_arguments("LLM", {theirs: 5}, {RENAMED[theirs]: 6})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("max_model_le", "did you mean max_model_len?"), ("max_new_tokens", r"SamplingParams\(max_tokens=")),
        *(("temperature", r"SamplingParams\(temperature="), ("n_ctx", "give max_model_len")),
        *(("load_in_4bit", "give quantization='int8', 'int4'"), ("device_map", "tensor_parallel_size")),
    ],
)
def test_unknown_arguments_say_what_is_meant(name, said):
    for call in (LLM, AsyncLLM, lambda **options: LLM.from_engine_args(EngineArgs(**options))):
        with pytest.raises(TypeError, match=f"has no argument {name!r}.*{said}"):
            call(**{name: 1})


@pytest.mark.parametrize(
    ("rules", "name", "said"),
    [
        (GENERATE_ARGUMENTS, "max_tokens", r"llm.generate\(prompts, SamplingParams\(max_tokens="),
        (GENERATE_ARGUMENTS, "max_new_tokens", "give max_tokens, in SamplingParams"),
        (CHAT_ARGUMENTS, "lora_reqest", r"did you mean lora_request\?"),
        (ADD_REQUEST_ARGUMENTS, "stream", "call llm.stream"),
    ],
)
def test_unknown_arguments_of_requests(rules, name, said):
    with pytest.raises(TypeError, match=said):
        check_request_arguments("generate", {name: 1}, rules)


def test_both_interfaces_have_one_signature():
    assert inspect.signature(LLM) == inspect.signature(AsyncLLM)
    assert [field.name for field in dataclasses.fields(EngineArgs)] == [*OURS, *sorted(ENGINE_ARGUMENTS)]
    defaults = {field.name: field.default for field in dataclasses.fields(AsyncEngineArgs)}
    parameters = inspect.signature(LLM).parameters
    assert all(defaults[name] == parameters[name].default for name in OURS)


def test_engine_args_are_changed_like_vllms():
    args = EngineArgs("model", max_model_len=np.int64(64))
    args.max_num_seqs = 4
    assert dataclasses.asdict(args) | {"model": "x"} == dataclasses.asdict(
        AsyncEngineArgs(model="x", max_model_len=64, max_num_seqs=4)
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((jnp.bfloat16, "bfloat16"), (np.dtype("float32"), "float32"), (np.float16, "float16"), ("half", "float16")),
        *(("float", "float32"), ("auto", "auto"), ("fp8", "fp8"), (5, "5")),
    ],
)
def test_dtypes(given, name):
    assert dtype_name(given) == name


def test_names_that_are_not_there_say_why():
    for module in (jaxllm, sampling_params):
        with pytest.raises(ImportError, match="there are no LoRA adapters yet"):
            module.LoRARequest  # noqa: B018 - raises
        with pytest.raises(AttributeError, match="has no attribute 'SamplingParam'; did you mean SamplingParams"):
            module.SamplingParam  # noqa: B018 - raises


def test_the_document_is_what_the_tests_say():
    assert table.FILE.read_text() == table.render(), "python -m tests.from_vllm.table writes it"
