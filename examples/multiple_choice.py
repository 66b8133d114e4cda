"""Evaluates a model on a small multiple-choice set while it learns: which of four answers it finds the most likely.

The set asks for sums of two numbers below 50. `LLM.loglikelihood` scores all answers of a question over one computed
context, and generates nothing.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from digits import add_arguments, make_model, plot, token_logprobs
from flax import nnx

from jaxllm import LLM

PLUS, IS = 10, 11  # beside the digits 0 to 9
QUESTIONS, BATCH = 200, 256


def question(a, b):
    return [a // 10, a % 10, PLUS, b // 10, b % 10, IS]


def answer(total):
    return [total // 10, total % 10]


def make_set(rng):
    """Pairs (context, four answers), and the place of the right one in each."""
    pairs, places = [], []
    for a, b in rng.integers(0, 50, (QUESTIONS, 2)):
        wrong = rng.choice([delta for delta in range(-15, 16) if delta and 0 <= a + b + delta < 100], 3, replace=False)
        totals = rng.permutation([a + b, *(a + b + wrong)])
        pairs.append((question(a, b), [answer(total) for total in totals]))
        places.append(int(np.flatnonzero(totals == a + b)[0]))
    return pairs, np.array(places)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        return -token_logprobs(model, tokens)[:, -2:].mean()  # of the answer alone

    optimizer.update(model, nnx.grad(loss_fn)(model))


def accuracy(llm, pairs, places):
    scores = [[one.logprob for one in answers] for answers in llm.loglikelihood(pairs, use_tqdm=False)]
    return float((np.argmax(scores, axis=1) == places).mean())


def train(steps, seed):
    """float [measurements, 2]: the step, and the accuracy then."""
    rng, model = np.random.default_rng(seed), make_model(seed)
    pairs, places = make_set(np.random.default_rng(seed + 1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    every, history = max(1, steps // 10), []
    with LLM(model, max_num_seqs=32, max_model_len=64, block_size=8, num_blocks=512) as llm:
        for step in range(steps + 1):
            if step % every == 0:
                llm.update_params(nnx.state(model, nnx.Param))
                history.append((step, accuracy(llm, pairs, places)))
            numbers = rng.integers(0, 50, (BATCH, 2))
            tokens = np.array([question(a, b) + answer(a + b) for a, b in numbers], np.int32)
            train_step(model, optimizer, jnp.asarray(tokens))
    return np.array(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=400)
    args = parser.parse_args(argv)
    history = train(args.steps, args.seed)
    if args.plot:
        plot(args.plot, ("step", "accuracy", {"model": history.T, "chance": (history[:, 0], [0.25] * len(history))}))
    print(f"accuracy: {history[0, 1]:.1%} before, {history[-1, 1]:.1%} after {args.steps} steps; chance is 25%")
    return history


if __name__ == "__main__":
    main()
