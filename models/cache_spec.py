"""What a layer caches, as it tells the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.pallas_kernels.paged_attention import KV_AXES, kv_shape


@dataclass(frozen=True)
class CacheSpec:
    """One of a layer's caches. Made by `keys_and_values` or `state`."""

    shape: tuple[int, ...]  # of keys or values a token, `(kv_heads, head_dim)`; or of a state
    axes: tuple[str | None, ...]  # logical ones of what a block holds
    dtype: Any  # None: that of the model's activations
    window: int | None  # tokens whose values a token reads, itself the last of them; None: all
    is_state: bool  # one value for all tokens so far, made of the one before

    @classmethod
    def keys_and_values(cls, kv_heads: int, head_dim: int, *, window: int | None = None) -> "CacheSpec":
        """Of attention: the layer is given a `Paged` cache."""
        return cls((kv_heads, head_dim), KV_AXES[1:], None, window, is_state=False)

    @classmethod
    def state(cls, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] | None = None) -> "CacheSpec":
        """Of a recurrence: the layer is given a `PagedState`. It has a value for each block, which the block's last
        token so far has left. `axes` are the logical ones of `shape`."""
        return cls(tuple(shape), tuple(axes or (None,) * len(shape)), dtype, 2, is_state=True)

    def block_shape(self, block_size: int, platform: str) -> tuple[int, ...]:
        """What one block holds, on devices of `platform`."""
        if self.is_state:
            return self.shape
        kv_heads, head_dim = self.shape
        return kv_shape(1, block_size, kv_heads, head_dim, platform=platform)[1:]
