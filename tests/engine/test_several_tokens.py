"""What the layers above the scheduler make of several tokens in one step: stop strings, and the masks of drafts."""

import numpy as np
import pytest

from jaxllm import SamplingParams, StructuredOutputs
from jaxllm.engine.grammar_rows import GrammarRows
from jaxllm.engine.output import Request
from jaxllm.engine.requests import OpenRequests
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.engine.schedule.sequence_group import Samples
from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.grammar.matcher import mask_words
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import backend
from tests.engine.schedule.test_drafts import answer, drafting
from tests.engine.test_step_contract import Letters
from tests.fake_engine import FakeEngine


@pytest.mark.parametrize(
    "text", ["stop!", "stop, and more", "a stop", "stop then z"], ids=["at_once", "before", "last", "before_a_stop_id"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_after_a_stop_string_is_dropped(text, stream):
    """Also where a stop token or the length has ended the sequence behind it."""
    engine, tokens = FakeEngine(num_blocks=32), Letters().encode(text)
    sequence = drafting(
        engine, max_new=len(tokens) + 1, num_drafts=len(tokens), stop_ids=Letters().encode("z"), logprobs=0
    )
    (first,) = sequence.output_token_ids
    params = SamplingParams(stop="stop")
    prompt = sequence.prompt_token_ids
    request = Request(
        request_id="r", prompt=None, prompt_token_ids=prompt, params=params, tokenizer=wrap(Letters()), stream=stream
    )
    request.sequences, sequence.request = [sequence], request
    requests = OpenRequests(engine.scheduler.finish)
    requests.add(request)
    requests.updates([sequence])
    engine.step()
    (out,) = requests.updates(answer(engine, [*tokens, 0][: sequence.num_in_flight]))
    before = text[: text.index("stop")]
    (completion,) = out.outputs
    assert completion.text == Letters().decode([first]) + before
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "stop")
    assert sequence.output_token_ids == [first, *Letters().encode(before + "stop")]
    assert len(sequence.logprobs) == len(sequence.output_token_ids) and sequence.slot < 0
    assert not engine.scheduler.has_work() and len(requests) == 0


def allowed(tokenizer, mask: np.ndarray) -> list[str]:
    ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
    return [tokenizer.decode([token]) for token in ids.tolist()]


def test_each_draft_is_masked_as_the_one_before_leaves_the_grammar():
    vocab = 263
    tokenizer = Tokenizer(backend(), eos_token="</s>")
    compiler = GrammarCompiler(tokenizer, vocab, [257])
    grammar = compiler.compile(StructuredOutputs(regex="ab[cd]e"))
    a, b, c, x = tokenizer.encode("abcx", add_special_tokens=False)
    plan = Plan()
    for slot, drafts in enumerate(([b, c], [x], [])):
        sequence = Sequence(
            prompt_token_ids=[1],
            params=SamplingParams(),
            arrival=slot,
            seed=0,
            max_total_len=9,
            own_token_ids=[a],
            slot=slot,
            matcher=grammar.matcher(),
            propose=lambda sequence, most: [],
        )
        Samples([sequence])
        sequence.num_computed = 1
        plan.add_decode(sequence)
        plan.add_drafts({sequence: drafts} if drafts else {})
    plan.seal()
    assert [sequence.slot for sequence in plan.samples] == [2, 0, 0, 0, 1, 1]
    rows, masks = GrammarRows(plan), np.full((6, mask_words(vocab)), -1, np.int32)
    assert not rows.await_commit, "nothing else of them is in flight"
    assert rows.fill(compiler, masks) == [], "a draft that may not be leaves its sequence the token before it"
    assert [allowed(tokenizer, masks[row]) for row in range(5)] == [["b"], ["b"], ["c", "d"], ["e"], ["b"]]
    assert [sequence.matcher.ends_after([a, b, c]) for sequence in plan.samples[:2]] == [False, False]
