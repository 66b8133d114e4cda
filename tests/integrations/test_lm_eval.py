"""lm-evaluation-harness over the engine, against its own Hugging Face back end, on tasks that lie here."""

import json
import shutil
import warnings

import pytest

from jaxllm import LLM
from jaxllm.default_model import DEFAULT_MODEL

lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
Instance = pytest.importorskip("lm_eval.api.instance").Instance
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
JaxLLM = pytest.importorskip("jaxllm.integrations.lm_eval").JaxLLM

SIZES = dict(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64, num_blocks=64)
NAMES = ["path", "name", "value", "items", "key", "data", "index", "size"]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
    "generation": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "self."], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def llm():
    with LLM(DEFAULT_MODEL, dtype="float32", **SIZES) as llm:
        yield llm


def backend(model):
    """The harness's own."""
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4, max_length=64)


@pytest.fixture(scope="module")
def reference():
    return backend(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {
            "text": f"def get_{name}(self, {other}):\n    '''Returns the {name} of {other}.'''\n" * (1 + i % 3)
            + "    return",
            "choices": [f" self.{name}", f" {other}", f" self._{name}[{other}]", " None"],
        }
        for i, (name, other) in enumerate(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/lines.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"{source}test_split: test\n{text}")
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(model, tasks, name, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lm_eval.simple_evaluate(model, tasks=[name], task_manager=tasks, bootstrap_iters=0, **options)


def responses(found, name) -> list:
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["filtered_resps"]]


def test_choices_are_as_likely_as_its_own_back_end_says(llm, reference, tasks):
    """Contexts of up to 87 tokens, where 64 may be read: they lose their beginnings."""
    ours, theirs = (evaluate(model, tasks, "choices") for model in (JaxLLM(llm), reference))
    assert ours["results"]["choices"]["acc,none"] == theirs["results"]["choices"]["acc,none"]
    for mine, other in zip(responses(ours, "choices"), responses(theirs, "choices"), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4) and mine[1] == other[1]
    assert ours["config"]["max_length"] == 64


def test_documents_are(llm, reference, tasks):
    ours, theirs = (responses(evaluate(model, tasks, "rolling"), "rolling") for model in (JaxLLM(llm), reference))
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_generations_stop_where_the_task_says(llm, reference, tasks):
    ours, theirs = (responses(evaluate(model, tasks, "generation"), "generation") for model in (JaxLLM(llm), reference))
    assert ours == theirs


@pytest.fixture(scope="module")
def penalised(tmp_path_factory):
    """A model whose files recommend a penalty, and filters for what is drawn."""
    folder = shutil.copytree(DEFAULT_MODEL, tmp_path_factory.mktemp("penalised") / "model")
    file = folder / "generation_config.json"
    said = {"repetition_penalty": 1.8, "top_k": 7, "top_p": 0.9, "do_sample": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    return folder


def test_the_models_own_repetition_penalty_is_applied(penalised):
    wanted = {"until": ["\n\n\n"], "max_gen_toks": 16}
    asked = instances("generate_until", *((text, wanted) for text in ("def f(x):\n    return", "import os\nimport")))
    theirs, found = backend(penalised).generate_until(asked, disable_tqdm=True), {}
    for source in ("auto", "vllm"):
        with LLM(penalised, dtype="float32", generation_config=source, **SIZES) as llm:
            model = JaxLLM(llm)
            found[source] = model.generate_until(asked, disable_tqdm=True)
            _, drawn, _ = model._generation("a", {"until": [], "max_gen_toks": 4, "temperature": 0.5, "top_k": 3})
            own = (1.8, 3, 0.9, 0.5) if source == "auto" else (1.0, 3, 1.0, 0.5)
            assert (drawn.repetition_penalty, drawn.top_k, drawn.top_p, drawn.temperature) == own
            _, greedy, _ = model._generation("a", {"until": [], "max_gen_toks": 4})
            assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)
    assert found["auto"] == theirs != found["vllm"]


def test_by_name(tasks):
    arguments = {"pretrained": str(DEFAULT_MODEL), "dtype": "float32", **SIZES}
    found = evaluate("jaxllm", tasks, "choices", model_args=arguments, batch_size=4, limit=1)
    assert len(responses(found, "choices")) == 4


def instances(kind, *arguments) -> list:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def test_results_are_in_the_order_of_the_requests(llm):
    model, pairs = (
        JaxLLM(llm),
        [("def f", "(x)"), ("import", " os"), ("def f", "()"), ("", "import os"), ("def f", "(x)")],
    )
    together = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    alone = [model.loglikelihood(instances("loglikelihood", pair), disable_tqdm=True)[0] for pair in pairs]
    assert [each[0] for each in together] == pytest.approx([each[0] for each in alone], abs=1e-4)
    assert model.loglikelihood_rolling(instances("loglikelihood_rolling", ("",)), disable_tqdm=True) == [0.0]


def test_special_tokens_stop_by_their_ids(llm):
    model = JaxLLM(llm)
    eos = llm.tokenizer.eos_token
    assert model._stopping(["\n", eos]) == {"stop": ["\n"], "stop_token_ids": [llm.tokenizer.eos_token_id]}


def test_what_cant_be(llm):
    model = JaxLLM(llm)
    with pytest.raises(ValueError, match="leave them out"):
        JaxLLM(llm, pretrained="x")
    with pytest.raises(ValueError, match="longer than max_model_len=64"):
        model.loglikelihood(instances("loglikelihood", ("a", " b" * 90)), disable_tqdm=True)
    with pytest.raises(ValueError, match="leaves no room"):
        wanted = {"until": ["\n"], "max_gen_toks": 64}
        model.generate_until(instances("generate_until", ("a", wanted)), disable_tqdm=True)
