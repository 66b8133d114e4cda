"""The caches of all layers in a step, over arrays of pages that layers share."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.argument_checks import a_type
from jaxllm.engine.device.cache_layout import CacheLayout, Place
from jaxllm.engine.device.slot_rows import TableShape
from jaxllm.models.cache import Paged, SharedTokens
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.state_cache import PagedState
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import PagedBatch


def view_table(
    batch: PagedBatch,
    table: Int[Array, "seqs block_pages width"],
    shape: TableShape,
    lengths: Int[Array, " seqs"],
    block_size: int,
    multiple: int = 1,
) -> list[PagedBatch]:
    """The batch as each page of a group's blocks sees it: of a window, positions count from the first block that the
    step's first token of the sequence reads, or the last `multiple` of tokens before it, so that nobody attends to what
    is gone. `lengths` are before the step."""
    window = shape.group.window
    if window is None:
        return [batch._replace(block_tables=table[:, page]) for page in range(shape.group.num_pages)]
    blocks = math.lcm(multiple, block_size) // block_size
    first = jnp.maximum(0, lengths - window + 1) // (blocks * block_size)
    if blocks > 1:
        first = first * blocks
    index = (first[:, None] + jnp.arange(shape.view + blocks - 1, dtype=jnp.int32)[None, :]) % shape.width
    seen = jnp.take_along_axis(table, index[:, None], axis=2, mode="clip")
    kv_lens = batch.kv_lens - first * block_size
    return [batch._replace(block_tables=seen[:, page], kv_lens=kv_lens) for page in range(shape.group.num_pages)]


class LayerCaches:
    """Like a list with an entry a layer: its cache, or `CachesOfLayer` if it has several. An entry is made of the
    arrays as they are when it is asked for, and written back into them when it is set."""

    def __init__(
        self,
        pools: Sequence[Array],
        views: Sequence[Sequence[PagedBatch]],  # of each group, of each page of a block
        specs: Sequence[tuple[CacheSpec, ...]],
        layout: CacheLayout,
        placement: Placement,
        block_size: int,
        kv_scales: Sequence[Array] = (),  # of each cache of keys and values, where the pool has 8-bit numbers
        shared: SharedTokens | None = None,
    ):
        self.pools = list(pools)
        self._kv_scales, self._shared = kv_scales, shared
        self._views, self._specs, self._layout = views, specs, layout
        self._placement, self._block_size = placement, block_size

    def __len__(self) -> int:
        return len(self._specs)

    def copy(self) -> "LayerCaches":
        """Which may be changed alone."""
        same = self._views, self._specs, self._layout, self._placement, self._block_size, self._kv_scales, self._shared
        return LayerCaches(self.pools, *same)

    def __getitem__(self, layer: int) -> Any:
        return self.get(layer, 0) if len(self._specs[layer]) == 1 else CachesOfLayer(self, layer)

    def __setitem__(self, layer: int, cache: Any) -> None:
        if len(self._specs[layer]) == 1:
            self.put(layer, 0, cache)
        elif not isinstance(cache, CachesOfLayer):
            raise ValueError(
                f"layer {layer} has {len(self._specs[layer])} caches and returned {a_type(cache)}; let it put "
                "each back into what it was given, and return that: y, caches[0] = part(x, caches[0])"
            )

    def size(self, layer: int) -> int:
        """How many caches a layer has."""
        return len(self._specs[layer])

    def get(self, layer: int, index: int) -> Paged | PagedState:
        """One of a layer's caches, with what has been put into the arrays so far."""
        spec, place = self._specs[layer][index], self._layout.places[layer][index]
        scales = self._scales_of(layer, index) if self._kv_scales and not spec.is_state else None
        return self._cache(spec, place, scales)

    def _scales_of(self, layer: int, index: int) -> Array:
        before = [*(spec for of_layer in self._specs[:layer] for spec in of_layer), *self._specs[layer][:index]]
        return self._kv_scales[sum(not spec.is_state for spec in before)]

    def put(self, layer: int, index: int, cache: Paged | PagedState) -> None:
        """Writes one of a layer's caches back."""
        for array, pool in zip(_arrays(self._layout.places[layer][index]), _pools(cache), strict=True):
            self.pools[array] = pool

    def _cache(self, spec: CacheSpec, place: Place, kv_scales: Array | None) -> Paged | PagedState:
        views = [self._views[place.group][cell.page] for cell in place.cells]
        arrays = _arrays(place)
        pools = tuple(self.pools[array] for array in arrays)
        if not spec.is_state:
            return Paged(pools[0], views[0], self._placement, kv_scales, self._shared)
        tables, cells = zip(
            *((view.block_tables, arrays.index(cell.array)) for view, cell in zip(views, place.cells, strict=True)),
            strict=True,
        )
        axes = self._layout.arrays[arrays[0]].axes
        return PagedState(pools, tables, cells, views[0], spec, axes, self._block_size, self._placement)


class CachesOfLayer:
    """Like a list of the caches of one layer that has several."""

    def __init__(self, caches: LayerCaches, layer: int):
        self._caches, self._layer = caches, layer

    def __len__(self) -> int:
        return self._caches.size(self._layer)

    def __getitem__(self, index: int) -> Paged | PagedState:
        return self._caches.get(self._layer, index)

    def __setitem__(self, index: int, cache: Paged | PagedState) -> None:
        self._caches.put(self._layer, index, cache)


def _arrays(place: Place) -> list[int]:
    """The arrays that a cache's cells lie in, each once."""
    return list(dict.fromkeys(cell.array for cell in place.cells))


def _pools(cache: Paged | PagedState) -> tuple[Array, ...]:
    return cache.pools if isinstance(cache, PagedState) else (cache.kv_pool,)


def pools_of(caches: Any, layout: CacheLayout) -> list[Array]:
    """The arrays after a model was called. One that returns a list of its own may, if no two caches share an array."""
    if isinstance(caches, LayerCaches):
        return caches.pools
    cells = [cell for of_layer in layout.places for place in of_layer for cell in place.cells]
    if len({cell.array for cell in cells}) < len(cells) or any(len(of_layer) != 1 for of_layer in layout.places):
        raise ValueError(
            "layers share arrays of the KV pool, and the model returned a list of its own; let it take each layer's "
            "cache after the one before was put back: caches = caches.copy(), then x, caches[i] = layer(x, caches[i])"
        )
    pools: list[Any] = [None] * len(layout.arrays)
    for (place,), cache in zip(layout.places, caches, strict=True):
        for array, pool in zip(_arrays(place), _pools(cache), strict=True):
            pools[array] = pool
    return pools
