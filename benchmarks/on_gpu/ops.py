"""The other ops on the device, as the engine calls them: sampling, products with weights, moves of blocks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import WrongResultError
from benchmarks.on_gpu.checks import Checks, compile_all
from benchmarks.on_gpu.child import Recorder
from benchmarks.on_gpu.draws import FILTERS, check_draws, columns_of
from jaxllm.engine.device import block_moves
from jaxllm.pallas_kernels import matmul, sampling
from jaxllm.pallas_kernels.dispatch import Placement

VOCABS, ROWS, NUM_BEST = (151936, 32000), (1, 8, 64), (20, 64)
SMALL_VOCABS, SMALL_ROWS, SMALL_NUM_BEST = (301,), (8,), (20,)
SCALES = {"peaked": 3.0, "nearly flat": 0.01, "many ties": 0.0}  # of normal logits; the last are rounded
# Columns of x, columns of the result, whether the weight is transposed: of an 8B model's layer, and of a head.
WEIGHTS = {"qkv": (4096, 6144, False), "down": (14336, 4096, False), "head": (4096, 32000, True)}
SMALL_WEIGHTS = {"qkv": (64, 96, False)}
MATMUL_ROWS = (1, 8, 64, 256)
MATMUL_TOLERANCE = 1e-2  # of the result's norm: bfloat16 has eight bits
NORMALIZER_TOLERANCE = 1e-5  # relative: XLA sums up 150,000 exponentials in float32
POOL, MOVES = (64, 2, 8, 32, 128), 16


def run(record: Recorder, small: bool) -> str:
    checks = Checks(record)
    vocabs, rows = (SMALL_VOCABS, SMALL_ROWS) if small else (VOCABS, ROWS)
    for vocab in vocabs:
        check_sampling(checks, vocab, rows, SMALL_NUM_BEST if small else NUM_BEST)
    for name, (depth, columns, transposed) in (SMALL_WEIGHTS if small else WEIGHTS).items():
        checks.run(f"product {name}", partial(check_matmul, depth, columns, transposed, rows if small else MATMUL_ROWS))
    for dtype in ("int8",) if small else ("bfloat16", "float32", "int8"):
        checks.run(f"moves of {dtype} blocks", partial(check_moves, dtype))
    return checks.summary()


def check_sampling(checks: Checks, vocab: int, rows: tuple[int, ...], num_best: tuple[int, ...]) -> None:
    placement, shape = Placement.default(), jax.ShapeDtypeStruct
    lowerings: dict[str, Any] = {}
    for n in rows:
        logits = shape((n, vocab), jnp.float32)
        columns = [shape((n,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
        draw = jax.jit(partial(sampling.draw, placement=placement))
        lowerings[f"draw {n}x{vocab}"] = partial(draw.lower, logits, *columns, shape((n, 2), jnp.uint32))
    for k in num_best:
        best = jax.jit(partial(sampling.best, k=k, placement=placement))
        logits, given = shape((rows[-1], vocab), jnp.float32), shape((rows[-1], 2), jnp.int32)
        lowerings[f"best {k} of {vocab}"] = partial(best.lower, logits, logits, tokens=given)
    waits = compile_all(lowerings)
    for n in rows:
        checks.run(f"draw {n}x{vocab}", partial(check_draw, waits[f"draw {n}x{vocab}"], n, vocab))
    for k in num_best:
        checks.run(f"best {k} of {vocab}", partial(check_best, waits[f"best {k} of {vocab}"], rows[-1], vocab, k))
    checks.run(f"normalize {vocab}", partial(check_normalize, rows[-1], vocab))


def make_logits(rows: int, vocab: int, kind: str, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32)
    return np.round(logits * 3) + np.float32(0) if kind == "many ties" else logits * np.float32(SCALES[kind])


def check_draw(wait: Any, rows: int, vocab: int) -> dict[str, Any]:
    """Draws of every kind of logits and filters; counts those where rounding decided."""
    compiled, close = wait(), 0
    for seed, kind in enumerate(SCALES):
        logits = make_logits(rows, vocab, kind, seed)
        for filters in FILTERS:
            columns = columns_of(filters, rows)
            keys = np.random.default_rng(seed).integers(0, 2**32, size=(rows, 2), dtype=np.uint32)
            drawn = compiled(logits, *columns, keys)
            again = compiled(logits, *columns, keys)
            if not np.array_equal(drawn.tokens, again.tokens):
                raise WrongResultError(f"{kind} logits, {filters}: the same keys drew other tokens")
            close += check_draws(np.asarray(drawn.tokens), logits, columns, keys)
    return {"own_kernel": "jaxllm_draw" in compiled.as_text(), "draws_by_rounding": close}


def check_best(wait: Any, rows: int, vocab: int, k: int) -> dict[str, Any]:
    compiled = wait()
    for seed, kind in enumerate(SCALES):
        scores, logits = make_logits(rows, vocab, kind, seed), make_logits(rows, vocab, "peaked", seed + 1)
        tokens = np.random.default_rng(seed).integers(0, vocab, size=(rows, 2)).astype(np.int32)
        want = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        for among in (scores, logits):  # bias and penalties on top of the logits, and the logits themselves
            found = jax.tree.map(np.asarray, compiled(scores, among, tokens=tokens))
            own = np.take_along_axis(among, np.concatenate([want, tokens], axis=1), axis=1)
            larger = [(row[None] > ours[:, None]).sum(axis=1) for row, ours in zip(among, own, strict=True)]
            np.testing.assert_array_equal(found.ids, want, err_msg=f"{kind}: tokens")
            np.testing.assert_array_equal(found.logits, own, err_msg=f"{kind}: logits")
            np.testing.assert_array_equal(found.ranks, 1 + np.stack(larger), err_msg=f"{kind}: ranks")
    return {"own_kernel": "jaxllm_best" in compiled.as_text()}


def check_normalize(rows: int, vocab: int) -> dict[str, Any]:
    run, errors = jax.jit(partial(sampling.normalize, placement=Placement.default())), []
    for kind in SCALES:
        logits = make_logits(rows, vocab, kind)
        found, exact = run(logits), np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
        np.testing.assert_array_equal(found.top, logits.max(axis=1))
        errors.append(float(np.abs(np.asarray(found.normalizer) / exact - 1).max()))
    if not max(errors) <= NORMALIZER_TOLERANCE:
        raise WrongResultError(f"normalizers differ by {max(errors):.1e}, more than {NORMALIZER_TOLERANCE:.0e}")
    return {"error": max(errors)}


def check_matmul(depth: int, columns: int, transposed: bool, rows: tuple[int, ...]) -> dict[str, Any]:
    """Products of bfloat16 against float32 ones on the host, as large as an 8B model's: the compiler's pick."""
    rng, errors, placement = np.random.default_rng(0), {}, Placement.default()
    weight = rng.normal(size=(columns, depth) if transposed else (depth, columns)).astype(np.float32)
    placed = jnp.asarray(weight, jnp.bfloat16)
    exact = np.asarray(placed.astype(jnp.float32))
    equation = "...C,OC->...O" if transposed else "...C,CO->...O"
    multiply = jax.jit(partial(matmul.einsum, equation, placement=placement))
    for n in rows:
        x = jnp.asarray(rng.normal(size=(n, depth)), jnp.bfloat16)
        want = np.asarray(x.astype(jnp.float32)) @ (exact.T if transposed else exact)
        got = np.asarray(multiply(x, placed).astype(jnp.float32))
        errors[n] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not max(errors.values()) <= MATMUL_TOLERANCE:
        raise WrongResultError(f"products differ by {errors} of their norm, by rows; {MATMUL_TOLERANCE:.0e} is allowed")
    return {"error": max(errors.values())}


def check_moves(dtype: str) -> dict[str, Any]:
    """Copies within pools, out of them and back, bit by bit."""
    rng, placement = np.random.default_rng(0), Placement.default()
    before = [rng.integers(-100, 100, POOL).astype(jnp.dtype(dtype)) for _ in range(2)]
    targets, sources = rng.permutation(POOL[0])[:MOVES], rng.integers(0, POOL[0], MOVES)
    moves = POOL[0] + np.tile(np.arange(2 * MOVES, dtype=np.int32), (2, 1))  # half of them is padding
    moves[:, :MOVES] = sources, targets
    copied = jax.jit(partial(block_moves.copy_blocks, placement=placement), donate_argnums=0)(
        [jnp.asarray(pool) for pool in before], moves
    )
    (contents,) = map(np.asarray, jax.jit(block_moves.read_blocks)(copied, targets.astype(np.int32)))  # of both pools
    empty = [jnp.zeros(POOL, dtype) for _ in before]
    back = jax.jit(block_moves.write_blocks, donate_argnums=0)(empty, targets.astype(np.int32), [contents])
    for i, pool in enumerate(before):
        want, written = pool.copy(), np.zeros_like(pool)
        want[targets] = pool[sources]
        written[targets] = want[targets]
        for got, expected in ((copied[i], want), (contents[i], want[targets]), (back[i], written)):
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), expected.astype(np.float32))
    return {"blocks": MOVES}
