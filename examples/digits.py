"""What the examples share: a task that a tiny model learns in seconds, its rewards, and plots.

A prompt names a number, and the model is to emit eight digits that sum to it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.models import qwen3
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext

BOS, SEP, VOCAB = 10, 11, 12
PROMPT_LEN, OUTPUT_LEN = 4, 8
HF = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
ENGINE = {"max_num_seqs": 64, "max_model_len": 64, "block_size": 16, "num_blocks": 512}


def make_model(seed):
    return qwen3.Model(qwen3.Config.from_hf(HF), rngs=nnx.Rngs(seed))


def make_prompts(rng, count):
    """int32 [count, PROMPT_LEN], and the numbers, int [count]."""
    targets = rng.integers(20, 50, count)
    columns = np.full(count, BOS), targets // 10, targets % 10, np.full(count, SEP)
    return np.stack(columns, axis=1).astype(np.int32), targets


def token_logits(model, tokens):
    """float32 [batch, len, vocab]: the model as a trainer runs it."""
    ctx = StepContext.of(tokens)
    hidden, _ = model(tokens, ctx, [Dense()] * model.cfg.num_layers)
    return model.logits(hidden, ctx)


def token_logprobs(model, tokens):
    """float32 [batch, len - 1]: of each token after the first."""
    logprobs = jax.nn.log_softmax(token_logits(model, tokens)[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def with_prompts(prompts, outputs):
    """int32 [prompts * group, len]: samples `[prompts, group, OUTPUT_LEN]` behind their prompts."""
    repeated = np.repeat(prompts[:, None], outputs.shape[1], axis=1)
    return np.concatenate([repeated, outputs], axis=-1).reshape(-1, prompts.shape[1] + outputs.shape[2])


def rewards_of(outputs, targets):
    """float32 [prompts, group] of samples `[prompts, group, OUTPUT_LEN]`: 0 is best; what is no digit costs, too."""
    is_digit = outputs < 10
    off = np.abs(np.where(is_digit, outputs, 0).sum(-1) - targets[:, None])
    return (-off / 10 - 0.5 * (~is_digit).sum(-1)).astype(np.float32)


def advantages_of(rewards):
    """float32 [prompts * group]: relative to the prompt's group, in its standard deviations."""
    spread = rewards.std(axis=1, keepdims=True) + 1e-4
    return ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).reshape(-1)


def plot(file, *panels):
    """Writes a figure: each panel is (label of x, label of y, {name: (x, y)})."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3), layout="constrained")
    for axes, (x_label, y_label, lines) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        for name, (x, y) in lines.items():
            axes.plot(x, y, label=name)
        axes.set(xlabel=x_label, ylabel=y_label)
        if len(lines) > 1:
            axes.legend()
    figure.savefig(file)


def add_arguments(parser, *, steps):
    parser.add_argument("--steps", type=int, default=steps, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="for example figure.png; needs matplotlib")
