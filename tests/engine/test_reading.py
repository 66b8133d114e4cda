"""How a checkpoint is read when it is not read as it is, and what a request may then ask."""

import json

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.generation_config import default_sampling_params
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.intake import check_request
from jaxllm.engine.model_source import Reading, model_source
from jaxllm.errors import ModelFormatError
from tests.chat_model import write_model

SIZES = dict(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_blocks=16)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("reading") / "model")


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (Reading(load_format="pt"), "load_format='pt' is not supported for .*: it is 'auto' or 'safetensors'"),
        (Reading(load_format="gguf"), "load_format='gguf' is not supported"),
        (Reading(load_format="bitsandbytes"), "load_format='bitsandbytes' is not supported"),
        (Reading(hf_overrides="x"), "hf_overrides is a str; give a dict of config.json's keys"),
        (Reading(hf_overrides={"hidden_size": -1}), "hidden_size=-1"),
    ],
)
def test_what_can_not_be_read_so(model_dir, reading, said):
    with pytest.raises((ValueError, TypeError), match=said):
        model_source(model_dir, "float32", "cpu", None, reading)


def test_overrides_are_in_the_place_of_keys(model_dir):
    reading = Reading(hf_overrides={"max_position_embeddings": 77}, skip_tokenizer_init=True)
    source = model_source(model_dir, "float32", "cpu", None, reading)
    assert source.cfg.max_len == 77 and source.tokenizer is None


def test_what_is_for_checkpoints_alone(tiny, model_dir):
    for reading in (Reading(load_format="dummy"), Reading(hf_overrides={"vocab_size": 1})):
        with pytest.raises(ValueError, match="load_format, hf_overrides and task are for checkpoints"):
            model_source(tiny.model, "auto", "cpu", None, reading)
    with pytest.raises(ValueError, match="tokenizer and skip_tokenizer_init=True exclude each other"):
        model_source(model_dir, "float32", "cpu", model_dir, Reading(skip_tokenizer_init=True))
    with pytest.raises(ValueError, match="record notes neither load_format='dummy' nor hf_overrides"):
        LLM(model_dir, load_format="dummy", record=model_dir / "record", **SIZES)


def test_default_parameters_come_from_where_they_are_wanted(model_dir, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "max_new_tokens": 7}))
    assert default_sampling_params(None, tmp_path) == SamplingParams(temperature=0.25, max_tokens=7)
    assert default_sampling_params(None, tmp_path, {"temperature": 0.5, "max_new_tokens": 9}) == SamplingParams(
        temperature=0.5, max_tokens=9
    )
    assert default_sampling_params(None, "vllm", None) == SamplingParams()
    with pytest.raises(ModelFormatError, match="generation_config.json is missing"):
        default_sampling_params(None, tmp_path / "none")
    with pytest.raises(ValueError, match="override_generation_config has no 'temprature'; it may have temperature"):
        LLM(model_dir, override_generation_config={"temprature": 1}, **SIZES)
    with pytest.raises(ValueError, match="temperature=9 must be"):
        LLM(model_dir, override_generation_config={"temperature": 9}, **SIZES)


def test_a_prompt_is_cut_to_its_last_tokens():
    config = EngineConfig(**SIZES)

    def kept(num_tokens: int, keep: int | None) -> list[int]:
        ids, _ = check_request(range(num_tokens), SamplingParams(truncate_prompt_tokens=keep), config, 100, None)
        return ids

    assert kept(10, 3) == [7, 8, 9] and kept(10, 20) == kept(10, None) == list(range(10))
    assert kept(50, -1) == list(range(19, 50)) and kept(10, -1) == list(range(10))
    with pytest.raises(ValueError, match="the prompt has 40 tokens"):
        kept(50, 40)


def test_an_engine_bounds_log_probabilities():
    config = EngineConfig(max_logprobs=3, **SIZES)
    check_request([1], SamplingParams(logprobs=3), config, 100, None)
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=f"{field}=4 is more than the engine's max_logprobs=3"):
            check_request([1], SamplingParams(**{field: 4}), config, 100, None)
