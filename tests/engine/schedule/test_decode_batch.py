"""The standing batch of decode rows: nobody looks at a sequence that merely goes on."""

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.decode_batch import DecodeBatch
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import Sequence, Status
from jaxllm.engine.schedule.sequence_group import Samples
from jaxllm.engine.schedule.token_log import TokenLog
from jaxllm.sampling_params import SamplingParams
from tests.fake_engine import FakeEngine


class Counted(Sequence):
    """A sequence that counts how often anyone looks at one."""

    looks = 0

    def __getattribute__(self, name):
        Counted.looks += 1
        return super().__getattribute__(name)


def make_sequence(kind=Sequence, arrival=0, **fields):
    """With a block of four tokens."""
    sequence = kind(
        **{"prompt_token_ids": [1, 2], "seed": 0, "max_total_len": 30} | fields,
        params=SamplingParams(),
        arrival=arrival,
    )
    sequence.table = BlockTable(BlockPool(1, 4))
    sequence.table.allocate(1)
    Samples([sequence])
    return sequence


def test_a_steady_step_looks_at_no_sequence():
    count, block_size = 50, 8
    scheduler = Scheduler(BlockPool(10 * count, block_size), max_num_seqs=count)
    for arrival in range(count):
        scheduler.add(make_sequence(Counted, arrival, prompt_token_ids=[arrival, 1]).group)
    looks, in_flight = [], None
    for _ in range(20):
        Counted.looks = 0
        plan = scheduler.schedule(4 * count)
        looks.append(Counted.looks)
        assert plan.num_samples == count
        if in_flight is not None:
            scheduler.commit(in_flight, np.full(count, 5, np.int32))
        in_flight = plan
        scheduler.check()
    steady = [i for i, number in enumerate(looks) if number == 0]
    assert steady == [2, 3, 4, 5, 6, *range(8, 15), *range(16, 20)], "but where a block begins"


def running(count):
    batch, sequences = DecodeBatch(count + 1), []
    for slot in range(count):
        sequence = make_sequence(arrival=slot, slot=slot, status=Status.RUNNING)
        sequence.num_computed = 2
        batch.add(sequence)
        sequences.append(sequence)
    return batch, sequences


def test_columns_follow_whoever_leaves():
    batch, sequences = running(5)
    for leaver in (1, 4, 0):
        batch.remove(sequences[leaver])
        batch.check()
    assert {sequence.slot for sequence in batch.sequences} == {2, 3} == set(batch.slots)
    assert all(sequences[i].batch is None and sequences[i].num_computed == 2 for i in (0, 1, 4))


def test_sequences_count_with_the_batch():
    batch, (first, second) = running(2)
    batch.advance()
    batch.remove(first)
    batch.advance()
    assert (first.num_computed, second.num_computed) == (3, 4)
    assert (first.num_in_flight, second.num_in_flight) == (2, 3)
    second.output_token_ids.extend([7, 7])
    assert (second.num_tokens, second.num_in_flight) == (4, 1)


@pytest.mark.parametrize(("max_total_len", "steps"), [(30, 2), (5, 1), (4, 0)])
def test_due_at_the_end_of_a_block_or_before_the_last_row(max_total_len, steps):
    batch, _ = running(1)
    sequence = make_sequence(slot=1, status=Status.RUNNING, max_total_len=max_total_len)
    sequence.num_computed = 2
    batch.add(sequence)
    for _ in range(steps):
        assert sequence not in batch.due()
        batch.advance()
    assert sequence in batch.due()


def test_who_comes_back_is_due_once():
    batch, (sequence,) = running(1)
    batch.remove(sequence)
    assert not batch._due, "an empty batch holds nobody"
    batch.add(sequence)
    batch.advance()
    batch.advance()
    assert batch.due() == [sequence]


def test_few_tokens_dissolve_the_batch():
    engine = FakeEngine()
    requests = [engine.add([1], 9, seed=seed) for seed in range(3)]
    for _ in range(3):
        engine.step()
    batch = engine.scheduler.running_set.batch
    assert set(batch.sequences) == set(requests)
    engine.step(max_tokens=2)
    assert len(batch) == 0
    engine.step()
    assert set(batch.sequences) == set(requests)
    engine.run()


def test_rows_that_wait_for_the_host_stay_out():
    engine = FakeEngine(max_num_seqs=8)
    plain = engine.add([1], 9)
    engine.add([2], 9, host_dependent=True)
    engine.add_beams([1, 2], 6)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.running_set.batch.sequences == [plain]
    engine.run()


def test_samples_enter_when_their_tails_are_their_own():
    engine = FakeEngine(block_size=4)
    first = engine.add([1, 2, 1], 6, n=3)
    assert isinstance(first.group, Samples)
    for _ in range(2):
        assert len(engine.scheduler.running_set.batch) == 0
        engine.step()
    assert set(engine.scheduler.running_set.batch.sequences) == set(engine.samples[first])
    engine.run()


def batch_of(num, **options):
    batch = DecodeBatch(num)
    for slot in range(num):
        batch.add(make_sequence(arrival=slot, slot=slot, status=Status.RUNNING, max_total_len=999, **options))
    return batch


@pytest.mark.parametrize("num_stops", [0, 1, 8, 9, 30])
def test_stop_tokens_and_what_is_no_token_are_apart(num_stops):
    batch = batch_of(6, stop_ids=frozenset(range(100, 100 + num_stops)))
    drawn = np.array([99, 100, -2, 7, 99 + num_stops, 100 + num_stops], np.int32)
    batch.advance()
    rows = batch.rows_apart(1, np.array(batch.slots, np.int32), drawn)
    assert rows == {0: [2], 1: [1, 2, 4]}.get(num_stops, [1, 2, 4])


def test_columns_that_a_plan_has_stay_as_they_are():
    batch = batch_of(3)
    columns = batch.columns()
    assert batch.columns() == columns and all(a is b for a, b in zip(batch.columns(), columns, strict=True))
    sequences = columns[0].copy()
    slots = np.frombuffer(columns[1], np.int32)  # which could not grow any more
    batch.remove(sequences[0])
    batch.add(make_sequence(arrival=9, slot=0, status=Status.RUNNING, max_total_len=999))
    assert columns[0] == sequences and slots.tolist() == [0, 1, 2] and len(columns[2]) == 3
    assert batch.slots.tolist() == [2, 1, 0]


moves = st.sampled_from(["step", "step", "step", "step", "join", "leave", "look", "switch", "deliver"])


@given(moves=st.lists(moves, max_size=120), tokens=st.lists(st.sampled_from([5, 6, 7]), min_size=1, max_size=9))
def test_what_is_noted_comes_out_in_order(moves, tokens):
    """One step is in flight while the next is planned, and those who leave or come to a stop token are apart."""
    batch, wanted = DecodeBatch(4), defaultdict(lambda: ([], []))
    batch.log = TokenLog(4, most_steps=5)
    free, in_flight, has_logprobs, members = [0, 1, 2, 3], deque(), True, []

    def commit(step, samples, slots, drawn, with_logprobs):
        apart = [samples[row] for row in batch.rows_apart(step, slots, drawn)]
        logprobs = -drawn.astype(np.float32) if with_logprobs else None
        batch.note(step, slots, drawn, logprobs, apart)
        for sequence in apart:
            token = int(drawn[samples.index(sequence)])
            sequence.output_token_ids.append(token)
            sequence.logprobs.extend([-token] if with_logprobs else [])

    for number, move in enumerate(moves):
        if move == "join" and free:
            members.append(make_sequence(arrival=number, slot=free.pop(), status=Status.RUNNING, max_total_len=999))
            members[-1].stop_ids = frozenset([7] if number % 2 else [])
            batch.add(members[-1])
        elif move == "leave" and members:
            gone = members.pop(number % len(members))
            batch.remove(gone)
            free.insert(0, gone.slot)
        elif move == "look" and members:
            sequence = members[number % len(members)]
            known = [tokens for sample, (tokens, _) in wanted.items() if sample is sequence]
            num_in_flight = sum(sequence in samples for _, samples, *_ in in_flight)
            assert [sequence.output_token_ids] == ([one[: len(one) - num_in_flight] for one in known] or [[]])
            assert sequence.num_tokens == 2 + len(sequence.output_token_ids)
        elif move == "switch":
            has_logprobs = not has_logprobs
        elif move == "deliver":
            batch.deliver_all()
        elif move == "step" and members:
            drawn = np.array([tokens[(number + i) % len(tokens)] for i in range(len(batch))], np.int32)
            for sequence, token in zip(batch.sequences, drawn.tolist(), strict=True):
                wanted[sequence][0].append(token)
                wanted[sequence][1].extend([-token] if has_logprobs else [])
            batch.advance()
            slots = np.array(batch.slots, np.int32)
            in_flight.append((batch.num_steps, batch.sequences.copy(), slots, drawn, has_logprobs))
            if len(in_flight) > 1:
                commit(*in_flight.popleft())
    for each in in_flight:
        commit(*each)
    for sequence, outputs in wanted.items():
        assert (sequence.output_token_ids, sequence.logprobs) == outputs
