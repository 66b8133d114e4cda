"""The examples run, and what they show is so."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.pallas_kernels import native

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an example by name; its plot must be one."""
    pytest.importorskip("optax")
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name, *arguments):
        figure = tmp_path / f"{name}.png"
        found = importlib.import_module(name).main([*map(str, arguments), "--plot", str(figure)])
        assert figure.read_bytes().startswith(b"\x89PNG")
        return found

    strict = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    set_promotion("standard", "allow")  # as for users, in all threads
    yield run
    set_promotion(*strict)


def set_promotion(dtype, rank):
    jax.config.update("jax_numpy_dtype_promotion", dtype)
    jax.config.update("jax_numpy_rank_promotion", rank)


def rise(rewards):
    """From the first fifth to the last."""
    few = len(rewards) // 5
    return np.mean(rewards[-few:]) - np.mean(rewards[:few])


def test_grpo(run):
    history = run("grpo", "--steps", 40)
    assert rise(history[:, 0]) > 0.3 and history[:, 1].max() < 1e-4


@pytest.mark.skipif(not native.is_built(), reason="the C++ kernels are not built")
def test_grpo_whose_trainer_computes_as_the_engine_does(run):
    history = run("grpo", "--steps", 40, "--exact")
    assert rise(history[:, 0]) > 0.3 and not history[:, 1].any()


def test_async_rl(run):
    rewards, age, masked = run("async_rl", "--steps", 50).T
    assert rise(rewards) > 0.3 and age.max() > 0.5 and 0 <= masked.mean() < 0.5


def test_lora(run):
    rewards, is_kept = run("lora", "--steps", 50)
    assert rise(rewards) > 0.3 and is_kept


def test_best_of_n(run):
    found = run("best_of_n", "--steps", 300)
    assert len({rewards[0] for rewards in found.values()}) == 1  # there is nothing to choose
    assert found["scorer"][-1] > found["at random"][-1] + 0.2
    assert found["the true reward"][-1] >= max(rewards[-1] for rewards in found.values())


def test_distillation(run):
    before, *_, after = run("distillation", "--steps", 50)[:, 1]
    assert before < 0.05 and after > before + 0.1


def test_multiple_choice(run):
    before, *_, after = run("multiple_choice", "--steps", 120)[:, 1]
    assert before < 0.45 and after > 0.8


def test_custom_architecture(run):
    losses, right, difference = run("custom_architecture", "--steps", 170)
    assert losses[-1] < losses[0] / 4 and right > 0.8 and difference < 1e-4


def test_each_is_told_of():
    told = (EXAMPLES / "README.md").read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"digits"}
    assert len(names) == 7 and all(f"[{name}.py]({name}.py)" in told for name in names)
