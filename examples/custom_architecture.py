"""An architecture of one's own: defined, trained and served without a line for the engine.

Attention and MLP work side by side, over one norm, and the residual stream is scaled in each layer by a learned number.
The model learns to repeat the eight digits it is given, backwards; then the engine is checked against it.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from digits import OUTPUT_LEN, SEP, VOCAB, add_arguments, plot, token_logprobs
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import qwen3, transformer
from jaxllm.models.layers import LayerSpec, Rope

BATCH = 64


class Parallel(transformer.DecoderLayer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, x, ctx, sin_cos, cache):
        h = self.attn_norm(x)
        attended, cache = self.attn(h, ctx, sin_cos, cache)
        return x * self.scale[...] + attended + self.mlp(h, ctx), cache


class Mine(qwen3.Model):
    Layer = Parallel


def make_model(seed):
    layers = (LayerSpec(rope=Rope(theta=1e4)),) * 2
    sizes = dict(embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128, max_len=64)
    return Mine(qwen3.Config(vocab=VOCAB, layers=layers, dtype=jnp.float32, **sizes), rngs=nnx.Rngs(seed))


def make_texts(rng, count):
    """int32 [count, 2 * OUTPUT_LEN + 1]: digits, a mark, and the digits backwards."""
    digits = rng.integers(0, 10, (count, OUTPUT_LEN))
    return np.concatenate([digits, np.full((count, 1), SEP), digits[:, ::-1]], axis=1).astype(np.int32)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        return -token_logprobs(model, tokens)[:, OUTPUT_LEN:].mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(steps, seed):
    """The losses; the share of digits that the engine repeats right; and how far its log-probabilities are from the
    model's own."""
    rng, model = np.random.default_rng(seed), make_model(seed)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, make_texts(rng, BATCH))) for _ in range(steps)]
    texts = make_texts(rng, 32)
    with LLM(model, max_num_seqs=32, max_model_len=64, block_size=16, num_blocks=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, logprobs=0, ignore_eos=True)
        drawn = llm.rollout(texts[:, : OUTPUT_LEN + 1], params)
    right = (drawn.tokens[:, 0] == texts[:, OUTPUT_LEN + 1 :]).mean()
    said = np.concatenate([texts[:, : OUTPUT_LEN + 1], drawn.tokens[:, 0]], axis=1)
    own = token_logprobs(model, jnp.asarray(said))[:, OUTPUT_LEN:]
    return np.array(losses), float(right), float(np.abs(own - drawn.logprobs[:, 0]).max())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=300)
    args = parser.parse_args(argv)
    losses, right, difference = train(args.steps, args.seed)
    if args.plot:
        plot(args.plot, ("step", "loss, nats a token", {"loss": (range(args.steps), losses)}))
    print(f"loss: {losses[0]:.2f}, then {losses[-1]:.2f}; digits that the engine repeats right: {right:.1%}")
    print(f"largest difference between the engine's and the model's log-probabilities: {difference:.1e}")
    return losses, right, difference


if __name__ == "__main__":
    main()
