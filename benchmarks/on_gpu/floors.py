"""The least time that a step can take: bytes over bandwidth and operations over the rate of the tensor cores.

A decode step of B sequences of ctx tokens takes max(W / BW, 2 N B / F) + B ctx kv / BW: W are the bytes of all weights
but the embedding, of which some rows are gathered (a tied one counts as the head), N the parameters in them, kv the
bytes of a token's keys and values in all layers. A prompt of T tokens takes (2 N T + 2 L heads head_dim T^2) / F, N
without the head, which sees one row; half of the scores are masked.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

H200_BANDWIDTH = 4.3e12  # bytes a second that a large copy reads and writes; the data sheet says 4.8e12
H200_FLOPS = 790e12  # bfloat16 a second in a large product of random matrices; the data sheet says 989e12


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best."""

    bandwidth: float  # bytes a second
    flops: float  # a second


H200 = Ceilings(H200_BANDWIDTH, H200_FLOPS)


@dataclass(frozen=True)
class Sizes:
    """What the floors need to know of a model; all of one device."""

    layer_params: int
    head_params: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # of weights, keys and values

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.itemsize

    def decode_s(self, batch: int, context: float, at: Ceilings) -> float:
        params = self.layer_params + self.head_params
        weights = max(params * self.itemsize / at.bandwidth, 2 * params * batch / at.flops)
        return weights + batch * context * self.token_bytes / at.bandwidth

    def prefill_s(self, tokens: int, at: Ceilings) -> float:
        attention = 2 * self.num_layers * self.heads * self.head_dim * tokens**2
        return (2 * self.layer_params * tokens + attention) / at.flops


def sizes_of(cfg: Any) -> Sizes:
    """Of a model without experts whose configuration is a `jaxllm.models.transformer.Config`."""
    attention = cfg.embed * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
    return Sizes(
        layer_params=cfg.num_layers * (attention + 3 * cfg.embed * cfg.mlp),
        head_params=cfg.vocab * cfg.embed,
        num_layers=cfg.num_layers,
        heads=cfg.heads,
        kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        itemsize=np.dtype(cfg.dtype).itemsize,
    )
