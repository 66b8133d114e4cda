"""`LLM.chat`, prompts in every form, what the model recommends, and requests drawn from an iterator."""

import json

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.generation_config import default_sampling_params
from jaxllm.cli import generate
from jaxllm.errors import ModelFormatError
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.prompts import TokensPrompt
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import TEMPLATE, TURNS, save_tokenizer, write_model
from tests.tiny import Tiny, clean

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=8, num_blocks=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chat_llm(model_dir):
    with LLM(str(model_dir), **SIZES) as llm:
        yield llm


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_conversation_is_its_rendered_text_without_another_beginning(chat_llm):
    tokenizer = chat_llm.get_tokenizer()
    (out,) = chat_llm.chat(TURNS[:1], GREEDY, use_tqdm=False)
    assert out.prompt == TEXT == tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True)
    assert out.prompt_token_ids == ids == tokenizer.encode(TEXT)[1:], "the rule of the tokenizer would begin with <s>"
    assert tokens_of([out]) == tokens_of(chat_llm.generate({"prompt_token_ids": ids}, GREEDY))


def test_several_conversations_each_with_its_parameters(chat_llm):
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)]
    outputs = chat_llm.chat([TURNS[:1], TURNS], params, use_tqdm=False)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [4, 2]
    assert outputs[0].prompt == TEXT and outputs[1].prompt.count("<|im_start|>") == 4


def test_templates_and_their_options(chat_llm):
    def prompt(messages=TURNS, **options):
        return chat_llm.chat(messages, GREEDY, use_tqdm=False, **options)[0].prompt

    assert prompt(chat_template="llama2").startswith("<s>[INST] Hi [/INST] Hello. </s><s>[INST] Bye")
    assert prompt(chat_template="{{ messages[-1].content }}{{ mood }}", chat_template_kwargs={"mood": "!"}) == "Bye!"
    assert prompt(chat_template="{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    continued = prompt(TURNS[:2], add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nHello.")


@pytest.mark.parametrize("messages", ["Hi", [], [{"role": "user"}], ["Hi"], [TURNS, []]])
def test_what_is_no_conversation_runs_nothing(chat_llm, messages):
    with pytest.raises(ValueError, match="conversation is a list|must be a dict|has neither"):
        chat_llm.chat(messages, GREEDY)
    clean(chat_llm)


def test_prompts_in_every_form_are_the_same(chat_llm):
    ids = chat_llm.tokenizer.encode("abc")
    forms = ["abc", {"prompt": "abc"}, ids, {"prompt_token_ids": ids}, TokensPrompt(prompt_token_ids=ids, prompt="abc")]
    outputs = chat_llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["abc", "abc", None, None, "abc"]
    assert tokens_of(chat_llm.generate(ids, sampling_params=GREEDY)) == tokens_of(outputs[:1]), "one prompt, not many"
    with pytest.raises(ValueError, match="id 999 is not an integer in"):
        chat_llm.generate([[1, 999]])


def test_the_models_recommendation_is_taken_for_want_of_another(chat_llm, model_dir):
    assert chat_llm.get_default_sampling_params() == SamplingParams()
    file = model_dir / "generation_config.json"
    try:
        file.write_text(json.dumps({"do_sample": False, "top_p": 0.5, "max_new_tokens": 3, "max_length": 20}))
        assert chat_llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_p=0.5, max_tokens=3)
        outputs = chat_llm.generate(["ab"] * 2)
        assert tokens_of(outputs[:1]) == tokens_of(outputs[1:]) and len(outputs[0].outputs[0].token_ids) <= 3
    finally:
        file.unlink()


@pytest.mark.parametrize("stored", [{"top_p": 3.0}, {"max_new_tokens": 0}])
def test_a_damaged_recommendation(tmp_path, stored):
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelFormatError, match="generation_config.json: .*pass sampling_params"):
        default_sampling_params(open_checkpoint(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None, "top_k": 20, "unknown": 1}))
    assert default_sampling_params(open_checkpoint(tmp_path)) == SamplingParams(top_k=20)


def test_requests_are_drawn_as_the_engine_has_room(chat_llm):
    drawn = []

    def requests():
        for i in range(40):
            drawn.append(i)
            prompt = "x" * 10_000 if i == 20 else f"prompt {i}"
            yield prompt, SamplingParams(temperature=0.0, max_tokens=1 + i % 3, ignore_eos=True)

    outputs, most = {}, 0
    for finished in chat_llm.generate_iter(requests()):
        outputs |= dict(finished)
        most = max(most, len(drawn) - len(outputs))
    assert sorted(outputs) == drawn == list(range(40))
    assert 16 <= most <= 20, "four times what runs at once, and what finished with it"
    refused = outputs.pop(20)
    assert "has 10001 tokens" in refused.error and refused.outputs == [] and refused.finished
    for i, output in outputs.items():
        assert output.prompt == f"prompt {i}" and len(output.outputs[0].token_ids) == 1 + i % 3
    alone = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    assert tokens_of([outputs[7]]) == tokens_of(chat_llm.generate("prompt 7", alone))
    clean(chat_llm)


def test_leaving_early_aborts_what_was_drawn(chat_llm):
    def endless():
        while True:
            yield "again", GREEDY

    requests = chat_llm.generate_iter(endless())
    while not next(requests):
        pass
    requests.close()
    while chat_llm.engine.has_work():
        assert chat_llm.engine.step() == []
    clean(chat_llm)
    assert list(chat_llm.generate_iter([])) == []
    with pytest.raises(RuntimeError, match="from the caller"):
        list(chat_llm.generate_iter(fail() for _ in range(3)))
    clean(chat_llm)


def fail():
    raise RuntimeError("from the caller")


def of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    return transformers.AutoTokenizer.from_pretrained(save_tokenizer(folder, TEMPLATE))


class Own:
    """A tokenizer of bytes with the least that is asked for, and its own way to write conversations."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"[{message['role']}] {message['content']}\n" for message in messages)


@pytest.fixture(scope="module")
def module():
    return Tiny(vocab=263).model


@pytest.mark.parametrize("make", [of_transformers, lambda folder: Own()])
def test_a_module_and_a_tokenizer_as_objects(make, module, tmp_path):
    tokenizer = make(tmp_path)
    with LLM(model=module, tokenizer=tokenizer, **SIZES) as llm:
        assert llm.get_tokenizer() is tokenizer
        assert llm.get_default_sampling_params() == SamplingParams()
        (out,) = llm.generate("abc", GREEDY, use_tqdm=False)
        assert out.prompt_token_ids == tokenizer.encode("abc")
        # A character at the end that is not whole is left out.
        whole = wrap(tokenizer).decode(out.outputs[0].token_ids).rstrip("\ufffd")
        assert out.outputs[0].text.rstrip("\ufffd") == whole
        (out,) = llm.chat(TURNS[:1], GREEDY, use_tqdm=False)
        assert out.prompt == tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
        assert len(out.outputs[0].token_ids) == 4


def test_a_tokenizer_that_is_a_directory_or_missing(chat_llm, model_dir, monkeypatch):
    monkeypatch.setattr(chat_llm, "_user_tokenizer", str(model_dir))
    assert isinstance(chat_llm.get_tokenizer(), Tokenizer)
    monkeypatch.setattr(chat_llm.engine.intake, "tokenizer", None)
    with pytest.raises(ValueError, match="a conversation needs a tokenizer"):
        chat_llm.chat(TURNS)


def test_a_batch_from_file_to_file(chat_llm, model_dir, tmp_path, monkeypatch, capsys):
    """The command on a real engine: the same text as `LLM` gives, whatever finishes when."""
    monkeypatch.setattr(generate, "setup_compilation_cache", lambda: None)
    requests = [{"messages": TURNS[: 1 + 2 * (i % 2)], "max_tokens": 2 + i % 5} for i in range(20)]
    requests += [{"prompt": "abc", "n": 2, "seed": 3, "temperature": 1.0}, {"prompt": "x" * 600}, {"prompt": "last"}]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    options = ["--model", str(model_dir), "--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--token-ids"]
    command = ["--input", str(file), "--output", str(output), *sizes, *options]
    assert generate.main([*command, "--skip-invalid"]) == 1
    results = {result["line"]: result for result in map(json.loads, output.read_text().splitlines())}
    assert sorted(results) == list(range(1, 24))
    assert "has 601 tokens" in results[22]["error"] and "line 22: the prompt has 601" in capsys.readouterr().err

    params = [SamplingParams(temperature=0.0, max_tokens=2 + i % 5, ignore_eos=True) for i in range(20)]
    expected = chat_llm.chat([request["messages"] for request in requests[:20]], params, use_tqdm=False)
    assert [results[i + 1]["outputs"][0]["token_ids"] for i in range(20)] == tokens_of(expected)
    assert [results[i + 1]["outputs"][0]["text"] for i in range(20)] == [out.outputs[0].text for out in expected]
    sampled = SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True)
    (both,) = chat_llm.generate("abc", sampled, use_tqdm=False)
    assert [c["token_ids"] for c in results[21]["outputs"]] == [c.token_ids for c in both.outputs]
