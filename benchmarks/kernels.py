"""The platform's attention kernel on the device that is here: checked against the reference, then timed.

Decodes are reported as bytes moved over the bandwidth of a large copy measured in the same run, prompts as TFLOP/s.

    PYTHONPATH=. python benchmarks/kernels.py [--quick] [--only check decode prefill]
"""

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import PagedBatch, api, kv_shape

DECODE_BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 4096, 8192, 32768)
PROMPTS = (1024, 2048, 4096, 8192, 16384, 32768)
QUICK_BATCHES, QUICK_CONTEXTS, QUICK_PROMPTS = (1, 4), (128, 256), (64, 128)
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
COPY_BYTES, QUICK_COPY_BYTES = 2**32, 2**24
MOST_POOL_FRACTION = 0.6  # of the device's memory


class WrongResultError(Exception):
    """Something that the device computed is not what it should be."""


class Model(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Of a token's K and V."""
        return 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


class Timing(NamedTuple):
    calls: int  # between two readings of the clock
    repeats: int


def arguments(model: Model, q_lens: list[int], kv_lens: list[int], seed: int = 0) -> list[Any]:
    """Of the op: sequences of these lengths whose blocks are shuffled, random numbers everywhere."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed, impl="rbg")  # which compiles fast
    blocks = [-(-kv_len // model.block_size) for kv_len in kv_lens]
    ids = rng.permutation(sum(blocks))
    tables = np.zeros((len(kv_lens), max(blocks)), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(blocks), blocks, strict=True)):
        tables[row, :count] = ids[end - count : end]
    shapes: list[tuple[int, ...]] = [
        (sum(q_lens), n, model.head_dim) for n in (model.heads, model.kv_heads, model.kv_heads)
    ]
    platform = jax.devices()[0].platform
    shapes.append(kv_shape(sum(blocks), model.block_size, model.kv_heads, model.head_dim, platform=platform))
    normal = jax.jit(partial(jax.random.normal, dtype=model.dtype), static_argnums=1)
    floats = [normal(k, shape) for k, shape in zip(jax.random.split(key, 4), shapes, strict=True)]
    decodes = next((i for i, q_len in enumerate(q_lens) if q_len > 1), len(q_lens))
    ints = (tables, np.cumsum([0, *q_lens]), kv_lens, [decodes, len(q_lens)])
    return [*floats, PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))]


def check(model: Model, implementation: str, q_lens: list[int], kv_lens: list[int], **options: Any) -> float:
    """The largest difference to the reference in float32, of outputs. Raises `WrongResultError` unless the pools are
    equal."""
    given = arguments(model, q_lens, kv_lens)
    exact = [*(x.astype(jnp.float32) for x in given[:4]), given[4]]
    call = partial(api.ragged_paged_attention, scale=model.head_dim**-0.5, **options)
    with jax.default_matmul_precision("highest"):
        want, want_pool = jax.jit(partial(call, implementation="reference"))(*exact)
    out, pool = jax.jit(partial(call, implementation=implementation))(*given)
    if not bool(jnp.array_equal(pool.astype(jnp.float32), want_pool)):
        raise WrongResultError(
            f"{implementation} wrote another pool than the reference: {q_lens} of {kv_lens}, {options}"
        )
    return float(jnp.max(jnp.abs(out.astype(jnp.float32) - want)))


def seconds(run: Callable[[], Any], timing: Timing) -> float:
    """Of a call, the median of several readings over many calls each; the first calls, untimed, warm it up."""
    for _ in range(3):
        jax.block_until_ready(run())
    readings = []
    for _ in range(timing.repeats):
        start = time.perf_counter()
        for _ in range(timing.calls):
            last = run()
        jax.block_until_ready(last)
        readings.append((time.perf_counter() - start) / timing.calls)
    return float(np.median(readings))


def op_seconds(model: Model, implementation: str, q_lens: list[int], kv_lens: list[int], timing: Timing) -> float:
    """Several layers are one executable, each with queries that the last one's result goes into, so that what it takes
    to start one is shared: as in a model."""
    *qkv, pool, batch = arguments(model, q_lens, kv_lens)
    call = partial(api.ragged_paged_attention, implementation=implementation, scale=model.head_dim**-0.5)
    layers = 8 if timing.calls > 1 else 1

    @partial(jax.jit, donate_argnums=0)
    def run(pool, q, k, v, batch):
        for _ in range(layers):
            q, pool = call(q, k, v, pool, batch)
        return pool, q

    def step():
        nonlocal pool
        pool, out = run(pool, *qkv, batch)
        return out

    return seconds(step, timing) / layers


def copy_bandwidth(num_bytes: int, timing: Timing) -> float:
    """Bytes read and written a second by a copy."""
    source = jnp.ones(num_bytes // 4, jnp.float32)
    negate = jax.jit(jnp.negative)
    return 2 * num_bytes / seconds(lambda: negate(source), timing)


def bytes_of_decode(model: Model, implementation: str, q_lens: list[int], kv_lens: list[int]) -> int:
    """What the kernel says that it moves; the keys alone if it does not say."""
    module = importlib.import_module(f"{api.__package__}.{implementation}")
    if not hasattr(module, "bytes_moved"):
        return sum(kv_lens) * model.token_bytes
    itemsize = jnp.dtype(model.dtype).itemsize
    return module.bytes_moved(
        q_lens,
        kv_lens,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=model.block_size,
        itemsize=itemsize,
    )


def run_checks(model: Model, implementation: str, quick: bool) -> None:
    scale = 1 if quick else 8
    cases = {
        "decodes": ([1] * 5, [scale * n for n in (1, 17, 64, 65, 130)], {}),
        "chunks after a prefix": ([scale * n for n in (9, 20, 5)], [scale * n for n in (9, 90, 37)], {}),
        "decodes and chunks": ([1, 1, scale * 24], [scale * 40, 3, scale * 70], {}),
        "window and cap": ([1, scale * 24], [scale * 40, scale * 70], {"sliding_window": 21 * scale, "soft_cap": 3.0}),
    }
    print(f"{'largest difference to the reference':45} {model.dtype:>10}")
    for name, (q_lens, kv_lens, options) in cases.items():
        error = check(model, implementation, q_lens, kv_lens, **options)
        print(f"{name:45} {error:10.2e}", flush=True)
        if not error <= TOLERANCE[model.dtype]:
            raise WrongResultError(f"{implementation} is wrong: {error:.2e} is more than {TOLERANCE[model.dtype]:.0e}")


def run_decodes(model: Model, implementation: str, quick: bool, timing: Timing, most_bytes: float) -> None:
    bandwidth = copy_bandwidth(QUICK_COPY_BYTES if quick else COPY_BYTES, timing)
    print(f"copy: {bandwidth / 1e12:.3f} TB/s read and written")
    print(f"{'decode: batch x context':45} {'µs':>10} {'MB':>10} {'TB/s':>8} {'of copy':>8}")
    for batch in QUICK_BATCHES if quick else DECODE_BATCHES:
        for context in QUICK_CONTEXTS if quick else CONTEXTS:
            lens = [1] * batch, [context] * batch
            if batch * context * model.token_bytes > most_bytes:
                print(f"{batch:4} x {context:<38} more than the memory here holds")
                continue
            taken = op_seconds(model, implementation, *lens, timing)
            moved = bytes_of_decode(model, implementation, *lens)
            rate = moved / taken
            print(
                f"{batch:4} x {context:<38} {taken * 1e6:10.1f} {moved / 1e6:10.1f} {rate / 1e12:8.3f} "
                f"{rate / bandwidth:8.2f}",
                flush=True,
            )


def run_prompts(model: Model, implementation: str, quick: bool, timing: Timing, most_bytes: float) -> None:
    print(f"{'causal prompt of one sequence':45} {'µs':>10} {'TFLOP/s':>10}")
    for length in QUICK_PROMPTS if quick else PROMPTS:
        if length * model.token_bytes > most_bytes:
            continue
        taken = op_seconds(model, implementation, [length], [length], timing)
        flops = 4 * model.heads * model.head_dim * length * (length + 1) / 2
        print(f"{length:<45} {taken * 1e6:10.1f} {flops / taken / 1e12:10.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats: for a CPU")
    parts = ["check", "decode", "prefill"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--implementation", choices=sorted(api.OP.implementations), help="default: the platform's")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument("--calls", type=int, help="between two readings of the clock")
    parser.add_argument("--repeats", type=int, help="readings, of which the median is reported")
    args = parser.parse_args()
    model = Model(args.heads, args.kv_heads, args.head_dim, args.block_size, args.dtype)
    timing = Timing(args.calls or (1 if args.quick else 20), args.repeats or (3 if args.quick else 7))

    device, some = jax.devices()[0], arguments(model, [1], [16])
    implementation = args.implementation or api.OP.preferred_at(Placement.default(), *some, scale=1.0)
    limit = (device.memory_stats() or {}).get("bytes_limit", 2**32)
    print(f"{device.device_kind} ({device.platform}), JAX {jax.__version__}, implementation {implementation}")
    print(f"{model}; medians of {timing.repeats} readings of {timing.calls} calls after 3 to warm up")
    print("What fits the caches is in them.")
    if device.platform == "cpu":
        print("No accelerator here: these are numbers of the CPU.")
    if "check" in args.only:
        run_checks(model, implementation, args.quick)
    if "decode" in args.only:
        run_decodes(model, implementation, args.quick, timing, MOST_POOL_FRACTION * limit)
    if "prefill" in args.only:
        run_prompts(model, implementation, args.quick, timing, MOST_POOL_FRACTION * limit)


if __name__ == "__main__":
    main()
