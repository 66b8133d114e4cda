"""Static efficiency of a decode step: the bytes that its executables move, over the least that they must."""

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.aot import hlo, traffic
from jaxllm.aot.prepare import Prepared
from jaxllm.pallas_kernels.quantized_matmul import stored_bytes
from jaxllm.sharding.rules import num_shards

WEIGHTS, POOL, INPUTS, KERNELS = "weights", "KV pool, outside of our kernels", "other arguments", "attention kernels"
MOST_SEQS = 64  # largest default batch
_TABLES = ("['embed']", "['positions']")  # a step reads some rows of these, or all where logits need them


@dataclass(frozen=True)
class Efficiency:
    """Bytes on one device, for `batch` sequences of `context` tokens each, including the step's own token."""

    batch: int
    context: int
    fewest_weights: int
    fewest_kv: int
    moved: Mapping[str, int]  # by kind of data
    kernels: int  # in the modules, times the trips of their loops; on a GPU, thunks are the better count
    pallas_calls: int
    open_loops: int
    largest: Mapping[str, int]  # instructions that move most, besides our kernels
    bandwidth: float  # bytes a second

    @property
    def fewest(self) -> int:
        return self.fewest_weights + self.fewest_kv

    @property
    def total(self) -> int:
        return sum(self.moved.values())

    @property
    def ratio(self) -> float:
        return self.total / self.fewest

    @property
    def kv_ratio(self) -> float:
        """The ratio for keys and values alone."""
        return (self.moved.get(KERNELS, 0) + self.moved.get(POOL, 0)) / self.fewest_kv

    @property
    def other_ratio(self) -> float:
        """The ratio for everything else: weights, and what is computed with them."""
        return (self.total - self.moved.get(KERNELS, 0) - self.moved.get(POOL, 0)) / self.fewest_weights

    @property
    def uncached_ratio(self) -> float:
        """The ratio without intermediate arrays that a GPU's L2 cache can hold: up to a quarter of it each."""
        return (self.total - self.moved.get(traffic.CACHED, 0)) / self.fewest

    @property
    def floor_ms(self) -> float:
        """Milliseconds that the fewest bytes take at the chip's bandwidth."""
        return self.fewest / self.bandwidth * 1e3

    @property
    def moved_ms(self) -> float:
        return self.total / self.bandwidth * 1e3


def efficiency(prepared: Prepared, texts: Mapping[str, str], batch: int, context: int) -> Efficiency:
    """The efficiency of the decode step that runs executables of these kinds and texts of optimised HLO."""
    chip, trips = prepared.target.chip, -(-context // prepared.config.block_size)
    counted = traffic.Traffic()
    for name, text in texts.items():
        open_trips = trips if name == "step" else 0  # samplers' loops filter, and a plain draw does not
        one = traffic.count(hlo.parse(text), _label, open_trips=open_trips, small_bytes=chip.cache_bytes // 4)
        counted.add(name, one)
    moved = dict(counted.num_bytes)
    if counted.pallas_calls:
        moved[KERNELS] = declared_bytes(prepared, batch, context)
    return Efficiency(
        batch,
        context,
        *fewest_bytes(prepared, batch, context),
        moved,
        counted.kernels,
        counted.pallas_calls,
        counted.open_loops,
        dict(counted.largest.most_common(10)),
        chip.bandwidth,
    )


def pick_batch(prepared: Prepared, context: int, wanted: int | None = None) -> int:
    """`wanted`, or the largest step's bucket up to `MOST_SEQS` whose sequences of `context` tokens the pool holds.
    Raises `ValueError` if it can't hold them."""
    config = prepared.config
    each = max(1, config.count_pages(-(-context // config.block_size)))
    fit = min(config.num_pages // each, config.max_num_seqs) if 1 <= context <= config.max_model_len else 0
    if fit < (wanted or 1):
        raise ValueError(
            f"{wanted or 1} sequences of {context} tokens need {(wanted or 1) * each} blocks, but there are "
            f"{config.num_pages}, for {config.max_num_seqs} sequences of at most {config.max_model_len} tokens each; "
            "give a smaller batch or context"
        )
    return wanted or max(tokens for tokens in prepared.layouts if tokens <= min(fit, MOST_SEQS))


def fewest_bytes(prepared: Prepared, batch: int, context: int) -> tuple[int, int]:
    """Bytes of a device's weights, each read once, and of the keys and values that the batch attends to."""
    cfg, weights = prepared.cfg, 0
    for path, leaf in prepared.tensors():
        shape = leaf.sharding.shard_shape(leaf.shape)
        rows = min(batch, shape[0]) if _is_looked_up(path, cfg.tie_embeddings) else shape[0]
        weights += stored_bytes((rows, *shape[1:]), leaf.dtype)
    row = 2 * _kv_heads(prepared) * cfg.head_dim * _kv_itemsize(prepared)
    windows = [layer.window for layer in cfg.layers]
    seen = sum(min(context, window or context) for window in windows)
    return weights, batch * seen * row


def _is_looked_up(path: str, is_tied: bool) -> bool:
    """Whether a step reads some rows only: not of what is the head too, dense or, if codes are looked up, beside."""
    if not path.startswith(_TABLES) or "['head']" in path:
        return False
    return not (is_tied and path.startswith(f"{_TABLES[0]}['weight']"))


def declared_bytes(prepared: Prepared, batch: int, context: int) -> int:
    """Bytes that the platform's attention kernel declares for all layers of the decode step."""
    cfg, kv_heads = prepared.cfg, _kv_heads(prepared)
    kernel = importlib.import_module(f"jaxllm.pallas_kernels.paged_attention.{prepared.target.chip.platform}")
    block_size, total = prepared.config.block_size, 0
    for window, count in Counter(layer.window for layer in cfg.layers).items():
        seen = min(context, (window or context) + block_size)  # a window begins within a block
        total += count * kernel.bytes_moved(
            [1] * batch,
            [seen] * batch,
            heads=-(-cfg.heads // _pool_heads(prepared)) * kv_heads,
            kv_heads=kv_heads,
            head_dim=cfg.head_dim,
            block_size=block_size,
            itemsize=jnp.dtype(prepared.shape.dtype).itemsize,
            kv_itemsize=_kv_itemsize(prepared),
        )
    return total


def _kv_itemsize(prepared: Prepared) -> int:
    return jnp.dtype(prepared.shape.kv_dtype(prepared.config)).itemsize


def _kv_heads(prepared: Prepared) -> int:
    """KV heads on one device."""
    return _pool_heads(prepared) // num_shards("kv_heads", prepared.mesh)


def _pool_heads(prepared: Prepared) -> int:
    """KV heads that the pool has of a token, on all devices."""
    return prepared.shape.caches[0][0].shape[0]


def _label(parameter: hlo.Instruction) -> str:
    name = parameter.op_name
    return WEIGHTS if name.startswith(("leaves[", "head[")) else POOL if name.startswith("kv_pools[") else INPUTS
