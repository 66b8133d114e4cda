"""LoRA in the loop: a base model stays as it is, and low-rank weights beside its products learn by GRPO.

The engine serves base and low-rank weights together; after each step it gets the low-rank ones alone.
"""

import argparse

import jax
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
    token_logprobs,
    with_prompts,
)
from flax import nnx

from jaxllm import LLM, SamplingParams

PROMPTS, GROUP, RANK = 8, 16, 8


class LowRank(nnx.Module):
    """Added to what a product with one input axis and one output axis gives."""

    def __init__(self, linear, rank, *, rngs):
        (_, inputs), (_, outputs) = *linear.shape.inputs, *linear.shape.outputs
        self.lora = nnx.LoRA(inputs, rank, outputs, rngs=rngs)

    def __call__(self, x, y, ctx):
        return y + self.lora(x)


@nnx.jit
def train_step(model, optimizer, tokens, old, advantages):
    def loss_fn(model):
        ratio = jnp.exp(token_logprobs(model, tokens)[:, PROMPT_LEN - 1 :] - old)
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()

    grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)


def count(model, kind):
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))


def train(steps, seed):
    """float [steps], mean reward; numbers of low-rank and of all parameters; and whether the base stayed as it was."""
    model, rngs = make_model(seed), nnx.Rngs(seed + 1)
    base = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    for layer in model.layers:
        layer.mlp.down.adapter = LowRank(layer.mlp.down, RANK, rngs=rngs)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    rng, history = np.random.default_rng(seed), []
    with LLM(model, **ENGINE) as llm:
        for step in range(steps):
            prompts, targets = make_prompts(rng, PROMPTS)
            params = SamplingParams(n=GROUP, max_tokens=OUTPUT_LEN, logprobs=0, ignore_eos=True, seed=seed + step)
            drawn = llm.rollout(prompts, params)
            rewards = rewards_of(drawn.tokens, targets)
            tokens, old = with_prompts(prompts, drawn.tokens), drawn.logprobs.reshape(-1, OUTPUT_LEN)
            train_step(model, optimizer, tokens, old, advantages_of(rewards)[:, None])
            llm.update_params(nnx.state(model, nnx.LoRAParam))
            history.append(rewards.mean())
    frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    is_kept = all(np.array_equal(a, b) for a, b in zip(base, jax.tree.leaves(frozen), strict=True))
    return np.array(history), count(model, nnx.LoRAParam), count(model, nnx.Param), is_kept


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=80)
    args = parser.parse_args(argv)
    history, num_low_rank, num_all, is_kept = train(args.steps, args.seed)
    if args.plot:
        plot(args.plot, ("step", "mean reward", {"mean reward": (range(args.steps), history)}))
    few = max(1, args.steps // 5)
    print(f"{num_low_rank} of {num_all} parameters learn; the others are as they were: {is_kept}")
    print(f"mean reward: first {few} steps {history[:few].mean():.3f}, last {history[-few:].mean():.3f}")
    return history, is_kept


if __name__ == "__main__":
    main()
