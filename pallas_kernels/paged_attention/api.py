"""Ragged paged attention: the KV layout, the KV write and attention, for every platform."""

from jaxtyping import Array, Float, Float32, Num

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement
from jaxllm.pallas_kernels.paged_attention.batch import AnyArray, PagedBatch
from jaxllm.pallas_kernels.paged_attention.reference import is_quantised

_PREFERRED = {"cpu": ("native", "cpu"), "tpu": ("tpu",), "gpu": ("gpu",)}
OP = Op(
    package=__package__ or "",
    name="ragged_paged_attention",
    implementations=("reference", "cpu", "native", "tpu", "gpu", "gpu_in_order"),
    preferred=_PREFERRED,
    on_mesh=_PREFERRED,  # each device attends to its own heads, under `shard_map`
    warns=True,
)

# Where a token's result depends on no other token of the step, and what says so.
IN_ORDER: dict[str, tuple[str, dict[str, bool]]] = {
    "cpu": ("native", {"batch_invariant": True}),
    "gpu": ("gpu_in_order", {}),
    "tpu": ("tpu", {"batch_invariant": True}),
}

# Such kernels add up keys in tiles from position 0 on: positions may be counted from multiples of this alone.
_KEYS_IN_ORDER = {"cpu": 64, "gpu": 64, "tpu": 512}

# Logical axes of a layer's pool. Blocks are head-major: the keys of one head are contiguous, so that a block is a
# matrix operand in place (on a CPU ten times faster than token-major blocks).
KV_AXES = (None, None, "kv_heads", None, None)
TPU_LANES = 128  # a row of a TPU's memory tile; the last axis is padded to it


def kv_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, *, platform: str) -> tuple[int, ...]:
    """Shape of one layer's pool `[blocks, k and v, kv_heads, block_size, padded head_dim]` on devices of `platform`,
    `kv_heads` per shard."""
    lanes = TPU_LANES if platform == "tpu" else 1
    return (num_blocks, 2, kv_heads, block_size, -(-head_dim // lanes) * lanes)


def first_key_multiple(placement: Placement) -> int:
    """Tokens at whose multiples a sequence may begin, where blocks before its window are left out: positions count from
    there. 1 if it doesn't matter."""
    return _KEYS_IN_ORDER.get(placement.platform or "", 1) if placement.batch_invariant else 1


def has_kernel(q: AnyArray, k: AnyArray, v: AnyArray, kv_pool: AnyArray, *, placement: Placement) -> bool:
    """Whether one serves arrays of these shapes and dtypes there, rather than the reference."""
    if placement.batch_invariant:
        in_order = IN_ORDER.get(placement.platform or "")
        return in_order is not None and OP.takes(in_order[0], q, k, v, kv_pool)
    return OP.kernel_for(placement, q, k, v, kv_pool) is not None


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Num[Array, "blocks 2 kv_heads block_size padded_head_dim"],
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kv_scales: Float32[Array, "2 kv_heads"] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Num[Array, "blocks 2 kv_heads block_size padded_head_dim"]]:
    """Writes the step's K and V into the pool and attends: returns the attention and the new pool.

    `reference.ragged_paged_attention` defines the arguments. The arrays are one device's part of those on `placement`,
    for which "auto" takes the preferred implementation. `interpret` runs a Pallas kernel on a CPU. Raises `ValueError`
    for an unknown implementation, and unless `kv_scales` are given for a quantised pool and for no other.
    """
    limits = {"sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks, "kv_scales": kv_scales}
    options = {"scale": scale} | {name: value for name, value in limits.items() if value is not None}
    if not causal:
        options["causal"] = False
    if placement.batch_invariant:
        implementation, more = IN_ORDER[placement.platform or ""]
        options |= more
    attend = OP.choose(implementation, placement, q, k, v, kv_pool, batch, **options)
    if is_quantised(kv_pool.dtype) != (kv_scales is not None):
        verb = "needs" if kv_scales is None else "takes no"
        raise ValueError(f"a KV pool of {kv_pool.dtype} {verb} kv_scales")
    if interpret:
        options["interpret"] = True
    return attend(q, k, v, kv_pool, batch, **options)
