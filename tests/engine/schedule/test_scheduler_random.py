"""The scheduler under random requests, samples, drafts, beams, aborts, failures and updates; `FakeEngine` asserts what
must hold, and its device shadows the contents of every block through forks, writes, frees, swaps and resumptions."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jaxllm.engine.schedule.cache_groups import EVERYTHING, CacheGroup
from tests.fake_engine import PROMPT_TOKENS, Ends, FakeEngine, truth

limits = st.sampled_from([1, 3, 8, 8])  # tokens of a step: few while the engine compiles
requests = st.fixed_dictionaries(
    {
        "max_new": st.integers(1, 12),
        "seed": st.integers(0, 2),
        "priority": st.sampled_from([0, 0, 1]),
        "eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 3]),
    }
)
kinds = st.fixed_dictionaries(
    {
        "logprobs": st.sampled_from([None, None, None, 0]),
        "matcher": st.sampled_from([None, None, None, Ends(5), Ends(9)]),
    },
    optional={"host_dependent": st.just(True), "drafts": st.just(True)},
)
numbers = st.sampled_from([1, 1, 2, 3, 6])  # of samples
searches = st.fixed_dictionaries(
    {"length_penalty": st.sampled_from([1.0, 0.0, -1.0]), "early_stopping": st.sampled_from([False, True, "never"])}
)
GROUPS = (  # windows shorter, equal and longer than a block, and a state
    (CacheGroup(), CacheGroup(window=3, num_pages=2)),
    (CacheGroup(num_pages=2), CacheGroup(window=2), CacheGroup(window=7)),
    (CacheGroup(window=4),),
    (CacheGroup(), CacheGroup(window=2, is_state=True)),
)
prompts = st.lists(st.sampled_from(PROMPT_TOKENS), min_size=1, max_size=20)


poolings = st.sampled_from(["last", "mean", "cls"])


def generates(machine) -> bool:
    return machine.engine.config.generates


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 8),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        prefix_caching=st.sampled_from([True, True, True, False]),
        swap_blocks=st.sampled_from([0, 0, 5, 100]),
        groups=st.sampled_from([EVERYTHING, EVERYTHING, *GROUPS]),
        whole_prompts=st.sampled_from([False, False, False, True]),
        reports_tokens=st.booleans(),
        bare_logprobs=st.booleans(),
        accepts=st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any),
    )
    def start(self, accepts, **sizes):
        if sizes["whole_prompts"]:
            sizes["groups"] = EVERYTHING
        self.engine = FakeEngine(**sizes)
        self.engine.executor.accepts = accepts

    def unfinished(self):
        return self.engine.unfinished()

    @rule(given=st.lists(st.tuples(prompts, poolings, st.sampled_from([0, 0, 1])), min_size=1, max_size=4))
    def add_pooled(self, given):
        for prompt, pooling, priority in given:
            self.engine.add_pooled(prompt[: self.engine.capacity], pooling, priority=priority)

    @precondition(generates)
    @rule(given=st.lists(st.tuples(prompts, requests, kinds, numbers), min_size=1, max_size=4))
    def add(self, given):
        for prompt, fields, kind, n in given:
            self.engine.add(prompt[: self.engine.capacity - 1], n=n, **fields, **kind)

    @precondition(generates)
    @rule(prompt=prompts, fields=requests, width=st.integers(1, 4), search=searches)
    def add_beams(self, prompt, fields, width, search):
        self.engine.add_beams(prompt[: self.engine.capacity - 1], width=width, search=search, **fields)

    @precondition(lambda self: generates(self) and self.engine.sequences)
    @rule(data=st.data(), more=st.integers(0, 5), fields=requests, kind=kinds)
    def add_related(self, data, more, fields, kind):
        """A prompt that repeats another's, and some of what that one generated or is about to generate."""
        other = data.draw(st.sampled_from(self.engine.sequences[-3:]))
        prompt = truth(other, min(len(other.prompt_token_ids) + more, self.engine.capacity - 1))
        self.engine.add(prompt, **fields | kind | {"seed": other.seed})

    @precondition(lambda self: self.unfinished() or self.engine.in_flight)
    @rule(limits=st.lists(limits, min_size=1, max_size=6))
    def step(self, limits):
        for max_tokens in limits:
            self.engine.step(max_tokens=max_tokens)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from([*self.engine.scheduler.running, *self.unfinished()])))

    @precondition(lambda self: self.unfinished())
    @rule(event=st.sampled_from(["update", "update", "dispatch", "collect", "drain"]), max_tokens=limits)
    def disturb(self, event, max_tokens):
        if event == "update":
            self.engine.update_params()
        elif event == "drain":
            self.engine.run()
        else:
            self.engine.step(fail=event, max_tokens=max_tokens)

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()


@pytest.mark.timeout(1200)  # a minute on a quiet machine, and compiles run beside it
@pytest.mark.parametrize("max_examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_random_events(max_examples):
    sizes = settings(
        max_examples=max_examples, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(SchedulerMachine, settings=sizes)
