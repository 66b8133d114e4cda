"""What draws should be, in numpy and float64 but for the noise, which the sampler defines as JAX's float32 Gumbel."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.kernels import WrongResultError
from jaxllm.pallas_kernels.sampling import reference

CLOSE = 1e-4  # in nats: of two tokens as near as this either may be drawn
NEAR = 1e-5  # of a share of the probability: what top-p and min-p may keep or not
# Rows with these, one after the other and again.
FILTERS = (
    {
        "temperature": (0, 1, 1, 1, 0.7, 2, 1, 5),
        "top_k": (0, 0, 5, 0, 300, 100, 1, 0),
        "top_p": (1, 1, 1, 0.9, 0.5, 0.95, 1, 0.999),
        "min_p": (0, 0, 0, 0, 0, 0.01, 0, 0),
    },
    {
        "temperature": (1, 1, 0.05, 30, 1, 1, 0.8, 1),
        "top_k": (2**31 - 1, 50, 0, 0, 0, 3, 20, 250),
        "top_p": (1, 0.9, 0.9, 0.9, 1e-9, 0.9, 0.95, 1),
        "min_p": (0.5, 0, 0, 0, 0, 1.0, 0.05, 0),
    },
)


class Columns(NamedTuple):
    """The sampling parameters of each row."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


def columns_of(filters: Mapping[str, Sequence[float]], rows: int) -> Columns:
    """One of `FILTERS` for so many rows."""
    dtypes = ("float32", "int32", "float32", "float32")
    values = [np.resize(np.asarray(filters[name], np.float64), rows) for name in Columns._fields]
    return Columns(*(column.astype(dtype) for column, dtype in zip(values, dtypes, strict=True)))


def check_draws(tokens: np.ndarray, logits: np.ndarray, columns: Columns, keys: np.ndarray) -> int:
    """How many draws `tokens` `[rows]` are others than those of float64, as good as they within `CLOSE`. Raises
    `WrongResultError` for one that is worse, or that the filters forbid."""
    with jax.default_device(jax.devices("cpu")[0]):
        noise = np.asarray(jax.jit(reference.gumbel, static_argnums=1)(keys, logits.shape[1])).astype(np.float64)
    close = 0
    for row, token in enumerate(tokens.tolist()):
        x = logits[row].astype(np.float64)
        temperature, k, p, least = (column[row].item() for column in columns)
        if temperature == 0:
            if token != np.argmax(x):
                raise WrongResultError(f"row {row}: token {token} is not the first of the largest, {np.argmax(x)}")
            continue
        scaled = (x - x.max()) / temperature
        narrow = limit_of(scaled, k, p - NEAR if p < 1 else 1.0, min(1.0, least * (1 + NEAR)))
        wide = limit_of(scaled, k, min(1.0, p + NEAR) if p < 1 else 1.0, least * (1 - NEAR))
        scores = scaled + noise[row]
        best = int(np.argmax(np.where(scaled >= narrow, scores, -np.inf)))
        if token != best:
            close += 1
            if not 0 <= token < len(x) or scaled[token] < wide - NEAR or scores[token] < scores[best] - CLOSE:
                raise WrongResultError(
                    f"row {row}: token {token} was drawn instead of {best}; k={k} p={p} min_p={least}"
                )
    return close


def limit_of(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest of a row's `scaled` logits, the largest of which is 0, that min-p, top-k and top-p keep."""
    falling = -np.sort(-scaled)
    kept = int((np.exp(falling) >= min_p).sum())
    if top_k > 0:
        kept = int((falling >= falling[min(top_k, kept) - 1]).sum())  # ties at the limit are kept
    if top_p < 1:
        mass = np.cumsum(np.exp(falling[:kept]))
        kept = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    return float(falling[min(kept, len(falling)) - 1])
