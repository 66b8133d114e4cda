"""Rotary position embeddings (arXiv 2104.09864), and the ways to stretch them: a class for each kind."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Turns pairs of features, one of the first half with one of the second, by angles that grow with the position.

    `theta` is the base of the wavelengths, `fraction` the share of a head's features that are turned: the first ones.
    With `interleaved`, pairs are neighbours.
    """

    theta: float
    fraction: float = 1.0
    interleaved: bool = False

    @classmethod
    def parse(cls, p: dict, max_len: int, **common: Any) -> "Rope":
        """From checked rope parameters of a `config.json`. `max_len` is its `max_position_embeddings`, `common` holds
        the fields of every kind."""
        return cls(**common)

    @property
    def amplitude(self) -> float:
        """Of sine and cosine; scales queries and keys."""
        return 1.0

    def num_features(self, head_dim: int) -> int:
        """Features of a head that are turned. Raises `ValueError` if they don't make pairs."""
        features = int(head_dim * self.fraction)
        if not 2 <= features <= head_dim or features % 2:
            raise ValueError(
                f"rotary embeddings turn {features} features of head_dim={head_dim} (partial_rotary_factor="
                f"{self.fraction}), but they turn pairs: the number must be even and in [2, {head_dim}]"
            )
        return features

    def check(self, head_dim: int) -> None:
        """Raises `ValueError` if heads of `head_dim` features can't be turned."""
        self.num_features(head_dim)

    def reach(self, max_len: int) -> int:
        """Tokens that the model can take, where `config.json` says `max_len`."""
        return max_len

    def inv_freq(self, head_dim: int, max_len: int) -> np.ndarray:
        """Radians a position for each pair, float32 `[num_features // 2]`; see `sin_cos`."""
        features = self.num_features(head_dim)
        exponent = np.arange(0, features, 2, dtype=np.float32) / np.float32(features)
        return np.float32(1.0) / np.float32(self.theta) ** exponent

    def angles(self, positions: Int[Array, "*t"], head_dim: int, max_len: int) -> Float[Array, "*t pairs"]:
        freq = jnp.asarray(self.inv_freq(head_dim, max_len))
        return _outer(positions.astype(jnp.float32), freq)

    def sin_cos(self, positions: Int[Array, "*t"], head_dim: int, max_len: int) -> tuple[Array, Array]:
        """Sine and cosine `[*t, 1, num_features // 2]` in float32, to be broadcast over heads.

        `max_len` is the length in tokens of the longest sequence that is ever computed.
        """
        angle = jnp.expand_dims(self.angles(positions, head_dim, max_len), -2)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return (sin, cos) if self.amplitude == 1.0 else (sin * self.amplitude, cos * self.amplitude)


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Positions divided by `factor` (arXiv 2306.15595)."""

    factor: float

    @classmethod
    def parse(cls, p: dict, max_len: int, **common: Any) -> "LinearRope":
        return cls(factor=p["factor"], **common)

    def inv_freq(self, head_dim: int, max_len: int) -> np.ndarray:
        return super().inv_freq(head_dim, max_len) / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class Dynamic(Rope):
    """A base that grows with the sequence ("dynamic NTK"): `original_max_len` tokens reach `factor` times as far.

    Keys in a cache are not turned again when the sequence grows. So the base here depends on each token's own
    position: `seq_len = max(position + 1, original_max_len)`. This is what transformers computes up to
    `original_max_len` tokens and, beyond, token by token with its cache (not what it computes for a whole longer
    prompt at once, where every token takes the base of the last). It doesn't depend on how a prompt is cut.
    """

    factor: float
    original_max_len: int

    @classmethod
    def parse(cls, p: dict, max_len: int, **common: Any) -> "Dynamic":
        return cls(factor=p["factor"], original_max_len=max_len, **common)

    def check(self, head_dim: int) -> None:
        if self.num_features(head_dim) == 2:
            raise ValueError(f"rope type 'dynamic' needs more than 2 turned features, and head_dim={head_dim} has 2")

    def reach(self, max_len: int) -> int:
        return max(max_len, int(self.factor * max_len))

    def angles(self, positions: Int[Array, "*t"], head_dim: int, max_len: int) -> Float[Array, "*t pairs"]:
        features = self.num_features(head_dim)
        seq_len = jnp.maximum(positions + 1, self.original_max_len).astype(jnp.float32)
        growth = 1 + self.factor * (seq_len / self.original_max_len - 1)
        # theta * growth ** (features / (features - 2)), to the power of each pair's exponent
        exponent = -np.arange(0, features, 2, dtype=np.float32) / np.float32(features - 2)
        stretch = jnp.exp(_outer(jnp.log(growth), jnp.asarray(exponent)))
        return super().angles(positions, head_dim, max_len) * stretch


@dataclass(frozen=True, kw_only=True)
class Llama3(Rope):
    """Slow waves are stretched by `factor`, fast ones kept, those between blended (arXiv 2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    @classmethod
    def parse(cls, p: dict, max_len: int, **common: Any) -> "Llama3":
        return cls(
            factor=p["factor"],
            low_freq_factor=p["low_freq_factor"],
            high_freq_factor=p["high_freq_factor"],
            original_max_len=p["original_max_position_embeddings"],
            **common,
        )

    def inv_freq(self, head_dim: int, max_len: int) -> np.ndarray:
        freq = super().inv_freq(head_dim, max_len)
        turns = self.original_max_len * freq / np.float32(2 * np.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return (freq * keep + freq / self.factor * (1 - keep)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Yarn(Rope):
    """Stretches the pairs that turn less than `beta_slow` times in `original_max_len` tokens, keeps those that turn
    more than `beta_fast` times, and blends between (arXiv 2309.00071).

    `attention_factor` is the amplitude; None is the paper's. `truncate` widens the blend to whole pairs.
    """

    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @classmethod
    def parse(cls, p: dict, max_len: int, **common: Any) -> "Yarn":
        original = p["original_max_position_embeddings"]
        factor, amplitude = p.get("factor") or max_len / original, p.get("attention_factor")
        if amplitude is None and p.get("mscale") and p.get("mscale_all_dim"):
            amplitude = _mscale(factor, p["mscale"]) / _mscale(factor, p["mscale_all_dim"])
        return cls(
            factor=factor,
            original_max_len=original,
            beta_fast=p.get("beta_fast") or 32.0,
            beta_slow=p.get("beta_slow") or 1.0,
            truncate=p.get("truncate", True),
            attention_factor=amplitude,
            **common,
        )

    @property
    def amplitude(self) -> float:
        return _mscale(self.factor) if self.attention_factor is None else self.attention_factor

    def reach(self, max_len: int) -> int:
        return max(max_len, int(self.factor * self.original_max_len))

    def inv_freq(self, head_dim: int, max_len: int) -> np.ndarray:
        freq, features = super().inv_freq(head_dim, max_len), self.num_features(head_dim)

        def pair(turns: float) -> float:  # the pair that turns so often in `original_max_len` tokens
            wavelength = self.original_max_len / (turns * 2 * math.pi)
            return features * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(float(low), 0.0), min(float(high), features - 1.0)
        width = high - low or 0.001
        stretched = np.clip((np.arange(features // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
        return (freq / self.factor * stretched + freq * (1 - stretched)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """A searched stretch for each pair, one list for short and one for long sequences (arXiv 2402.13753).

    All of a cache's keys must have been turned with one list. So the choice is static, by the length of the longest
    sequence (an engine's `max_model_len`): `short_factors` if it is at most `original_max_len`, else `long_factors`,
    also for short prompts. transformers chooses anew by the length at each forward pass.
    `attention_factor` is the amplitude; None is the paper's for a context of `factor * original_max_len`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_len: int
    factor: float
    attention_factor: float | None = None

    @classmethod
    def parse(cls, p: dict, max_len: int, **common: Any) -> "LongRope":
        original = p["original_max_position_embeddings"]
        return cls(
            short_factors=tuple(p["short_factor"]),
            long_factors=tuple(p["long_factor"]),
            original_max_len=original,
            factor=p.get("factor") or max_len / original,
            attention_factor=p.get("attention_factor"),
            **common,
        )

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + max(0.0, math.log(self.factor)) / math.log(self.original_max_len))

    def check(self, head_dim: int) -> None:
        pairs = self.num_features(head_dim) // 2
        if self.original_max_len < 2:
            raise ValueError(f"original_max_position_embeddings={self.original_max_len} must be at least 2")
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if len(factors) != pairs:
                raise ValueError(f"{name} has {len(factors)} numbers, but {pairs} pairs of features are turned")

    def inv_freq(self, head_dim: int, max_len: int) -> np.ndarray:
        factors = self.short_factors if max_len <= self.original_max_len else self.long_factors
        return super().inv_freq(head_dim, max_len) / np.asarray(factors, np.float32)


KINDS: dict[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "dynamic": Dynamic,
    "llama3": Llama3,
    "yarn": Yarn,
    "longrope": LongRope,
}


def rope_from_hf(hf: dict, params: dict | None = None, *, theta: float = 10000.0, interleaved: bool = False) -> Rope:
    """From a checked `config.json`, in the form of transformers 5 (`rope_parameters`) or before (`rope_scaling` and
    `rope_theta`). `params` stands for that object where layers have several, `theta` where none is given.

    Raises KeyError for a missing key, ValueError for a kind that is not supported.
    """
    p = params if params is not None else hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = p.get("rope_type") or p.get("type") or "default"
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    max_len = hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or p.get("original_max_position_embeddings") or max_len
    fraction = p.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    theta = p.get("rope_theta", hf.get("rope_theta", theta))
    p = p | {"original_max_position_embeddings": original}
    return KINDS[kind].parse(p, max_len, theta=float(theta), fraction=float(fraction), interleaved=interleaved)


def ropes_of(hf: dict, *, theta: float, local_theta: float) -> dict[str, Rope]:
    """Ropes by layer type, with these thetas where none is given; older files have flat keys, whose scaling applies to
    the global layers."""
    given = hf.get("rope_parameters") or {}
    unknown = sorted(given.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"rope_parameters has {unknown}, but this family's has an object for each layer type")
    full = (given.get("full_attention") or {}) | (hf.get("rope_scaling") or {})
    return {
        "full_attention": rope_from_hf(hf, full, theta=theta),
        "sliding_attention": rope_from_hf(
            {"max_position_embeddings": hf["max_position_embeddings"]},
            given.get("sliding_attention") or {},
            theta=local_theta,
        ),
    }


def _outer(x: Float[Array, "*t"], y: Float[Array, " n"]) -> Float[Array, "*t n"]:
    return jnp.expand_dims(x, -1) * jnp.expand_dims(y, tuple(range(x.ndim)))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
