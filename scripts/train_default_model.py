"""Trains the small model that the package ships, on the Python source of the standard library and of packages.

From end to end: source files and requests for the functions in them, a byte-level BPE tokenizer,
`jaxllm.models.llama` in float32 under Muon or AdamW, a directory in Hugging Face format. A run ends on time, with
the learning rate at zero, on any machine. The shipped model took four runs, each from the one before it:

    python -m scripts.train_default_model --out A --minutes 65 --optimizer adamw --lr 4e-3 --layers 4 --batch 4 --chat 0
    python -m scripts.train_default_model --out B --minutes 61 --start A --source $SOURCES  # stopped after 30
    python -m scripts.train_default_model --out C --minutes 28 --start B --source $SOURCES \\
        --lr 2.1e-3 --batch 8 --seq-len 512 --seed 1
    python -m scripts.train_default_model --out D --minutes 22 --start C --source $SOURCES \\
        --lr 1.5e-3 --batch 8 --seq-len 512 --seed 2 --definitions 0.15

    SOURCES="stdlib networkx rich click typer anyio jinja2 _pytest packaging fsspec absl pip flax einops
        sortedcontainers psutil filelock optax:0.5 pydantic:0.6 numpy:0.5 huggingface_hub:0.3 jax:0.15 torch:0.03
        transformers:0.02"

(The first of them with a cosine schedule.) A tenth of the time goes into fresh memory unless glibc keeps it:

    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592
"""

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.models import llama
from jaxllm.models.context import StepContext
from jaxllm.models.transformer import Params
from jaxllm.sharding.mesh import make_mesh
from scripts.cpu_ops import BlockedDense, tied_cross_entropy
from scripts.hf_export import BOS, EOS, MAX_LEN, export, hf_config
from scripts.training_data import ASSISTANT, USER, choose_chat, choose_definitions, read_sources

log = partial(print, file=sys.stderr, flush=True)

SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT]
OPTIMIZERS = ("muon", "adamw")
SAVE_S = 600.0  # between exports while training
# A word keeps one character before it (" x", ".x", "_x"), each digit stands alone, indentation is one piece.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Report(NamedTuple):
    losses: list[float]  # training loss of each step, nats per token
    heldout_loss: float  # nats per token
    bits_per_byte: float  # on the held-out files


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: Params
    moments: optax.OptState


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write")
    add(
        "--source",
        nargs="+",
        default=["stdlib"],
        metavar="NAME[:SHARE]",
        help='"stdlib", installed packages or folders, each with how often its files are repeated',
    )
    add("--start", type=Path, help="model directory to go on from; layers that it lacks begin as identities")
    add("--holdout", type=float, default=0.02, help="share of the files kept for validation")
    add("--chat", type=float, default=0.12, help="share of the text that is requests and answers")
    add("--definitions", type=float, default=0.0, help="share of the text that is functions and classes on their own")
    add("--minutes", type=float, default=60.0, help="time to train for")
    add("--steps", type=int, default=None, help="stop after this many steps, if that is sooner")
    add("--optimizer", choices=OPTIMIZERS, default="muon")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--batch", type=int, default=16, help="rows a step, of --seq-len tokens each")
    sizes = {"seq-len": 256, "vocab": 4096, "layers": 6, "embed": 192, "heads": 4, "kv-heads": 2, "head-dim": 64}
    for name, default in (sizes | {"mlp": 512, "seed": 0}).items():
        add(f"--{name}", type=int, default=default)
    return parser.parse_args(argv)


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


def batches(tokens: np.ndarray, batch: int, seq_len: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless `[batch, seq_len + 1]`: each epoch cuts the tokens elsewhere and shuffles the rows."""
    if (num_rows := len(tokens) // seq_len - 1) < batch:
        raise ValueError(f"{len(tokens)} tokens are too few for {batch} rows of {seq_len}; take a larger --source")
    while True:
        starts = rng.integers(seq_len) + seq_len * rng.permutation(num_rows)
        for i in range(0, num_rows - batch + 1, batch):
            yield np.stack([tokens[start : start + seq_len + 1] for start in starts[i : i + batch]])


def start_from(model_dir: Path, model: llama.Model) -> None:
    """Puts the parameters in `model_dir` into `model`, whose further layers then change nothing."""
    spec = read_config(model_dir, jnp.float32)
    loaded = load_params(open_checkpoint(model_dir), spec, abstract_params(spec), make_mesh(None))
    values = {path: np.asarray(var[...]) for path, var in nnx.to_flat_state(loaded)}
    for path, var in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = values.get(path, jnp.zeros_like(var[...]) if path[-2] in ("o", "down") else var[...])
        if value.shape != var[...].shape:
            raise ValueError(f"{path} is {value.shape} in {model_dir} and {var[...].shape} here; give its sizes")
        values[path] = jnp.asarray(value)
    nnx.update(model, nnx.from_flat_state([(path, nnx.Param(value)) for path, value in values.items()]))


def mean_loss(model: llama.Model, rows: Int[Array, "batch len_plus_1"]) -> Float[Array, ""]:
    """Cross-entropy of each row's next tokens, nats per token."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    hidden, _ = model(inputs, StepContext.of(inputs), [BlockedDense()] * model.cfg.num_layers)
    return tied_cross_entropy(hidden.reshape(-1, model.cfg.embed), model.embed.weight[...], targets.reshape(-1))


def matrices(params: Any) -> Any:
    """Which axes of each leaf Muon orthogonalises: those of products inside layers; None leaves the leaf to Adam."""

    def axes(path: tuple, leaf: Array) -> MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path)
        if "layers" not in names or leaf.ndim < 2:
            return None
        inputs = leaf.ndim - 1 if "'o'" in names else 1  # `o` has its output last, all others their input first
        return MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(axes, params)


def optimizer(kind: str) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101), or Muon (arXiv 2502.16982) for the layers' matrices; `train_step` scales the rate."""
    if kind == "muon":
        rule = muon(
            1.0,
            consistent_rms=0.2,
            weight_decay=0.1,
            weight_decay_mask=matrix_mask,
            adam_b1=0.9,
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        )
    else:
        rule = optax.adamw(1.0, b1=0.9, b2=0.98, weight_decay=0.1, mask=matrix_mask)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


matrix_mask = partial(jax.tree.map, lambda p: p.ndim > 1)


@partial(jax.jit, static_argnames=("graph", "kind"), donate_argnames="state")
def train_step(graph: nnx.GraphDef, kind: str, state: TrainState, rows: Array, rate: Array) -> tuple[TrainState, Array]:
    """The state after one update, and the loss before it; `state` is donated."""
    loss, grads = jax.value_and_grad(lambda p: mean_loss(nnx.merge(graph, p), rows))(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32 and raises floats to them
        updates, moments = optimizer(kind).update(grads, state.moments, state.params)
    params = jax.tree.map(lambda p, update: p + rate * update, state.params, updates)
    return TrainState(params, moments), loss


class Progress:
    """How much of a run's time is over, 0 to 1.

    It ends at the deadline, but a step counts for no more than twice the usual, and the time left is spread over what
    remains: a process that was stopped for minutes continues where it was, a little faster.
    """

    def __init__(self, seconds: float):
        self.done, self.last = 0.0, time.monotonic()
        self.deadline = self.last + seconds
        self.recent: deque[float] = deque(maxlen=20)

    def step(self) -> None:
        now = time.monotonic()
        self.recent.append(now - self.last)
        spent = min(now - self.last, 2 * float(np.median(self.recent)))
        self.done += (1 - self.done) * min(1.0, spent / max(self.deadline - now + spent, 1e-9))
        self.last = now
        if now >= self.deadline:
            self.done = 1.0


def train(
    model: llama.Model, tokens: np.ndarray, options: argparse.Namespace, save: Callable[[Params], None]
) -> tuple[Params, list[float]]:
    """Trains until time or steps are up, the last fifth on rows of `MAX_LEN`, so that all positions are seen.

    Every `SAVE_S` seconds `save` gets the parameters.
    """
    graph, params = nnx.split(model)
    state = TrainState(params, optimizer(options.optimizer).init(params))
    rng = np.random.default_rng(options.seed)
    short = batches(tokens, options.batch, options.seq_len, rng)
    long = batches(tokens, max(1, options.batch * options.seq_len // MAX_LEN), MAX_LEN, rng)
    clock = Progress(60 * options.minutes)
    start = logged = saved = time.monotonic()
    losses, num_tokens, progress = [], 0, 0.0
    while progress < 1:
        rows = next(short if progress < 0.8 else long)
        share = min(1.0, progress / 0.02, (1 - progress) / 0.8)  # warm-up, a short plateau, linear to zero
        state, loss = train_step(graph, options.optimizer, state, rows, np.float32(options.lr * share))
        losses.append(float(loss))
        num_tokens += rows[:, 1:].size
        clock.step()
        progress = max(clock.done, len(losses) / (options.steps or math.inf))
        if clock.last - logged > 10 or progress >= 1:
            logged, seconds = clock.last, clock.last - start
            rate, recent = num_tokens / seconds, np.mean(losses[-50:])
            log(f"{progress:5.1%}  step {len(losses)}  loss {recent:.3f}  {rate:.0f} tokens/s")
        if clock.last - saved > SAVE_S:
            saved = clock.last
            save(state.params)
    log(f"trained on {num_tokens} tokens ({num_tokens / len(tokens):.1f} epochs) in {seconds / 60:.1f} minutes")
    return state.params, losses


def heldout_loss(model: llama.Model, tokenizer: Tokenizer, texts: list[str]) -> tuple[float, float]:
    """Nats a token and bits a byte, in rows of at most `MAX_LEN`."""
    tokens, num_bytes = encode(tokenizer, texts), sum(len(text.encode()) for text in texts)
    loss = nnx.jit(mean_loss)
    seq_len = min(MAX_LEN, len(tokens) - 1)
    starts = range(0, len(tokens) - seq_len, seq_len)
    nats = sum(float(loss(model, tokens[None, i : i + seq_len + 1])) for i in starts) / len(starts)
    return nats, nats / math.log(2) * len(tokens) / num_bytes


def main(argv: list[str] | None = None) -> Report:
    options = parse_options(argv)
    sources = read_sources(options.source, options.holdout)
    texts = [text for source in sources for text in source.train]
    texts += choose_chat(texts, options.chat) + choose_definitions(texts, options.definitions)
    if options.start is not None:
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(texts[::3], options.vocab)  # enough for the common words
    tokens = encode(tokenizer, texts)
    log(f"{len(tokens)} tokens to train on")

    config = hf_config(options, tokenizer)
    model = llama.Model(llama.Config.from_hf(config), rngs=nnx.Rngs(params=options.seed))
    if options.start is not None:
        start_from(options.start, model)

    def save(params: Params) -> None:
        nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params))
        export(options.out, model, config, tokenizer)

    params, losses = train(model, tokens, options, save)
    save(params)
    parts = {options.source[0]: sources[0].heldout}
    parts["the others"] = [text for source in sources[1:] for text in source.heldout]
    held = {name: heldout_loss(model, tokenizer, texts) for name, texts in parts.items() if texts}
    for name, (loss, bits) in held.items():
        log(f"held out of {name}: {loss:.4f} nats a token, {bits:.4f} bits a byte")
    return Report(losses, *held[options.source[0]])


if __name__ == "__main__":
    main()
