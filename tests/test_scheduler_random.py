"""The scheduler under random requests, aborts, failures and updates; `FakeEngine` asserts what must hold."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxllm.engine.request import Status
from tests.fake_engine import PROMPT_TOKENS, FakeEngine, truth

prompts = st.lists(st.sampled_from(PROMPT_TOKENS), min_size=1, max_size=12)
limits = st.sampled_from([1, 3, 8, 8])  # tokens of a step: few while the engine compiles


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 8),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(self, **sizes):
        self.engine = FakeEngine(**sizes)

    def _add(self, prompt, max_new, fields):
        prompt = prompt[: self.engine.capacity - 1]
        self.engine.add(prompt, max_new, **fields)

    fields = st.fixed_dictionaries({
        "seed": st.integers(0, 2),
        "priority": st.sampled_from([0, 0, 0, 1]),
        "host_dependent": st.sampled_from([False, False, True]),
        "eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 3]),
    })  # fmt: skip

    @rule(prompt=prompts, max_new=st.integers(1, 10), fields=fields)
    def add(self, prompt, max_new, fields):
        self._add(prompt, max_new, fields)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), max_new=st.integers(1, 10), fields=fields)
    def continue_conversation(self, data, max_new, fields):
        """A prompt that repeats a request and what it generated or was about to generate."""
        other = data.draw(st.sampled_from(self.engine.requests))
        length = data.draw(st.integers(1, other.max_total_len))
        self._add(truth(other, length), max_new, fields | {"seed": other.seed})

    @rule(limits=st.lists(limits, min_size=1, max_size=6))
    def step(self, limits):
        for max_tokens in limits:
            self.engine.step(max_tokens=max_tokens)

    @rule(kind=st.sampled_from(["dispatch", "collect"]), max_tokens=limits)
    def fail(self, kind, max_tokens):
        self.engine.step(fail=kind, max_tokens=max_tokens)

    @precondition(lambda self: any(r.status is not Status.FINISHED for r in self.engine.requests))
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from([r for r in self.engine.requests if not r.finish_reason])))

    @rule()
    def update_params(self):
        self.engine.update_params()

    @rule()
    def drain(self):
        self.engine.run()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
