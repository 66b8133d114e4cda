"""What an engine asks of its device, written down, makes the same state on another one."""

import io

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm import SamplingParams
from jaxllm.engine.build import model_shape
from jaxllm.engine.device.command_log import MAGIC, Recorder, read_frames, write_frame
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.executor import Executor
from jaxllm.sharding.mesh import make_mesh
from tests.tiny import greedy, ids, make_llm, prompts_of

COMMANDS = [
    Command(("step", 8), (np.arange(5, dtype=np.int32),)),
    Command("swap_out", (np.zeros(4, np.int32), np.ones((2, 3), np.int32)), 7),
    Command("init"),
]


def test_two_executors_fed_one_stream_are_equal_to_the_bit(tiny):
    """Samples, beams, penalties, forks, prefix hits, and blocks that are swapped out and back."""
    file = io.BytesIO()
    with make_llm(tiny.model, max_num_seqs=6, num_blocks=40) as llm:
        runner = llm.engine.runner
        executor = runner.executor
        runner.executor = Recorder(executor, file)
        llm.engine.set_preemption("swap")
        llm.generate(ids(*prompts_of([20] * 6)), greedy(30))
        assert llm.stats().num_swapped > 0
        params = SamplingParams(n=3, seed=1, temperature=0.9, max_tokens=6, frequency_penalty=0.5, logit_bias={3: 2.0})
        llm.generate(ids(*prompts_of([9, 20])), [params, SamplingParams(beam_width=3, max_tokens=5)])
        config, expected = llm.engine.config, jax.tree.map(np.asarray, executor.state)
    mesh = make_mesh(None)
    graph, state = nnx.split(tiny.model)
    other = Executor(model_shape(tiny.cfg, graph, state, mesh), config, mesh)
    other.compile_plan.wait_all()
    other.set_params(state)
    other.apply([Command("init")])
    file.seek(0)
    for commands in read_frames(file):
        other.apply(commands)
    for ours, theirs in zip(jax.tree.leaves(other.state), jax.tree.leaves(expected), strict=True):
        assert np.asarray(ours).tobytes() == theirs.tobytes()
    other.close()


def test_a_file_gives_back_what_was_written():
    file = io.BytesIO()
    file.write(MAGIC)
    write_frame(file, COMMANDS)
    write_frame(file, [])
    file.seek(0)
    first, second = read_frames(file)
    assert second == [] and [(c.name, c.key) for c in first] == [(c.name, c.key) for c in COMMANDS]
    for read, written in zip(first, COMMANDS, strict=True):
        for ours, theirs in zip(read.arrays, written.arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("cut", [3, 30, 60])
def test_a_file_that_is_cut_off_or_something_else_is_refused(cut):
    file = io.BytesIO()
    file.write(MAGIC)
    write_frame(file, COMMANDS)
    with pytest.raises(ValueError, match="no file of recorded commands|in the middle of a frame"):
        list(read_frames(io.BytesIO(file.getvalue()[:cut])))
