"""The memory benchmark: its traces, its measure on cases counted by hand, contiguous memory, its report and picture."""

import contextlib
import importlib.util
import json
import math
import random
import re
import statistics
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as bench
from benchmarks.paper import contiguous, memory, memory_beams, memory_plot, trace
from benchmarks.paper.contiguous import BuddyAllocator, BuddyChunk
from benchmarks.paper.trace import TraceRequest
from jaxllm.errors import JaxLLMError
from tests.tiny import prompts_of

SHORT = {"alpaca": (6, 8), "sharegpt": (12, 14)}  # means that the tiny model's context has room for


@pytest.mark.parametrize("name", trace.MEANS)
def test_lengths_are_log_normal_with_the_published_means(name):
    made = trace.make(name, 4000, seed=0, max_len=2**20)
    assert made.num_cut == 0 and made.summary["requests"] == 4000
    for lengths, mean in zip(zip(*made.items, strict=True), trace.MEANS[name], strict=True):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.01)
        assert statistics.median(lengths) == pytest.approx(mean * math.exp(-1 / 2), rel=0.05)
        upper = statistics.quantiles(lengths, n=100)[97]  # two standard deviations of the logarithm above the median
        assert upper == pytest.approx(mean * math.exp(-1 / 2 + 2.05), rel=0.05)
    logs = [[math.log(length) for length in lengths] for lengths in zip(*made.items, strict=True)]
    assert abs(statistics.correlation(*logs)) < 0.05


def test_the_seed_decides_which_lengths_meet():
    one, again, other = (trace.make("alpaca", 50, seed=seed, max_len=2048) for seed in (0, 0, 1))
    assert one == again != other
    for a, b in zip(zip(*one.items, strict=True), zip(*other.items, strict=True), strict=True):
        assert sorted(a) == sorted(b)


def test_what_is_too_long_is_cut_and_counted():
    whole = trace.make("sharegpt", 200, seed=0, max_len=2**20).items
    made = trace.make("sharegpt", 200, seed=0, max_len=64)
    assert [item.prompt_len for item in made.items] == [min(item.prompt_len, 32) for item in whole]
    assert max(map(sum, made.items)) == 64 and min(map(min, made.items)) >= 1
    assert made.num_cut == sum(a != b for a, b in zip(made.items, whole, strict=True)) > 100
    assert trace.make("alpaca", 9, seed=0, max_len=2).items == [TraceRequest(1, 1)] * 9


def test_arrivals_are_random_at_the_rate_that_the_load_asks_for():
    # Two samples of 20 tokens after 10 more hold 800 slots for a step each, or 40 seats.
    sizes = {"num_slots": 100, "load": 0.5}
    assert trace.mean_gap([TraceRequest(10, 20)], 2, max_num_seqs=10, **sizes) == 800 / 100 / 0.5
    assert trace.mean_gap([TraceRequest(10, 20)], 2, max_num_seqs=4, **sizes) == 40 / 4 / 0.5
    times = trace.arrivals(4000, 3.0, seed=0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(3, rel=0.05) == statistics.stdev(gaps)
    assert times == trace.arrivals(4000, 3.0, seed=0) != trace.arrivals(4000, 3.0, seed=1)


def test_waste_of_one_sequence():
    # Its tokens in the pool, step by step: 5, 6, 7, 8, and 8 until its last token is read; always two blocks of four.
    run = memory.simulate([TraceRequest(5, 4)], [0.0], num_blocks=8, block_size=4, every=1)
    usage = run.usage
    assert (usage.wasted_slots, usage.held_slots) == (3 + 2 + 1, 5 * 8)
    assert (usage.held_blocks, usage.alone_blocks, run.steps, run.preemptions) == (10, 10, 5, 0)
    assert (usage.wasted, usage.saved) == (6 / 40, 0)


def test_savings_of_two_samples():
    # Both blocks are shared in the first step; then each sample has a copy of the second.
    run = memory.simulate([TraceRequest(5, 4)], [0.0], num_blocks=8, block_size=4, n=2, every=1)
    usage = run.usage
    assert (usage.held_blocks, usage.alone_blocks) == (2 + 4 * 3, 5 * 4)
    assert (usage.wasted_slots, usage.held_slots) == (3 + 2 * (2 + 1), 14 * 4)
    assert usage.saved == pytest.approx(0.3)


def test_a_request_waits_for_its_arrival_and_for_a_seat():
    one = memory.simulate([TraceRequest(2, 3)], [7.5], num_blocks=8, block_size=4, every=1)
    assert (one.steps, one.usage.held_blocks) == (8 + 4, 4)
    two = [TraceRequest(2, 3)] * 2
    assert memory.simulate(two, [0.0, 0.0], num_blocks=8, block_size=4, max_num_seqs=2).steps == 4
    assert memory.simulate(two, [0.0, 0.0], num_blocks=8, block_size=4, max_num_seqs=1).steps == 8


@pytest.mark.slow
def test_few_looks_see_what_all_see():
    made = trace.make("alpaca", 150, seed=0, max_len=256)
    runs = [
        memory.simulate(made.items, trace.arrivals(150, 2.0, seed=0), num_blocks=900, block_size=4, n=2, every=every)
        for every in (1, None)
    ]
    exact, seldom = (run.usage for run in runs)
    assert seldom.held_blocks < exact.held_blocks / 5
    assert seldom.wasted == pytest.approx(exact.wasted, rel=0.1)
    assert seldom.saved == pytest.approx(exact.saved, rel=0.1)


def test_preempted_sequences_are_counted():
    run = memory.simulate([TraceRequest(4, 40)] * 6, [0.0] * 6, num_blocks=20, block_size=4)
    assert run.preemptions > 0


def test_buddies_split_and_merge():
    memory_of_11 = BuddyAllocator(11)
    whole = [BuddyChunk(0, 8), BuddyChunk(8, 2), BuddyChunk(10, 1)]
    assert memory_of_11.free_chunks == whole
    chunks = [memory_of_11.allocate(n) for n in (3, 2, 2, 1, 3, 1)]
    assert chunks == [BuddyChunk(0, 4), BuddyChunk(8, 2), BuddyChunk(4, 2), BuddyChunk(10, 1), None, BuddyChunk(6, 1)]
    assert memory_of_11.free_chunks == [BuddyChunk(7, 1)]
    for chunk in chunks:
        if chunk is not None:
            memory_of_11.release(chunk)
    assert memory_of_11.free_chunks == whole


def test_no_slot_has_two_owners():
    rng, buddies, held = random.Random(0), BuddyAllocator(200), []
    for _ in range(2000):
        chunk = buddies.allocate(rng.randint(1, 40)) if rng.random() < 0.6 else None
        if chunk is not None:
            assert chunk.start % chunk.size == 0
            held.append(chunk)
        elif held:
            buddies.release(held.pop(rng.randrange(len(held))))
        owned = [slot for start, size in held + buddies.free_chunks for slot in range(start, start + size)]
        assert sorted(owned) == list(range(200))


def test_what_each_way_reserves():
    reserved = {name: reserve(TraceRequest(10, 25), 2048) for name, reserve in contiguous.RESERVED.items()}
    assert reserved == {"max": 2048, "pow2": 10 + 32, "oracle": 35}
    assert contiguous.RESERVED["pow2"](TraceRequest(1000, 1030), 2048) == 2048
    assert [contiguous.power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_waste_of_a_chunk():
    usage = contiguous.simulate([TraceRequest(3, 3)], [1.5], lambda _: 6, num_slots=8, max_num_seqs=1, max_tokens=8)
    assert usage == (3 + 4 + 5 + 5, 4 * 8, 2 + 4)
    assert usage.wasted == 1 - 17 / 32
    in_chunks = contiguous.simulate([TraceRequest(3, 2)], [0.0], lambda _: 6, num_slots=8, max_num_seqs=1, max_tokens=2)
    assert in_chunks == (2 + 3 + 4 + 4, 4 * 8, 4)


@pytest.mark.parametrize("gap", [0.5, 30.0])
def test_one_block_a_sequence_is_contiguous_memory(gap):
    """The scheduler and the simulation of chunks agree step by step where both do the same."""
    made, times = trace.make("alpaca", 60, seed=0, max_len=64), trace.arrivals(60, gap, seed=0)
    chunks = contiguous.simulate(
        made.items, times, lambda _: 64, num_slots=7 * 64, max_num_seqs=5, max_tokens=memory.MAX_NUM_BATCHED_TOKENS
    )
    blocks = memory.simulate(made.items, times, num_blocks=7, block_size=64, max_num_seqs=5, every=1)
    assert chunks.steps == blocks.steps
    assert (chunks.held_slots, chunks.wasted) == (blocks.usage.held_slots, pytest.approx(blocks.usage.wasted))


class Recount(memory.PagedUsage):
    """Counts what sequences hold from their own lists."""

    lists: list

    def look(self, scheduler):
        super().look(scheduler)
        self.lists.append([list(request.table.ids) for request in scheduler.running])


@pytest.mark.slow
def test_beams_share_what_they_have_in_common(llm, monkeypatch):
    monkeypatch.setattr(Recount, "lists", [], raising=False)
    monkeypatch.setattr(memory_beams, "PagedUsage", Recount)
    prompts, lengths = prompts_of([13, 6, 21]), [9, 12, 1]
    assert memory_beams.search(llm, prompts, lengths, 1).usage.saved == 0
    Recount.lists.clear()
    run = memory_beams.search(llm, prompts, lengths, 4)
    assert len(Recount.lists) == run.steps >= 2 * 12 and run.preemptions == 0
    assert run.usage.alone_blocks == sum(len(block_ids) for step in Recount.lists for block_ids in step)
    assert run.usage.held_blocks == sum(len({b for block_ids in step for b in block_ids}) for step in Recount.lists)
    assert 0 < run.usage.saved < 1 - 1 / 4 and 0 < run.usage.wasted < 1
    assert "schedule" not in vars(llm.engine.scheduler), "the scheduler is left as it was"


def test_a_search_that_fails_is_no_measurement():
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(pool=SimpleNamespace(forget_keys=lambda: None), schedule=None),
        add=lambda *_, **__: None,
        has_work=lambda: True,
        step=lambda: [SimpleNamespace(error="NaN")],
    )
    llm = SimpleNamespace(engine=engine, stats=lambda: SimpleNamespace(num_preemptions=0))
    with pytest.raises(JaxLLMError, match="a beam search failed: NaN"):
        memory_beams.search(llm, [[1]], [1], 2)


def test_prompts_are_pieces_of_source(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "long.py").write_text(text)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("x" * 10_000)
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text])
    pieces, again, other = (memory_beams.source_prompts(tokenizer, [40, 1, 40], seed, tmp_path) for seed in (0, 0, 1))
    assert pieces == again != other
    for piece, length in zip(pieces, [40, 1, 40], strict=True):
        assert len(piece) == length and re.match("l(ine)?", "".join(map(chr, piece)))
        assert "".join(map(chr, piece)) in text
    with pytest.raises(JaxLLMError, match="none of 2 files of Python source has 2000 tokens"):
        memory_beams.source_prompts(tokenizer, [2000], 0, tmp_path)


@pytest.fixture
def command(monkeypatch, capsys, llm):
    """Runs the command on short traces, and beams on the tiny engine; returns exit code, standard output and error."""
    monkeypatch.setattr(trace, "MEANS", SHORT)
    monkeypatch.setattr(memory, "POOL_SLOTS", 4096)
    monkeypatch.setattr(bench, "setup_compilation_cache", lambda: None)
    monkeypatch.setattr(memory_beams, "open_embedded", lambda: contextlib.nullcontext(llm))
    monkeypatch.setattr(memory_beams, "source_prompts", lambda tokenizer, lengths, seed: prompts_of(lengths, seed=seed))

    def run(*arguments):
        code = bench.main(["memory", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def check_rows(report: dict, methods: list[str]) -> None:
    wasted = {(row["trace"], row["memory"], row["block_size"]): row["wasted"] for row in report["wasted"]}
    kinds = [(kind, None) for kind in contiguous.RESERVED] + [("blocks", 2**i) for i in range(8)]
    assert list(wasted) == [(name, *kind) for name in SHORT for kind in kinds]
    assert all(0 <= share < 1 for share in wasted.values())
    for name in SHORT:
        shares = [wasted[name, *kind] for kind in kinds]
        assert shares[:3] == sorted(shares[:3], reverse=True) and shares[3:] == sorted(shares[3:])
        assert shares[3] == 0, "a block of one token is full"
    saved = {(row["method"], row["trace"], row["width"]): row["saved"] for row in report["saved"]}
    assert list(saved) == [(method, name, width) for method in methods for name in SHORT for width in (2, 4, 6)]
    assert all(0 <= share < 1 - 1 / width for (_, _, width), share in saved.items())
    keys = {"trace", "method", "width", "saved", "wasted", "steps", "preemptions"}
    assert all(row.keys() == keys for row in report["saved"])
    assert all(row.keys() == {*keys, "memory", "block_size"} - {"method", "width", "saved"} for row in report["wasted"])


def test_a_report_without_beams(command):
    code, out, err = command("--requests", 20, "--no-beams", "--max-len", 64, "--seed", 3, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    check_rows(report, ["samples"])
    assert report["benchmark"] == "memory" and re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    assert report["beams"] is None
    assert report["options"] == {
        "requests": 20,
        "beam_requests": 0,
        "seed": 3,
        "max_len": 64,
        "pool_slots": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "load": 0.7,
    }
    assert report["traces"]["sharegpt"] == trace.make("sharegpt", 20, seed=3, max_len=64).summary
    assert report["paper_percent"]["wasted"]["max"] == 79.6
    assert report["paper_percent"]["saved"]["beams sharegpt"] == [44.3, 66.3]
    assert json.loads(command("--requests", 20, "--no-beams", "--max-len", 64, "--seed", 3, "--json")[1]) == report


@pytest.mark.slow
def test_tables_and_a_picture_with_beams(command, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    code, out, err = command("--requests", 8, "--beam-requests", 1, "--plot", picture)
    assert (code, err) == (0, "")
    for title, cells in (
        ("contiguous, max", 3),
        ("contiguous, oracle", 3),
        ("blocks of 1", 2),
        ("blocks of 16", 3),
        ("samples, alpaca", 4),
        ("beams, alpaca", 4),
        ("beams, sharegpt", 4),
    ):
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {title} ")]
        assert len(re.findall(r"\d+\.\d+(?: to \d+\.\d+)?", line)) == cells, line
    assert "alpaca: 8 requests of " in out and "sharegpt: 1 requests of " in out
    assert "beams: embedded (" in out
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 100_000


def test_a_picture_without_beams(command, tmp_path):
    pytest.importorskip("matplotlib")
    assert command("--requests", 1, "--no-beams", "--plot", tmp_path / "memory.png")[0] == 0
    assert (tmp_path / "memory.png").is_file()


BAD = [
    ("--requests 0", "--requests is 0; it must be at least 1.*"),
    ("--beam-requests 0", "--beam-requests is 0; it must be at least 1.*"),
    ("--max-len 1", "--max-len is 1; it must be at least 2.*"),
    ("--max-len 40000", "--max-len is 40000; of the 60160 token slots .* give a sequence 32768 at most"),
    ("--plot memory.svg", "--plot memory.svg would be a PNG file; .*"),
    ("--plot nowhere/memory.png", "--plot nowhere/memory.png: there is no directory nowhere; .*"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_2(monkeypatch, capsys, arguments, message):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(memory, "run", pytest.fail)
    assert bench.main(["memory", *arguments.split()]) == 2
    written = capsys.readouterr()
    assert written.out == "" and re.fullmatch(f"error: {message}\n", written.err)


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JaxLLMError, match=r"matplotlib is not installed.*pip install 'jaxllm\[bench\]'"):
        memory_plot.check(tmp_path / "memory.png")
