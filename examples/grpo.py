"""GRPO (arXiv 2402.03300) in one process: the model learns to emit eight digits whose sum is the prompt's number.

Each step draws a group of samples a prompt, takes advantages relative to the group, and makes one optimizer step on the
clipped ratio to the engine's own log-probabilities. The new parameters are served at once, without a copy. With
`--exact` (on a CPU) the trainer computes as the engine does: the first ratio of a step is 1 to the bit.
"""

import argparse
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
from digits import (
    ENGINE,
    OUTPUT_LEN,
    PROMPT_LEN,
    add_arguments,
    advantages_of,
    make_model,
    make_prompts,
    plot,
    rewards_of,
    with_prompts,
)
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import token_logprobs

PROMPTS, GROUP = 8, 16


@partial(nnx.jit, static_argnames="arithmetic")
def train_step(model, optimizer, tokens, old, advantages, arithmetic=None):
    """The largest difference between the trainer's log-probabilities and `old`, those of the engine."""

    def loss_fn(model):
        new = token_logprobs(model, tokens, arithmetic=arithmetic)[:, PROMPT_LEN - 1 :]
        ratio = jnp.exp(new - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -gain.mean(), jnp.abs(new - old).max()

    grads, difference = nnx.grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return difference


def train(steps, seed, exact=False):
    """float [steps, 2]: mean reward, and largest difference of log-probabilities."""
    model = make_model(seed)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    rng, history = np.random.default_rng(seed), []
    with LLM(model, batch_invariant=exact, **ENGINE) as llm:
        arithmetic = llm.arithmetic if exact else None
        for step in range(steps):
            prompts, targets = make_prompts(rng, PROMPTS)
            params = SamplingParams(n=GROUP, max_tokens=OUTPUT_LEN, logprobs=0, ignore_eos=True, seed=seed + step)
            drawn = llm.rollout(prompts, params)
            rewards = rewards_of(drawn.tokens, targets)
            tokens, old = with_prompts(prompts, drawn.tokens), drawn.logprobs.reshape(-1, OUTPUT_LEN)
            difference = train_step(model, optimizer, tokens, old, advantages_of(rewards)[:, None], arithmetic)
            llm.update_params(nnx.state(model, nnx.Param))
            history.append((float(rewards.mean()), float(difference)))
    return np.array(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=60)
    parser.add_argument(
        "--exact", action="store_true", help="the trainer computes log-probabilities as the engine does"
    )
    args = parser.parse_args(argv)
    history = train(args.steps, args.seed, args.exact)
    if args.plot:
        steps = range(args.steps)
        labels = ("mean reward", "largest difference, nats")
        plot(args.plot, *(("step", label, {label: (steps, y)}) for label, y in zip(labels, history.T, strict=True)))
    few = max(1, args.steps // 5)
    print(f"mean reward: first {few} steps {history[:few, 0].mean():.3f}, last {history[-few:, 0].mean():.3f}")
    print(f"largest difference between the engine's and the trainer's log-probabilities: {history[:, 1].max():.1e}")
    return history


if __name__ == "__main__":
    main()
