"""The parts of the script that trains the packaged model: its data, its operations, its clock."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.models.cache import Dense
from scripts import train_default_model as script
from scripts import training_data
from scripts.cpu_ops import BlockedDense, tied_cross_entropy

CODE = '''
def public(x):
    """Doubles a number. More words."""
    y = x
    return y * 2


class Box:
    """Holds things

    for a while."""

    @property
    def size(self):
        """How many it holds."""
        self.check()
        return 3

    def __len__(self):
        """Not asked for."""
        self.check()
        return 3


def undocumented():
    x = 1
    return x
'''


def test_the_same_files_are_held_out_again(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(str(i))
    train, heldout = training_data.read_source(tmp_path, 0.2)
    assert sorted(train + heldout) == sorted(map(str, range(40)))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("left out")
    (tmp_path / "copy.py").write_text("7")
    (tmp_path / "empty.py").write_text("")
    again = training_data.read_source(tmp_path, 0.2)
    assert sorted(again.train) == sorted(train) and sorted(again.heldout) == sorted(heldout)


def test_a_share_repeats_or_thins_the_files(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.py").write_text(str(i))
    whole = training_data.read_source(tmp_path, 0.1)
    more, less = (training_data.read_source(tmp_path, 0.1, share) for share in (2.5, 0.3))
    assert set(more.train) == set(whole.train) and more.heldout == whole.heldout
    assert 2.3 < len(more.train) / len(whole.train) < 2.7
    assert set(less.train) < set(whole.train) and 0.2 < len(less.train) / len(whole.train) < 0.4


def test_what_one_source_has_no_other_adds(tmp_path):
    for folder, count in {"a": 40, "b": 60}.items():
        (tmp_path / folder).mkdir()
        for i in range(count):
            (tmp_path / folder / f"{folder}{i}.py").write_text(str(i))
    a, b = training_data.read_sources([f"{tmp_path}/a:2", f"{tmp_path}/b"], 0.2)
    assert sorted(set(a.train) | set(a.heldout), key=int) == [str(i) for i in range(40)]
    assert sorted(b.train + b.heldout, key=int) == [str(i) for i in range(40, 60)]


def test_a_source_without_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="0 files to train on and 0 held out"):
        training_data.read_sources([str(tmp_path)], 0.1)
    with pytest.raises(ValueError, match="'no_such' is neither a folder nor an installed package"):
        training_data.read_sources(["no_such"], 0.1)


def test_functions_and_classes_become_exchanges():
    asked = dict(
        example.removeprefix("<|user|>").split("<|assistant|>") for example in training_data.chat_examples(CODE)
    )
    assert len(asked) == 3
    (public,) = (answer for request, answer in asked.items() if "Doubles a number." in request)
    assert public == CODE[1 : CODE.index("\n\n\nclass")] + "\n"
    (size,) = (answer for request, answer in asked.items() if "How many it holds." in request)
    assert size.startswith("@property\ndef size(self):\n    ") and size.endswith("    return 3\n")
    (box,) = (request for request in asked if "Holds things." in request or "class Box" in request)
    assert "more words" not in box.lower()
    assert list(training_data.chat_examples("def broken(:")) == []


def test_chat_is_a_share_of_the_text():
    texts = [CODE.replace("public", f"f{i}").replace("Box", f"B{i}") + "x = 1\n" * 100 for i in range(30)]
    chosen = training_data.choose_chat(texts, 0.1)
    size, total = sum(map(len, chosen)), sum(map(len, texts))
    assert 0.08 < size / (size + total) <= 0.1
    assert chosen == training_data.choose_chat(texts, 0.1)
    alone = training_data.choose_definitions(texts, 0.1)
    size = sum(map(len, alone))
    assert 0.08 < size / (size + total) <= 0.1
    answers = [example.partition(training_data.ASSISTANT)[2] for example in chosen]
    assert not set(answers) & set(alone) and all(text.startswith(("def ", "class ", "@")) for text in alone)


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 200])
def test_attention_and_its_gradients_are_those_of_dense(length):
    keys = jax.random.split(jax.random.key(0), 4)
    q, out_grad = (jax.random.normal(key, (2, length, 4, 16)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, length, 2, 16)) for key in keys[2:])

    def outputs(cache):
        out, pullback = jax.vjp(lambda *qkv: cache.attend(*qkv, scale=0.25)[0], q, k, v)
        return out, *pullback(out_grad)

    for ours, theirs in zip(
        jax.jit(lambda: outputs(BlockedDense()))(), jax.jit(lambda: outputs(Dense()))(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [60, 1024])
def test_the_loss_and_its_gradients_are_those_of_optax(num_tokens):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, embed = jax.random.normal(keys[0], (num_tokens, 16)), jax.random.normal(keys[1], (50, 16))
    targets = jax.random.randint(keys[2], num_tokens, 0, 50)

    def reference(hidden, embed):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ embed.T, targets).mean()

    ours, grads = jax.value_and_grad(lambda *x: 2 * tied_cross_entropy(*x, targets), (0, 1))(hidden, embed)
    theirs, their_grads = jax.value_and_grad(lambda *x: 2 * reference(*x), (0, 1))(hidden, embed)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for x, y in zip(grads, their_grads, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_muon_takes_the_matrices_inside_layers():
    shape = jax.ShapeDtypeStruct
    layer = {
        "attn": {
            "o": {"weight": shape((2, 2, 8, 16), jnp.float32)},
            "qkv": {"weight": shape((16, 2, 4, 8), jnp.float32)},
        },
        "norm": shape((16,), jnp.float32),
    }
    found = script.matrices({"embed": {"weight": shape((30, 16), jnp.float32)}, "layers": [layer]})
    attn = {name: leaf["weight"] for name, leaf in found["layers"][0]["attn"].items()}
    assert (attn["o"].reduction_axis, attn["o"].output_axis) == ((0, 1, 2), (3,))
    assert (attn["qkv"].reduction_axis, attn["qkv"].output_axis) == ((0,), (1, 2, 3))
    assert found["embed"]["weight"] is None and found["layers"][0]["norm"] is None


def test_a_stopped_process_continues_its_schedule_and_ends_on_time(monkeypatch):
    times = [*range(41), *range(70, 101)]  # seconds; stopped for 29 of them
    monkeypatch.setattr(time, "monotonic", iter(map(float, times)).__next__)
    clock = script.Progress(100.0)
    done = [0.0]
    for _ in times[1:]:
        clock.step()
        done.append(clock.done)
    assert done[40] == pytest.approx(0.4)
    steps = np.diff(done)
    assert (steps > 0).all() and steps[40] < 0.05  # 0.3 by the wall clock
    assert done[-1] == 1 > done[-2]


def test_too_few_tokens_are_an_error():
    rows = script.batches(np.arange(100, dtype=np.int32), 4, 32, np.random.default_rng(0))
    with pytest.raises(ValueError, match="100 tokens are too few for 4 rows of 32"):
        next(rows)


def test_batches_are_consecutive_tokens():
    rows = script.batches(np.arange(1000, dtype=np.int32), 2, 16, np.random.default_rng(0))
    starts = set()
    for batch, _ in zip(rows, range(25), strict=False):
        assert batch.shape == (2, 17)
        np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(17), (2, 1)))
        starts |= set(batch[:, 0].tolist())
    assert len(starts) == 50  # one epoch, nothing twice
