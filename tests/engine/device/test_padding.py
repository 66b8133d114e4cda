"""What pads a step: kernels for CPUs leave its results as they were in memory, and nobody sees them."""

import numpy as np

from tests.tiny import greedy, ids, make_llm, prompts_of, tokens


def test_hidden_states_of_padding_are_zeros(tiny):
    with make_llm(tiny.model, max_num_seqs=1, max_num_batched_tokens=16) as llm:
        prompts = prompts_of([15, 12, 9])
        outputs = llm.generate(ids(*prompts[:2]), greedy(1))  # fills memory that the next step may find again
        outputs += llm.generate(ids(prompts[2]), greedy(1))
        hidden = np.asarray(llm.engine.runner.executor.state.hidden)
    for prompt, output in zip(prompts, tokens(outputs), strict=True):
        tiny.assert_greedy(prompt, output)
    assert np.all(np.any(hidden[:9], axis=1)) and not np.any(hidden[9:])
