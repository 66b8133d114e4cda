"""Sampling. Callers import from here; only this module chooses by platform."""

import importlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.pallas_kernels import dispatch
from jaxllm.pallas_kernels.sampling import native
from jaxllm.pallas_kernels.sampling.reference import Best, Draws, Rows

IMPLEMENTATIONS = ("reference", "native", "gpu")
GPU_TOP_K = 16  # XLA sorts whole rows on a GPU for more at once


def normalize(logits: Float[Array, "rows vocab"], *, implementation: str = "auto", mesh: Mesh | None = None) -> Rows:
    """The largest logit of each row, and the log of the sum of their exponentials. See `_choose` for the options."""
    return _choose("normalize", logits, 1, implementation, mesh)(logits)


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> Draws:
    """A token for each row; see `reference.draw`, and `_choose` for the options."""
    return _choose("draw", logits, 1, implementation, mesh)(logits, temperature, top_k, top_p, min_p, keys)


def best(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    k: int,
    tokens: Int[Array, "rows tokens"] | None = None,
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> Best:
    """The k best tokens of each row, and some given ones; see `reference.best`, and `_choose` for the options."""
    if tokens is None:
        tokens = jnp.zeros((logits.shape[0], 0), jnp.int32)
    return _choose("best", logits, k, implementation, mesh)(scores, logits, tokens, k=k)


def _choose(op: str, logits: Array, k: int, implementation: str, mesh: Mesh | None) -> Callable:
    """`mesh` holds the devices that the arrays are on; None: unknown.

    XLA divides the reference's work among several devices. GPUs draw with the kernel all the same: each of several gets
    all logits, and does all the work.
    """
    if implementation == "auto":
        implementation = "reference" if mesh is None else _preferred(op, logits, k, mesh)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; have {sorted(IMPLEMENTATIONS)}")
    fn = getattr(importlib.import_module(f"jaxllm.pallas_kernels.sampling.{implementation}"), op)
    dispatch.announce(fn)
    if mesh is None or mesh.size == 1:
        return fn
    if implementation == "reference" and op == "best" and mesh.devices.flat[0].platform == "gpu":
        return partial(fn, at_once=GPU_TOP_K)
    if implementation != "gpu":
        return fn
    everywhere = PartitionSpec()
    return lambda *arrays, **options: jax.shard_map(
        partial(fn, **options), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )(*arrays)


def _preferred(op: str, logits: Array, k: int, mesh: Mesh) -> str:
    platform = mesh.devices.flat[0].platform
    if platform == "cpu" and mesh.size == 1 and native.supports(logits):
        return "native"
    # XLA does `normalize` well. It also does `best` on several GPUs: compiling the full sampler with the kernel for two
    # H200s crashes it (JAX 0.11.2).
    if platform == "gpu" and (op == "draw" or (op == "best" and mesh.size == 1)):
        gpu = importlib.import_module("jaxllm.pallas_kernels.sampling.gpu")  # here, because Pallas loads slowly
        return "gpu" if gpu.supports(logits, k) else "reference"
    return "reference"
