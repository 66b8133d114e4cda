"""Trains the small model that the package ships, on the source of Python's standard library.

    python -m scripts.train_default_model --out jaxllm/default_model --minutes 65

From end to end: source files, a byte-level BPE tokenizer, `jaxllm.models.llama` with `Dense` attention and AdamW
in float32, a directory in Hugging Face format. The learning rate follows the wall clock, so that a run ends on
time and fully decayed on any machine.
"""

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int
from safetensors.flax import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxllm.models import llama
from jaxllm.models.cache import Dense

log = partial(print, file=sys.stderr, flush=True)

MAX_BYTES = 12_000_000  # of the whole directory
MAX_LEN = 1024  # tokens
BOS, EOS = "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = [BOS, EOS, "<|user|>", "<|assistant|>"]
# Tests, tables of characters, and the build's own paths teach a small model little.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "encodings", "python-config.py"}
# A word keeps one character before it (" x", ".x", "_x"), each digit stands alone, indentation is one piece.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Report(NamedTuple):
    losses: list[float]  # training loss of each step, nats per token
    heldout_loss: float  # nats per token
    bits_per_byte: float  # on the held-out files


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: nnx.State
    moments: optax.OptState


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write")
    add("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of *.py files")
    add("--holdout", type=float, default=0.02, help="share of the files kept for validation")
    add("--minutes", type=float, default=65.0, help="time to train for")
    add("--steps", type=int, default=None, help="stop after this many steps, if that is sooner")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--batch", type=int, default=4, help="rows a step, of --seq-len tokens each")
    sizes = {"seq-len": 256, "vocab": 4096, "layers": 4, "embed": 192, "heads": 4, "kv-heads": 2, "head-dim": 64}
    for name, default in (sizes | {"mlp": 512, "seed": 0}).items():
        add(f"--{name}", type=int, default=default)
    return parser.parse_args(argv)


def read_source(folder: Path, holdout: float) -> tuple[list[str], list[str]]:
    """Texts to train on, and those held out: chosen by name, so that they stay the same between runs."""
    train, heldout = [], []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if LEFT_OUT.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            chosen = int.from_bytes(digest[:4]) < holdout * 2**32
            (heldout if chosen else train).append(path.read_text(encoding="utf-8"))
    if not train or not heldout:
        found = f"{len(train)} files to train on and {len(heldout)} held out"
        raise ValueError(f"{folder} gives {found}; take a --source of more *.py files or another --holdout")
    return train, heldout


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE (arXiv 1508.07909) with a start token before each text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL_TOKENS, initial_alphabet=to_bytes.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    start = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[start])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one row of int32, each between start and end token."""
    eos = tokenizer.token_to_id(EOS)
    return np.concatenate([np.array([*e.ids, eos], np.int32) for e in tokenizer.encode_batch(texts)])


def hf_config(options: argparse.Namespace, tokenizer: Tokenizer) -> dict:
    """A `config.json` for transformers 5 (`rope_parameters`, `dtype`) and 4 (`rope_theta`, `torch_dtype`)."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": options.embed, "intermediate_size": options.mlp, "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads, "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS),
        "dtype": "bfloat16", "torch_dtype": "bfloat16",
    }  # fmt: skip


def batches(tokens: np.ndarray, batch: int, seq_len: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless `[batch, seq_len + 1]`: each epoch cuts the tokens elsewhere and shuffles the rows."""
    if (num_rows := len(tokens) // seq_len - 1) < batch:
        raise ValueError(f"{len(tokens)} tokens are too few for {batch} rows of {seq_len}; take a larger --source")
    while True:
        starts = rng.integers(seq_len) + seq_len * rng.permutation(num_rows)
        for i in range(0, num_rows - batch + 1, batch):
            yield np.stack([tokens[start : start + seq_len + 1] for start in starts[i : i + batch]])


def mean_loss(model: llama.Model, rows: Int[Array, "batch len_plus_1"]) -> Float[Array, ""]:
    """Cross-entropy of each row's next tokens, nats per token."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape)
    hidden, _ = model(inputs, positions, [Dense()] * model.cfg.num_layers)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets).mean()


# AdamW (arXiv 1711.05101) at a learning rate of 1, which `train_step` scales; matrices alone decay.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(1.0, b1=0.9, b2=0.98, weight_decay=0.1, mask=partial(jax.tree.map, lambda p: p.ndim > 1)),
)


@partial(jax.jit, static_argnames="graph", donate_argnames="state")
def train_step(graph: nnx.GraphDef, state: TrainState, rows: Array, rate: Array) -> tuple[TrainState, Array]:
    """The state after one update, and the loss before it; `state` is donated."""
    loss, grads = jax.value_and_grad(lambda p: mean_loss(nnx.merge(graph, p), rows))(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32 and raises floats to them
        updates, moments = OPTIMIZER.update(grads, state.moments, state.params)
    params = jax.tree.map(lambda p, update: p + rate * update, state.params, updates)
    return TrainState(params, moments), loss


def train(model: llama.Model, tokens: np.ndarray, options: argparse.Namespace) -> tuple[nnx.State, list[float]]:
    """Trains until time or steps are up, the last tenth on rows of `MAX_LEN`, so that all positions are seen."""
    graph, params = nnx.split(model)
    state = TrainState(params, OPTIMIZER.init(params))
    rng = np.random.default_rng(options.seed)
    short = batches(tokens, options.batch, options.seq_len, rng)
    long = batches(tokens, max(1, options.batch * options.seq_len // MAX_LEN), MAX_LEN, rng)
    start = logged = time.monotonic()
    losses, num_tokens, progress = [], 0, 0.0
    while progress < 1:
        rows = next(short if progress < 0.9 else long)
        share = min(1.0, progress / 0.02) * (1 + math.cos(math.pi * progress)) / 2  # warm-up, cosine to zero
        state, loss = train_step(graph, state, rows, np.float32(options.lr * share))
        losses.append(float(loss))
        num_tokens += rows[:, 1:].size
        seconds = time.monotonic() - start
        progress = max(seconds / (60 * options.minutes), len(losses) / (options.steps or math.inf))
        if time.monotonic() - logged > 10 or progress >= 1:
            logged, recent = time.monotonic(), np.mean(losses[-50:])
            log(f"{progress:4.0%}  step {len(losses)}  loss {recent:.3f}  {num_tokens / seconds:.0f} tokens/s")
    log(f"trained on {num_tokens} tokens ({num_tokens / len(tokens):.1f} epochs) in {seconds / 60:.1f} minutes")
    return state.params, losses


def heldout_loss(model: llama.Model, tokens: np.ndarray) -> float:
    """Nats per token, in rows of at most `MAX_LEN`."""
    loss = nnx.jit(mean_loss)
    seq_len = min(MAX_LEN, len(tokens) - 1)
    starts = range(0, len(tokens) - seq_len, seq_len)
    return sum(float(loss(model, tokens[None, i : i + seq_len + 1])) for i in starts) / len(starts)


def hf_tensors(model: llama.Model) -> dict[str, jax.Array]:
    """bfloat16 tensors under their Hugging Face names: what `llama.WEIGHTS` says of loading, backwards."""
    params = {".".join(map(str, path)): var[...] for path, var in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors = {}
    for name, weight in llama.WEIGHTS.items():
        if name == "lm_head.weight" and model.cfg.tie_embeddings:
            continue
        theirs, ours = weight.axes.split(" -> ")
        for i in range(model.cfg.num_layers if "{i}" in name else 1):
            value = params[weight.path.format(i=i)]
            if weight.part is not None:
                axis, begin, end = weight.part
                value = value[(slice(None),) * axis + (slice(begin, end),)]
            tensors[name.format(i=i)] = rearrange(value.astype(jnp.bfloat16), f"{ours} -> {theirs}")
    return tensors


def export(out: Path, model: llama.Model, config: dict, tokenizer: Tokenizer) -> None:
    """Writes the directory that transformers would write."""
    out.mkdir(parents=True, exist_ok=True)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    text = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "clean_up_tokenization_spaces": False, "model_max_length": MAX_LEN,
    }  # fmt: skip
    for kind, value in {"config": config, "generation_config": generation, "tokenizer_config": text}.items():
        (out / f"{kind}.json").write_text(json.dumps(value, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "model.safetensors").write_bytes(save(hf_tensors(model), metadata={"format": "pt"}))
    num_bytes = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    assert num_bytes <= MAX_BYTES, f"{out} holds {num_bytes} bytes, more than {MAX_BYTES}; take smaller sizes"
    log(f"wrote {out} ({num_bytes / 1e6:.2f} MB)")


def main(argv: list[str] | None = None) -> Report:
    options = parse_options(argv)
    train_texts, heldout_texts = read_source(options.source, options.holdout)
    tokenizer = train_tokenizer(train_texts, options.vocab)
    tokens, heldout = encode(tokenizer, train_texts), encode(tokenizer, heldout_texts)
    heldout_bytes = sum(len(text.encode()) for text in heldout_texts)
    log(f"{len(tokens)} tokens to train on, {len(heldout)} held out ({heldout_bytes / len(heldout):.2f} bytes each)")

    config = hf_config(options, tokenizer)
    model = llama.Model(llama.Config.from_hf(config), rngs=nnx.Rngs(params=options.seed))
    params, losses = train(model, tokens, options)
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params))
    loss = heldout_loss(model, heldout)
    bits_per_byte = loss / math.log(2) * len(heldout) / heldout_bytes
    log(f"held out, as rounded to bfloat16: {loss:.4f} nats per token, {bits_per_byte:.4f} bits per byte")
    export(options.out, model, config, tokenizer)
    return Report(losses, loss, bits_per_byte)


if __name__ == "__main__":
    main()
