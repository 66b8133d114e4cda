"""Mixtures of experts, served by the engine in batches and on meshes, say what transformers says."""

import itertools

import numpy as np
import pytest

from jaxllm import LLM
from tests.hf_models import checkpoint, logits
from tests.tiny import TIE, NoText, greedy, ids, prompts_of

pytest.importorskip("torch")
LENGTH = 64  # of outputs
PROMPTS = prompts_of([1, 5, 16, 41], vocab=160)
FAMILIES = (
    *("Qwen3Moe", "GptOss", "Llama4", "Mixtral", "Qwen2Moe", "Olmoe", "Glm4Moe", "MiniMaxM2", "GraniteMoe"),
    "Ernie4_5_Moe",
)
MESHES = (None, "tensor=2", "expert=2", "tensor=2,expert=2")
QUICK = {"Qwen3Moe": "tensor=2,expert=2", "GptOss": "tensor=2,expert=2", "Llama4": "expert=2"}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The directory of a family's model, and transformers' logits of a sequence."""
    made = {}

    def of(family: str):
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = path, checkpoint(path, family)
        path, model = made[family]
        return path, lambda sequence: logits(model, sequence)

    return of


def assert_greedy(logits_of, prompt: list[int], output: list[int]) -> None:
    assert len(output) == LENGTH
    want = logits_of(prompt + output)[len(prompt) - 1 : -1]
    lost = want.max(axis=-1) - want[np.arange(LENGTH), output]
    assert lost.max() <= TIE * np.abs(want).max(), f"token {lost.argmax()} is not the best by {lost.max()}"


def preempted(llm: LLM) -> list[list[int]]:
    """Outputs of all prompts, of which the pool has room for less than two once all run."""
    engine, pool, outputs = llm.engine, llm.engine.scheduler.pool, {}
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, greedy(LENGTH), request_id=str(i))
    left, held = 3 * engine.config.count_pages(-(-(len(PROMPTS[-1]) + LENGTH) // 8)) // 2, []
    most_held = (pool.num_pages - left) // pool.groups[0].num_pages
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)] = output.outputs[0].token_ids
        shrinks = len(engine.scheduler.running) == len(PROMPTS) or held
        while shrinks and pool.num_free >= pool.groups[0].num_pages and len(held) < most_held:
            held += pool.allocate(1, 0)
    pool.release(held)
    assert llm.stats().num_preemptions > 0
    return [outputs[i] for i in range(len(PROMPTS))]


# Each family on one of the meshes, as what is sharded of experts is the same in all.
CASES = [
    *(pytest.param(family, mesh) for family, mesh in QUICK.items()),
    *(
        pytest.param(family, mesh, marks=pytest.mark.slow)
        for family, mesh in zip(FAMILIES, itertools.cycle(MESHES))
        if QUICK.get(family) != mesh
    ),
]


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_in_a_batch_chunked_preempted_and_after_prefix_hits(oracle, family, mesh):
    path, logits_of = oracle(family)
    options = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=112, block_size=8, num_blocks=60)
    with LLM(path, tokenizer=NoText(), mesh=mesh, **options) as llm:
        for prompt, output in zip(PROMPTS, preempted(llm), strict=True):
            assert_greedy(logits_of, prompt, output)
        (again,) = llm.generate(ids(PROMPTS[-1]), greedy(LENGTH))
        (after,) = llm.generate(ids(PROMPTS[-1]), greedy(LENGTH))
        assert after.num_cached_tokens >= 32
        for out in (again, after):
            assert_greedy(logits_of, PROMPTS[-1], out.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), [("Olmoe", "tensor=4"), ("MiniMaxM2", "tensor=4"), ("GptOss", "tensor=4")])
def test_on_more_devices_than_kv_heads(oracle, family, mesh):
    """Norms over all heads, and sinks, where KV heads are repeated."""
    path, logits_of = oracle(family)
    options = dict(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=112, block_size=8, num_blocks=30)
    with LLM(path, tokenizer=NoText(), mesh=mesh, **options) as llm:
        (out,) = llm.generate(ids(PROMPTS[-1]), greedy(LENGTH))
        assert_greedy(logits_of, PROMPTS[-1], out.outputs[0].token_ids)
