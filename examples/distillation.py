"""Distils a small draft model from the model in the package, on texts that the large one writes.

The engine draws the texts; the small model learns the large one's distribution at each of their tokens. What counts for
speculative decoding is measured: how often its most likely token is the large model's, on texts it has not seen.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import add_arguments, plot, token_logits
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import qwen3
from jaxllm.models.layers import LayerSpec, Rope

BATCH, LEN = 8, 64


def make_student(teacher, seed):
    """One layer, a third as wide, over the same vocabulary."""
    layers = (LayerSpec(rope=Rope(theta=1e4)),)
    sizes = dict(embed=96, layers=layers, heads=4, kv_heads=2, head_dim=24, mlp=192, max_len=LEN)
    cfg = qwen3.Config(vocab=teacher.cfg.vocab, dtype=jnp.float32, **sizes)
    return qwen3.Model(cfg, rngs=nnx.Rngs(seed))


@nnx.jit
def train_step(student, optimizer, teacher, tokens):
    target = jax.nn.softmax(token_logits(teacher, tokens))

    def loss_fn(student):
        return -(target * jax.nn.log_softmax(token_logits(student, tokens))).sum(-1).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(student)
    optimizer.update(student, grads)
    return loss


@nnx.jit
def agreement(student, teacher, tokens):
    """The share of tokens after which both find the same one the most likely."""
    return (token_logits(student, tokens).argmax(-1) == token_logits(teacher, tokens).argmax(-1)).mean()


def write_texts(llm, count, seed):
    """int32 [count, LEN], from the beginning of sequence on."""
    params = SamplingParams(n=count, temperature=1.0, max_tokens=LEN - 1, ignore_eos=True, seed=seed)
    drawn = llm.rollout([[llm.tokenizer.bos_token_id]], params)
    return np.concatenate([np.full((count, 1), llm.tokenizer.bos_token_id, np.int32), drawn.tokens[0]], axis=1)


def train(steps, seed):
    """float [measurements, 2]: the step, and the agreement then."""
    history = []
    with LLM(max_num_seqs=64, max_model_len=128) as llm:
        teacher = llm.module
        student = make_student(teacher, seed)
        optimizer = nnx.Optimizer(student, optax.adam(3e-3), wrt=nnx.Param)
        unseen = write_texts(llm, 32, seed)
        for step in range(steps):
            if step % 10 == 0:
                texts = write_texts(llm, 10 * BATCH, seed + 1 + step)
                history.append((step, float(agreement(student, teacher, unseen))))
            at = step % 10 * BATCH
            train_step(student, optimizer, teacher, texts[at : at + BATCH])
        history.append((steps, float(agreement(student, teacher, unseen))))
    return np.array(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, steps=150)
    args = parser.parse_args(argv)
    history = train(args.steps, args.seed)
    if args.plot:
        plot(args.plot, ("step", "share of tokens that agree", {"agreement": history.T}))
    print(f"tokens that agree, of texts not seen: {history[0, 1]:.1%} before, {history[-1, 1]:.1%} after")
    return history


if __name__ == "__main__":
    main()
