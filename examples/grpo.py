"""GRPO (arXiv 2402.03300) in one process: the model learns to emit eight digits whose sum is the prompt's number.

Each step draws a group of samples a prompt, takes advantages relative to the group, and makes one optimizer step on the
clipped ratio to the engine's own log-probabilities. The new parameters are served at once, without a copy.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import qwen3
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext

BOS, SEP, VOCAB = 10, 11, 12
PROMPT_LEN, OUTPUT_LEN = 4, 8
PROMPTS, GROUP = 8, 16
HF = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip


def token_logprobs(model, tokens):
    """float32 [batch, len - 1]: of each token after the first."""
    ctx = StepContext.of(tokens)
    hidden, _ = model(tokens, ctx, [Dense()] * model.cfg.num_layers)
    logprobs = jax.nn.log_softmax(model.logits(hidden, ctx)[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


@nnx.jit
def train_step(model, optimizer, tokens, old, advantages):
    """The largest difference between the trainer's log-probabilities and `old`, those of the engine."""

    def loss_fn(model):
        new = token_logprobs(model, tokens)[:, PROMPT_LEN - 1 :]
        ratio = jnp.exp(new - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -gain.mean(), jnp.abs(new - old).max()

    grads, difference = nnx.grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return difference


def rewards_of(outputs, targets):
    """float32 [prompts, group]: 0 is best; tokens that are no digits cost, too."""
    tokens = np.array([[one.token_ids for one in output.outputs] for output in outputs])
    is_digit = tokens < 10
    off = np.abs(np.where(is_digit, tokens, 0).sum(-1) - targets[:, None])
    return (-off / 10 - 0.5 * (~is_digit).sum(-1)).astype(np.float32)


def train(steps, seed):
    """Mean reward and largest difference of log-probabilities, of each step."""
    model = qwen3.Model(qwen3.Config.from_hf(HF), rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    params = SamplingParams(n=GROUP, max_tokens=OUTPUT_LEN, logprobs=0, ignore_eos=True, detokenize=False, seed=seed)
    rng, history = np.random.default_rng(seed), []
    with LLM(model, max_num_seqs=64, max_model_len=64, block_size=16, num_blocks=512) as llm:
        for _ in range(steps):
            params.seed = int(rng.integers(2**31))
            targets = rng.integers(20, 50, PROMPTS)
            prompts = [[BOS, int(n) // 10, int(n) % 10, SEP] for n in targets]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            samples = [(output.prompt_token_ids, one) for output in outputs for one in output.outputs]
            tokens = np.array([prompt + one.token_ids for prompt, one in samples], np.int32)
            old = [
                [entry[t].logprob for t, entry in zip(one.token_ids, one.logprobs, strict=True)] for _, one in samples
            ]
            rewards = rewards_of(outputs, targets)
            spread = rewards.std(axis=1, keepdims=True) + 1e-4
            advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).reshape(-1, 1)
            old = np.array(old, np.float32)
            advantages = np.broadcast_to(advantages, old.shape)
            difference = train_step(model, optimizer, jnp.asarray(tokens), jnp.asarray(old), jnp.asarray(advantages))
            llm.update_params(nnx.state(model, nnx.Param))
            history.append((float(rewards.mean()), float(difference)))
    return np.array(history)


def plot(history, file):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    labels = ("mean reward", "largest difference, nats")
    for axes, values, label in zip(figure.subplots(1, 2), history.T, labels, strict=True):
        axes.plot(values)
        axes.set(xlabel="step", ylabel=label)
    figure.savefig(file)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="for example grpo.png; needs matplotlib")
    args = parser.parse_args(argv)
    history = train(args.steps, args.seed)
    if args.plot:
        plot(history, args.plot)
    few = max(1, args.steps // 5)
    print(f"mean reward: first {few} steps {history[:few, 0].mean():.3f}, last {history[-few:, 0].mean():.3f}")
    print(f"largest difference between the engine's and the trainer's log-probabilities: {history[:, 1].max():.1e}")
    return history


if __name__ == "__main__":
    main()
