"""Shards of data on a mesh's axis `data`: an engine with several says what one with one says."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.aot import hlo
from jaxllm.aot.collectives import count
from jaxllm.engine.device.block_moves import host_bytes
from jaxllm.engine.device.commands import Command
from jaxllm.engine.replay import replay
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.models.moe import Experts, Routing
from jaxllm.sampling_params import StructuredOutputsParams
from tests import chat_model
from tests.pooler import pooler
from tests.tiny import Tiny, drain, greedy, ids, make_llm, prompts_of, tokens

FEW = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4)  # of each shard
SMALL = dict(num_blocks=24, enable_prefix_caching=False)  # which not all of a shard's sequences fit
PROMPTS = prompts_of([9, 5, 14, 7, 11, 3, 20, 8, 6, 13, 2, 17])


def forget(llm) -> None:
    clean_shards(llm)
    llm.engine.scheduler.forget_keys()


def clean_shards(llm) -> None:
    assert not llm.engine.has_work()
    llm.engine.scheduler.check()
    assert llm.stats().blocks_used == 0


@pytest.fixture(scope="module")
def sharded(tiny):
    """Two shards of one device each."""
    with make_llm(tiny.model, mesh="data=2", num_blocks=64, **FEW) as llm:
        yield llm


@pytest.fixture(scope="module")
def single(tiny):
    with make_llm(tiny.model, num_blocks=64, **FEW) as llm:
        yield llm


def mixture() -> Tiny:
    spec = Experts(routing=Routing(experts=4, top_k=2), mlp=16)
    return Tiny(kv_heads=4, layers=(LayerSpec(rope=Rope(theta=1e4), feed_forward=spec),) * 2)


@pytest.mark.parametrize(
    ("model", "mesh"), [(Tiny, "tensor=2,data=4"), (mixture, "data=2,expert=2"), (mixture, "data=2,expert=2,tensor=2")]
)
def test_tokens_are_those_of_one_device(model, mesh):
    tiny = model()
    with LLM(tiny.model, mesh=mesh, num_blocks=32, **FEW) as llm:
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(12))), strict=True):
            tiny.assert_greedy(prompt, output)
        devices = llm.engine.runner.executor.mesh.devices
        state = jax.tree.leaves(llm.engine.runner.executor.state)
        assert all(leaf.sharding.device_set == set(devices.flat) for leaf in state)
        clean_shards(llm)


def test_two_shards_compute_twice_the_tokens_in_a_step(sharded, single):
    per_step, prompts = [], prompts_of([len(prompt) for prompt in PROMPTS] * 4, seed=9)
    for llm in (sharded, single):
        before = llm.stats()
        llm.generate(ids(*prompts), greedy(24))
        after = llm.stats()
        steps = sum(after.step_counts) - sum(before.step_counts)
        per_step.append((after.num_step_tokens - before.num_step_tokens) / steps)
        forget(llm)
    assert per_step[0] >= 1.8 * per_step[1]


def mixed() -> list[SamplingParams]:
    """One for each of the prompts."""
    drawn = {"temperature": 0.8, "max_tokens": 10, "ignore_eos": True}
    return [
        SamplingParams(seed=1, n=3, **drawn),
        greedy(8, prompt_logprobs=2, logprobs=2),
        SamplingParams(seed=2, top_k=7, repetition_penalty=1.4, frequency_penalty=0.3, **drawn),
        SamplingParams(beam_width=3, n=2, temperature=0.0, max_tokens=6, ignore_eos=True),
        greedy(9, logit_bias={3: 4.0, 5: -9.0}, bad_words=None, allowed_token_ids=[3, 5, 8, 40]),
        SamplingParams(seed=3, top_p=0.7, min_p=0.02, logprobs=3, **drawn),
    ] * 2


def said(outputs) -> list:
    """Tokens of all samples, and which tokens prompts and outputs have log-probabilities of."""
    return [
        (
            [(one.token_ids, one.finish_reason, [sorted(row) for row in one.logprobs or ()]) for one in output.outputs],
            [sorted(row) for row in (output.prompt_logprobs or [])[1:]],
        )
        for output in outputs
    ]


def test_whatever_requests_ask_for(sharded, single):
    requests = ids(*PROMPTS)
    found = []
    for llm in (sharded, single):
        found.append(said(llm.generate(requests, mixed())))
        forget(llm)
    assert found[0] == found[1]
    assert any(prompt for _, prompt in found[0])


@pytest.mark.parametrize("mesh", ["data=2", pytest.param("data=2,tensor=2", marks=pytest.mark.slow)])
def test_preempted_sequences_go_on_as_they_were(tiny, mesh):
    with make_llm(tiny.model, mesh=mesh, max_num_seqs=6, max_num_batched_tokens=16, block_size=4, **SMALL) as llm:
        for kind, count in (("swap", "num_swapped"), ("recompute", "num_preemptions")):
            llm.engine.set_preemption(kind)
            before = getattr(llm.stats(), count)
            outputs = tokens(llm.generate(ids(*PROMPTS), greedy(40)))
            assert getattr(llm.stats(), count) > before
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                tiny.assert_greedy(prompt, output)
            clean_shards(llm)
        moves = llm.engine.runner.executor.moves
        assert moves.num_kept == 0
        assert llm.engine.runner.knows_bandwidth() and llm.engine.runner.costs.copy_bytes_per_s > 0


def test_what_is_swapped_is_kept_once_for_its_shard(tiny):
    with make_llm(tiny.model, mesh="data=2,tensor=2", **FEW, **SMALL) as llm:
        llm.generate(ids([1]), greedy(1))
        executor, encoder = llm.engine.runner.executor, llm.engine.runner._encoder
        page_bytes = host_bytes(executor.state.pools)
        num_pages = llm.engine.config.num_pages
        ids_of_second = np.concatenate([num_pages + np.arange(4), [3, 1, 2, 0]]).astype(np.int32)
        moves, pools = executor.moves, executor.state.pools
        before = [np.asarray(pool) for pool in pools]
        moves.apply(pools, Command("swap_out", (ids_of_second,), 7))
        moves.settle()
        moves.settle()
        (chunk,) = moves._kept[7]
        assert sum(part.nbytes for parts in chunk._kept for part in parts.values()) == 4 * page_bytes
        pools = moves.apply(pools, Command("swap_in", (ids_of_second,), 7))
        for pool, was in zip(pools, before, strict=True):
            np.testing.assert_array_equal(np.asarray(pool), was)
        executor._set_pools(pools)
        assert encoder.config.num_shards == 2


def collectives(text: str) -> list[str]:
    return re.findall(r"= \S+ (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)[\w-]*\(", text)


def test_steps_of_dense_models_say_nothing_to_other_shards(sharded):
    executor = sharded.engine.runner.executor
    for name in executor.compile_plan.names:
        compiled = executor.compile_plan[name]
        kind = name[0] if isinstance(name, tuple) else name
        found = collectives(compiled.as_text())
        if kind in ("sample", "sample_full", "prompt_logprobs", "pool", "step_shared"):  # what the host reads, and keys
            assert set(found) <= {"all-gather"}, name
        else:
            assert not found, name


def test_pools_stay_where_they_are(sharded):
    sharded.generate(ids([1]), greedy(1))
    executor = sharded.engine.runner.executor
    state = executor.state
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv_pools)) // 2
    for name in executor.compile_plan.names:
        if isinstance(name, tuple) and name[0] in ("step", "copy", "swap_in"):
            analysis = executor.compile_plan[name].memory_analysis()
            assert analysis.alias_size_in_bytes >= own and analysis.temp_size_in_bytes < own, name


def test_arguments_need_no_placing(sharded, monkeypatch):
    """Packed inputs go to the executables as they are."""
    monkeypatch.setattr(jax, "device_put", None)
    sharded.generate(ids(*PROMPTS), greedy(4))
    clean_shards(sharded)


def test_a_prompt_goes_where_its_beginning_is(sharded):
    """Also of several that come at once: each to its own."""
    forget(sharded)
    first, second = prompts_of([32, 32], seed=5)
    sharded.generate(ids(first, second), greedy(2))
    outputs = sharded.generate(ids([*first, 1], [*second, 2], [*first, 3], [*second, 4]), greedy(2))
    assert [output.num_cached_tokens for output in outputs] == [32] * 4
    forget(sharded)


def test_a_recording_replays(tiny, tmp_path):
    path = tmp_path / "run"
    with make_llm(tiny.model, mesh="data=2,tensor=2", record=path, **FEW, **SMALL) as llm:
        llm.engine.set_preemption("swap")
        llm.generate(ids(*PROMPTS), greedy(24))
        llm.generate(ids(*PROMPTS), mixed())
        assert llm.stats().num_swapped
        (alone,) = tokens(llm.generate(ids(LONG[0]), greedy(4)))
        tiny.assert_greedy(LONG[0], alone)
    with open(path, "rb") as file:
        report = replay(file, tiny.model)
    assert report.is_equal and report.compared > 20, str(report)


def test_sleep_and_new_parameters(tiny, sharded):
    other = Tiny(seed=3)
    sharded.generate(ids(*PROMPTS), greedy(2))
    sharded.update_params(other.model)
    for prompt, output in zip(PROMPTS, tokens(sharded.generate(ids(*PROMPTS), greedy(4))), strict=True):
        other.assert_greedy(prompt, output)
    sharded.sleep(level=1)
    assert sharded.engine.runner.executor.state is None
    sharded.wake_up()
    sharded.update_params(tiny.model)
    for prompt, output in zip(PROMPTS, tokens(sharded.generate(ids(*PROMPTS), greedy(4))), strict=True):
        tiny.assert_greedy(prompt, output)
    forget(sharded)


def test_statistics_are_of_all_shards(sharded):
    forget(sharded)
    stats = sharded.stats()
    assert (stats.num_blocks, stats.num_free_slots) == (2 * 64, 2 * 4)
    assert sharded.engine.config.num_blocks == 64 and sharded.engine.config.num_shards == 2


def test_a_failed_step_is_recomputed_in_all_shards(sharded, monkeypatch):
    executor, count = sharded.engine.runner.executor, 0
    apply = executor.apply

    def failing(commands):
        nonlocal count
        count += any(command.kind == "step" for command in commands)
        if count == 3:
            count += 1
            raise RuntimeError("injected")
        return apply(commands)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "apply", failing)
        outputs = tokens(sharded.generate(ids(*PROMPTS[:6]), greedy(8)))
    assert count > 4
    assert outputs == tokens(sharded.generate(ids(*PROMPTS[:6]), greedy(8)))
    forget(sharded)


def test_grammars_follow_their_own_masks(tmp_path):
    model = chat_model.write_model(tmp_path / "model", max_position_embeddings=256)
    choices = [["yes", "no"], ["left", "right"], ["red", "green", "blue"], ["1", "22"], ["a", "b"], ["x", "yy"]]
    params = [
        SamplingParams(
            temperature=0.7, seed=i, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=of_request)
        )
        for i, of_request in enumerate(choices)
    ]
    with LLM(str(model), mesh="data=2", num_blocks=64, **FEW) as llm:
        for of_request, output in zip(choices, llm.generate(["Say"] * len(choices), params), strict=True):
            assert output.outputs[0].text in of_request
        drain(llm)
        clean_shards(llm)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_are_pooled(sharded, single, monkeypatch, pooling):
    found = []
    for llm in (sharded, single):
        monkeypatch.setattr(llm.engine.intake, "pooler", pooler(width=32, pooling=pooling))
        outputs = llm.embed(ids(*PROMPTS), use_tqdm=False)
        found.append(np.stack([np.asarray(output.outputs.data) for output in outputs]))
        drain(llm)
        forget(llm)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_continuations_are_scored(sharded, tiny):
    """A context longer than a step is not shared: its home alone reads what it predicts."""
    items = [(context, prompts_of([4, 1, 12], seed=1)) for context in [*PROMPTS, *prompts_of([60])]]
    tiny.assert_scored(items, sharded.score(items, use_tqdm=False))
    drain(sharded)
    forget(sharded)


def test_scales_are_measured_once_for_all(tiny):
    options = dict(kv_cache_dtype="int8", calculate_kv_scales=True, num_blocks=64, **FEW)
    found = []
    for mesh in (None, "data=2,tensor=2"):
        with LLM(tiny.model, mesh=mesh, **options) as llm:
            llm.generate(ids([1, 2, 3]), greedy(1))
            found.append([np.asarray(scale) for scale in llm.engine.runner.executor.kv_scales])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def noted(apply, commands, given):
    """Applies commands, and keeps them."""
    commands.extend(given)
    return apply(given)


LONG = prompts_of([76, 83, 61], seed=7)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("data=2,tensor=2", {}, marks=pytest.mark.slow),
        ("data=4", {}),
        ("data=2", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_a_long_prompt_is_computed_by_all_shards(tiny, mesh, options):
    """In a share of the steps, of keys and values in 8 bits as well; what comes next finds it in all shards."""
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)
    with make_llm(tiny.model, **sizes, **options) as llm:
        (alone,) = tokens(llm.generate(ids(LONG[0]), greedy(6)))
    with make_llm(tiny.model, mesh=mesh, **sizes, **options) as llm:
        num_shards, before = llm.engine.config.num_shards, sum(llm.stats().step_counts)
        (output,) = tokens(llm.generate(ids(LONG[0]), greedy(6)))
        assert output == alone
        assert sum(llm.stats().step_counts) - before <= -(-len(LONG[0]) // (8 * num_shards)) + 1 + 5
        drain(llm)
        clean_shards(llm)
        again = [[*LONG[0][:72], i] for i in range(num_shards)]
        outputs = llm.generate(ids(*again), greedy(5))
        assert [one.num_cached_tokens for one in outputs] == [72] * num_shards
        if not options:
            for prompt, one in zip(again, tokens(outputs), strict=True):
                tiny.assert_greedy(prompt, one)
        clean_shards(llm)


def test_shards_send_each_other_the_keys_and_values_of_own_heads(tiny):
    """A step that they share gathers nothing within a shard, and over `data` what a device computes, once."""
    name, (heads, head_dim) = ("step_shared", 8), (tiny.cfg.kv_heads, tiny.cfg.head_dim)
    with make_llm(tiny.model, mesh="data=2,tensor=2", num_blocks=64, **FEW | {"max_num_batched_tokens": 8}) as llm:
        llm.generate(ids([1]), greedy(1))
        text = llm.engine.runner.executor.compile_plan[name].as_text()
    sent = count(hlo.parse(text), [0, 0, 1, 1], has_network=False)
    assert ("all-gather", False) not in sent
    rows = 2 * len(tiny.cfg.layers) * 8 * heads // 2 * head_dim
    assert sent["all-gather", True].operand_bytes == 4 * (rows + 2 * 8)  # and positions and ids


def test_others_run_beside_a_shared_prompt(tiny):
    """Those that decode before it comes, with penalties that read what it writes, and those that come meanwhile."""
    drawn = dict(temperature=0.8, max_tokens=20, ignore_eos=True, repetition_penalty=1.3)
    params = [greedy(30), SamplingParams(seed=1, **drawn), SamplingParams(seed=2, n=2, **drawn), greedy(9)]
    prompts, found = [PROMPTS[0], PROMPTS[1], LONG[1], PROMPTS[2]], []
    sizes = dict(max_num_seqs=6, max_num_batched_tokens=8, block_size=4, num_blocks=96)
    for mesh in (None, "data=2"):
        with make_llm(tiny.model, mesh=mesh, **sizes) as llm:
            commands, outputs = [], {}
            executor = llm.engine.runner.executor
            executor.apply = partial(noted, executor.apply, commands)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                llm.engine.add(prompt, one, request_id=str(i))
                for _ in range(6 if i == 1 else 2):
                    outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
            while llm.engine.has_work():
                outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
            found.append([[one.token_ids for one in outputs[str(i)].outputs] for i in range(4)])
            assert any(command.kind == "step_shared" for command in commands) == (mesh is not None)
            clean_shards(llm)
    assert found[0] == found[1]


def test_windows_and_states_are_not_shared():
    """Their caches are not of all tokens: one shard computes their prompts."""
    layers = (LayerSpec(rope=Rope(theta=1e4)), LayerSpec(rope=Rope(theta=1e4), window=8))
    tiny = Tiny(layers=layers)
    with LLM(tiny.model, mesh="data=2", max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64) as llm:
        names = llm.engine.runner.compile_plan.names
        assert not any(isinstance(name, tuple) and name[0] == "step_shared" for name in names)
        (output,) = tokens(llm.generate(ids(LONG[0]), greedy(6)))
        tiny.assert_greedy(LONG[0], output)
