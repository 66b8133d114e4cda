"""Native CPU kernels against XLA's: milliseconds of each op and their ratio, measured in turns in one run. Products
stand beside those of torch too, if it is installed (oneDNN in bfloat16, MKL in float32), and a floor: what this machine
takes to read their weights, or to multiply and add. What products with quantised weights are compared with is XLA's
with a dense one.

PYTHONPATH=. python benchmarks/native.py
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels import native, quantized_matmul
from jaxllm.pallas_kernels.matmul import einsum
from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape, ragged_paged_attention

LAYERS, EMBED, MLP, VOCAB, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 512, 1536, 8192, 8, 4, 64, 32
SHAPES = [
    (EMBED, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    (HEADS * HEAD_DIM, EMBED),
    (EMBED, 2 * MLP),
    (MLP, EMBED),
]  # a layer
NUM_WEIGHTS = {"products": LAYERS * sum(k * n for k, n in SHAPES) + EMBED * VOCAB, "head": EMBED * VOCAB}
DEPTH, COLUMNS = 2048, 8192
IN_CACHE = (384, 512, 512)  # rows, inputs and outputs of the product that shows what the processor can do
QUANTIZED = {  # dtype of codes, inputs of a group
    "int8 by output": ("int8", None),
    "int8 by group": ("int8", 128),
    "int4 by output": ("int4", None),
    "int4 by group": ("int4", 32),
    "float8 by output": ("float8_e4m3fn", None),
    "float8 by group": ("float8_e4m3fn", 128),
    "float4 by group": ("float4_e2m1fn", 32),
}
ATTENTION = {  # tokens of each row, tokens that it has then
    "16 decodes of 30-90": ([1] * 16, range(30, 94, 4)),
    "64 decodes of 100-856": ([1] * 64, range(100, 868, 12)),
    "4 decodes of 2000": ([1] * 4, [2000] * 4),
    "prompt of 512": ([512], [512]),
    "chunk of 256 after 1024": ([256], [1280]),
    "8 prompts of 40": ([40] * 8, [40] * 8),
}


def products(dtype: jnp.dtype, rows: int, implementation: str) -> Callable[[], object]:
    """All products of a step of a model of 33 million parameters."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype)

    layers, head = [[weight(*shape) for shape in SHAPES] for _ in range(LAYERS)], weight(EMBED, VOCAB)
    product = partial(einsum, "...d,dn->...n", implementation=implementation)

    @jax.jit
    def run(x, layers, head):
        for qkv, o, gate_up, down in layers:
            x = jnp.tanh(x + product(product(x, qkv)[:, : HEADS * HEAD_DIM], o))
            x = jnp.tanh(x + product(product(x, gate_up)[:, :MLP], down))
        return product(x, head)

    return partial(run, weight(rows, EMBED), layers, head)


def head(dtype: jnp.dtype, rows: int, implementation: str) -> Callable[[], object]:
    """Logits from a tied embedding."""
    rng = np.random.default_rng(0)
    x, table = (jnp.asarray(rng.normal(size=(n, EMBED)), dtype) for n in (rows, VOCAB))
    return partial(jax.jit(partial(einsum, "...d,vd->...v", implementation=implementation)), x, table)


def of_torch(name: str, dtype: str, rows: int) -> Callable[[], object]:
    """The same products by torch."""
    import torch

    def random(*shape: int) -> Any:
        return torch.randn(shape, dtype=getattr(torch, dtype))

    if name == "head":
        x, table = random(rows, EMBED), random(VOCAB, EMBED)
        return lambda: x @ table.T
    layers, last = [[random(*shape) for shape in SHAPES] for _ in range(LAYERS)], random(EMBED, VOCAB)
    first = random(rows, EMBED)

    def run() -> object:
        x = first
        for qkv, o, gate_up, down in layers:
            x = torch.tanh(x + (x @ qkv)[:, : HEADS * HEAD_DIM] @ o)
            x = torch.tanh(x + (x @ gate_up)[:, :MLP] @ down)
        return x @ last

    return run


class Machine(NamedTuple):
    """The most that it was seen to do a second."""

    bytes: float  # read from memory
    operations: float  # additions and multiplications of products in the cache

    @classmethod
    def measured(cls, dtype: str) -> "Machine":
        rows, depth, columns = IN_CACHE
        x, w, much = jnp.ones((rows, depth), dtype), jnp.ones((depth, columns), dtype), jnp.ones(2**26, jnp.float32)
        multiply = jax.jit(partial(einsum, "...d,dn->...n", implementation="native"))
        seconds = [
            min(_seconds(run) for _ in range(30)) for run in (partial(jax.jit(jnp.sum), much), partial(multiply, x, w))
        ]
        return cls(much.nbytes / seconds[0], 2 * rows * depth * columns / seconds[1])

    def floor_ms(self, name: str, rows: int, dtype: str) -> float:
        numbers = NUM_WEIGHTS[name]
        return max(numbers * jnp.dtype(dtype).itemsize / self.bytes, 2 * rows * numbers / self.operations) * 1e3


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def quantized(dtype: jnp.dtype, rows: int, form: str | None) -> Callable[[], object]:
    """One large product; with a dense weight if `form` is None."""
    rng = np.random.default_rng(0)
    x, dense = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, DEPTH), (DEPTH, COLUMNS)))
    if form is None:
        return partial(jax.jit(partial(einsum, "...d,dn->...n", implementation="reference")), x, dense)
    codes, group = QUANTIZED[form]
    if group is None:
        values, scales = dense.T, (COLUMNS,)
    else:
        values, scales = dense.reshape(-1, group, COLUMNS), (DEPTH // group, 1, COLUMNS)
    weight = quantized_matmul.QuantizedWeight(values.astype(codes), jnp.ones(scales, jnp.float32))
    product = partial(quantized_matmul.product, num_inputs=1, implementation="native")
    return partial(jax.jit(product), x, weight)


def attention(dtype: jnp.dtype, case: str, implementation: str) -> Callable[[], object]:
    q_lens, kv_lens = (list(x) for x in ATTENTION[case])
    rng, tokens, per_seq = np.random.default_rng(0), sum(q_lens), -(-max(kv_lens) // BLOCK_SIZE)
    tables = rng.permutation(len(q_lens) * per_seq).reshape(len(q_lens), per_seq)
    q, k, v = (jnp.asarray(rng.normal(size=(tokens, n, HEAD_DIM)), dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    shape = kv_shape(tables.size, BLOCK_SIZE, KV_HEADS, HEAD_DIM, platform="cpu")
    pool = jnp.asarray(rng.normal(size=shape), dtype)
    num_decodes = len(q_lens) if max(q_lens) == 1 else 0
    ints = (tables, np.cumsum([0, *q_lens]), kv_lens, [num_decodes, len(q_lens)])
    batch = PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))
    op = partial(ragged_paged_attention, implementation=implementation, scale=HEAD_DIM**-0.5)
    step = jax.jit(op, donate_argnums=3)

    def run() -> jax.Array:
        nonlocal pool
        out, pool = step(q, k, v, pool, batch)
        return out

    return run


def compare(name: str, runs: list[Callable[[], object]], repeats: int, *more: float) -> None:
    """Ours, XLA's and others' in turns; `more` are columns behind."""
    seconds = np.array([[_seconds(run) for run in runs] for _ in range(repeats + 1)])[1:]
    medians, best = np.median(seconds, axis=0) * 1e3, np.min(seconds, axis=0)
    numbers = [*medians[:2], medians[1] / medians[0], best[1] / best[0], *medians[2:], *more]
    print(f"{name:45}" + "".join(f" {number:8.3f}" for number in numbers), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", default="products quantized attention", help="which of these kinds")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    if not native.is_built():
        raise SystemExit("the native kernels are not built: python -m jaxllm.pallas_kernels.native.build")
    print(f"JAX {jax.__version__}, {args.dtype}, {native.instruction_set()}")
    has_torch = importlib.util.find_spec("torch") is not None
    more = ["torch"] * has_torch + ["floor"]
    print(f"{'median ms':45}" + "".join(f" {name:>8}" for name in ("native", "XLA", "ratio", "of best", *more)))
    if "products" in args.only:
        machine = Machine.measured(args.dtype)
        print(f"this machine: {machine.bytes / 1e9:.0f} GB/s, {machine.operations / 1e9:.0f} GFLOP/s")
        for rows in (1, 2, 4, 8, 16, 32, 64, 256, 512):
            for op in (products, head):
                runs = [op(args.dtype, rows, name) for name in ("native", "reference")]
                runs += [of_torch(op.__name__, args.dtype, rows)] * has_torch
                compare(
                    f"{op.__name__}, {rows} rows", runs, args.repeats, machine.floor_ms(op.__name__, rows, args.dtype)
                )
    if "quantized" in args.only:
        for rows in (1, 4, 16, 64):
            for form in QUANTIZED:
                ours, theirs = (quantized(args.dtype, rows, name) for name in (form, None))
                compare(f"{form}, {rows} rows", [ours, theirs], args.repeats)
    if "attention" in args.only:
        for case in ATTENTION:
            ours, theirs = (attention(args.dtype, case, name) for name in ("native", "cpu"))
            compare(f"attention of a layer, {case}", [ours, theirs], args.repeats)


if __name__ == "__main__":
    main()
