"""Best of n with a scorer: a small network learns rewards from scored samples, then chooses among new ones.

It is compared with choosing by log-probability (the engine's `best_of`), at random, and by the true reward.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import ENGINE, OUTPUT_LEN, VOCAB, add_arguments, make_model, make_prompts, plot, rewards_of
from flax import nnx

from jaxllm import LLM, SamplingParams

SIZES = (1, 2, 4, 8, 16, 32)


class Scorer(nnx.Module):
    """A reward of one sample, from its tokens and the prompt's number."""

    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(OUTPUT_LEN * VOCAB + 1, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, tokens, targets):
        features = jax.nn.one_hot(tokens, VOCAB).reshape(*tokens.shape[:-1], -1)
        x = jnp.concatenate([features, jnp.asarray(targets, jnp.float32)[..., None] / 50], axis=-1)
        return self.out(jax.nn.gelu(self.hidden(x)))[..., 0]


@nnx.jit
def fit(scorer, optimizer, tokens, targets, rewards):
    def loss_fn(scorer):
        return jnp.square(scorer(tokens, targets) - rewards).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(scorer)
    optimizer.update(scorer, grads)
    return loss


def draw(llm, rng, count, n, seed):
    """Samples `[count, n, OUTPUT_LEN]`, their log-probabilities `[count, n]`, and the prompts' numbers `[count, n]`."""
    prompts, targets = make_prompts(rng, count)
    params = SamplingParams(n=n, max_tokens=OUTPUT_LEN, logprobs=0, ignore_eos=True, seed=seed)
    drawn = llm.rollout(prompts, params)
    return drawn.tokens, drawn.logprobs.sum(-1), np.repeat(targets[:, None], n, axis=1)


def run(steps, seed):
    """By chooser, the mean true reward of what it chooses among each of `SIZES`."""
    rng = np.random.default_rng(seed)
    with LLM(make_model(seed), **ENGINE) as llm:
        tokens, _, targets = draw(llm, rng, 64, 32, seed)
        scorer = Scorer(rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(scorer, optax.adam(3e-3), wrt=nnx.Param)
        rewards = rewards_of(tokens, targets[:, 0])
        for _ in range(steps):
            fit(scorer, optimizer, tokens, targets, rewards)
        tokens, logprobs, targets = draw(llm, rng, 64, max(SIZES), seed + 1)
    rewards = rewards_of(tokens, targets[:, 0])
    by = {"scorer": scorer(tokens, targets), "log-probability": logprobs, "the true reward": rewards}
    by["at random"] = rng.random(rewards.shape)
    rows = np.arange(len(rewards))
    return {
        name: [rewards[rows, np.asarray(scores)[:, :n].argmax(axis=1)].mean() for n in SIZES]
        for name, scores in by.items()
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=400)
    args = parser.parse_args(argv)
    found = run(args.steps, args.seed)
    if args.plot:
        plot(args.plot, ("n", "mean reward of the chosen one", {name: (SIZES, y) for name, y in found.items()}))
    for name, rewards in found.items():
        print(f"best of {SIZES[0]}: {rewards[0]:.3f}, of {SIZES[-1]}: {rewards[-1]:.3f}, chosen by {name}")
    return found


if __name__ == "__main__":
    main()
