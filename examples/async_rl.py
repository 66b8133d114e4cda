"""Asynchronous RL: samples are drawn while the model is trained, and tokens of parameters too old are masked.

Four batches are always on their way. `update_params(in_flight="continue")` gives new parameters to samples that run, so
that their later tokens are of newer versions than their first; `Rollout.version` says which. Those that are more
than `--max-lag` updates old take no part in the loss; the ratio to the engine's log-probabilities corrects the others.
"""

import argparse
import asyncio

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

from jaxllm import AsyncLLM, SamplingParams

PROMPTS, GROUP, IN_FLIGHT = 8, 16, 4


@nnx.jit
def train_step(model, optimizer, tokens, old, advantages, is_fresh):
    def loss_fn(model):
        ratio = jnp.exp(token_logprobs(model, tokens)[:, PROMPT_LEN - 1 :] - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -jnp.where(is_fresh, gain, 0.0).sum() / jnp.maximum(is_fresh.sum(), 1)

    optimizer.update(model, nnx.grad(loss_fn)(model))


async def train(steps, seed, max_lag):
    """float [steps, 3]: mean reward, mean age of the tokens in updates, and the share that was masked."""
    model = make_model(seed)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    rng, history = np.random.default_rng(seed), []
    llm = AsyncLLM(nnx.clone(model), **ENGINE | {"max_num_seqs": PROMPTS * GROUP})

    async def draw(number):
        prompts, targets = make_prompts(rng, PROMPTS)
        params = SamplingParams(n=GROUP, max_tokens=OUTPUT_LEN, logprobs=0, ignore_eos=True, seed=seed + number)
        return prompts, targets, await llm.rollout(prompts, params)

    on_their_way = [asyncio.create_task(draw(number)) for number in range(IN_FLIGHT)]
    for step in range(steps):
        prompts, targets, drawn = await on_their_way.pop(0)
        on_their_way.append(asyncio.create_task(draw(step + IN_FLIGHT)))
        age = (llm.params_version - drawn.version).reshape(-1, OUTPUT_LEN)
        rewards = rewards_of(drawn.tokens, targets)
        arrays = with_prompts(prompts, drawn.tokens), drawn.logprobs.reshape(-1, OUTPUT_LEN)
        # In a thread, so that the loop hands out requests meanwhile.
        advantages = advantages_of(rewards)[:, None]
        await asyncio.to_thread(train_step, model, optimizer, *arrays, advantages, age <= max_lag)
        await llm.update_params(nnx.state(model, nnx.Param), in_flight="continue")
        history.append((rewards.mean(), age.mean(), (age > max_lag).mean()))
    for task in on_their_way:
        task.cancel()
    await asyncio.gather(*on_their_way, return_exceptions=True)
    llm.close()
    return np.array(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=80)
    parser.add_argument(
        "--max-lag", type=int, default=1, help="updates; older tokens are masked (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    history = asyncio.run(train(args.steps, args.seed, args.max_lag))
    if args.plot:
        labels = ("mean reward", "mean age of a token, updates", "share of tokens masked")
        panels = zip(labels, history.T, strict=True)
        plot(args.plot, *(("step", label, {label: (range(args.steps), y)}) for label, y in panels))
    few = max(1, args.steps // 5)
    print(f"mean reward: first {few} steps {history[:few, 0].mean():.3f}, last {history[-few:, 0].mean():.3f}")
    print(f"mean age of a token: {history[:, 1].mean():.2f} updates; masked: {history[:, 2].mean():.1%}")
    return history


if __name__ == "__main__":
    main()
