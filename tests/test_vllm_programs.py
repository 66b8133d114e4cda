"""Programs written for vLLM's offline interface run with nothing but the name in their imports changed.

The name of the model is a directory here, with a tiny random checkpoint in it.
"""

import json
import re
from pathlib import Path

import pytest

from jaxllm import async_llm
from jaxllm.engine import build, sizing
from tests.chat_model import write_model

PROGRAMS = {file.stem: file.read_text() for file in (Path(__file__).parent / "vllm_programs").glob("*.py")}
IMPORT = re.compile(r"^(from|import) vllm\b", re.MULTILINE)
TEXT = r"(\"[^\n]*\"|'[^\n]*')"


@pytest.fixture(scope="module")
def engines():
    made = {}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, engines):
    """Runs a program in a directory that has its model; returns what it printed. Equal engines are built once."""
    model_dir = write_model(tmp_path / "facebook" / "opt-125m", max_position_embeddings=256)
    (model_dir / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "max_new_tokens": 6}))
    (tmp_path / "plain_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    monkeypatch.setitem(sizing.CPU_SIZES, "max_num_seqs", 8)  # fewer executables to compile
    monkeypatch.setitem(sizing.CPU_SIZES, "max_num_batched_tokens", 32)

    build_engine = build.build_engine

    def build_once(*args, **options):
        key = repr((args, sorted(options.items())))
        if key not in engines:
            engines[key] = build_engine(*args, **options)
        engines[key].scheduler.pool.forget_keys()
        return engines[key]

    monkeypatch.setattr(build, "build_engine", build_once)
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> str:
        source, num_changed = IMPORT.subn(r"\1 jaxllm", PROGRAMS[name])
        assert num_changed and "vllm" not in source.replace("jaxllm", "").partition('"""')[2].partition('"""')[2]
        exec(compile(source, name, "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return run


def test_offline_inference(run):
    lines = run("offline_inference").splitlines()
    assert len(lines) == 3
    for line, prompt in zip(lines, ("The ship left", "My favourite", "It rained"), strict=True):
        assert re.fullmatch(rf"Prompt: '{prompt}[^']*', generated: {TEXT}, reason: (length|stop)", line)


def test_chat(run):
    printed = run("chat")
    assert printed.startswith("Recommended: temperature 0.7, at most 6 tokens\n")
    (long, _, short), by_hand = re.findall(f"Prompt: {TEXT}", printed), re.search(f"By hand: {TEXT}", printed)[1]
    assert "<|im_start|>user\\nA letter to my landlord.<|im_end|>\\n<|im_start|>assistant\\n" in long
    assert short == by_hand == r"'<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n'"
    assert printed.count("Answer: ") == 3


def test_chat_template(run):
    assert run("chat_template").splitlines() == [
        r"Prompt: 'USER: Name a colour.\nASSISTANT:'",
        r"Prompt: 'USER: Name a colour.\nASSISTANT: My answer is'",
    ]


def test_reproducibility(run):
    assert run("reproducibility") == "The same, alone and among others.\n"


def test_logprobs(run):
    printed = run("logprobs")
    assert len(re.findall(r"^prompt: .*rank \d+: [\d.]+%$", printed, re.MULTILINE)) >= len("ood morning")
    assert len(re.findall(r"^output: .*rank \d+: [\d.]+%$", printed, re.MULTILINE)) == 3 * 2
    assert re.search(r"^all of the output: -\d+\.\d\d nats$", printed, re.MULTILINE)


def test_prefix_caching(run):
    printed = run("prefix_caching")
    cached = json.loads(re.search(r"Cached tokens: (\[.*\])", printed)[1])
    assert all(number >= 64 for number in cached) and "Same text: True" in printed


def test_samples(run):
    lines = run("samples").splitlines()
    assert [line[-2:] for line in lines].count("ns") == len(lines) == 6
    assert all(2 <= int(re.search(r": (\d+) tokens", line)[1]) <= 10 for line in lines)


def test_beam_search(run):
    lines = run("beam_search").splitlines()
    lengths = [int(re.fullmatch(rf"-\d+\.\d\d nats, (\d+) tokens: {TEXT}", line)[1]) for line in lines]
    assert lengths == [1 + len("The road goes") + 8] * 3 + [1 + len("Far away") + 8] * 3
    assert all("The road goes" in line for line in lines[:3]) and all("Far away" in line for line in lines[3:])
    assert len(set(lines)) == 6


def test_async_streaming(run, monkeypatch):
    made, start = [], async_llm.AsyncLLM.__init__
    monkeypatch.setattr(async_llm.AsyncLLM, "__init__", lambda self, **kw: made.append(self) or start(self, **kw))
    lines = sorted(run("async_streaming").splitlines())
    for i, line in enumerate(lines):
        assert re.fullmatch(rf"stream-{i}: \d+ tokens, {TEXT}", line)
    assert len(lines) == 3
    for engine in made:
        engine.close()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_object(run, kind, monkeypatch, tmp_path):
    """The tokens are those of the weights that bitsandbytes has made; it rounds activations, too, which we don't."""
    pytest.importorskip("bitsandbytes")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    write_model(tmp_path / "facebook" / "opt-125m", model_type="qwen3", max_position_embeddings=256, **sizes)
    monkeypatch.setenv("QUANTIZATION", kind)
    got = json.loads(re.search(r"^Token ids: (\[.*\])", run("quantized_object"), re.MULTILINE)[1])
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = nf4 if kind == "nf4" else {"load_in_8bit": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        "facebook/opt-125m", quantization_config=transformers.BitsAndBytesConfig(**config)
    )
    ids = transformers.AutoTokenizer.from_pretrained("facebook/opt-125m")("The ship left the harbour at").input_ids
    dense = model.dequantize().float()
    for _ in got:
        with torch.no_grad():
            ids.append(int(dense(torch.tensor([ids])).logits[0, -1].argmax()))
    assert len(got) == 8 and got == ids[-8:]
