"""CPU kernels in C++, called through XLA's FFI. Built at install if a compiler is available; see build.py."""

import ctypes
import functools
import logging
import math
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

TARGETS = (
    "jaxllm_add",
    "jaxllm_copy_blocks",
    "jaxllm_grouped_matmul",
    "jaxllm_matmul",
    "jaxllm_paged_attention",
    "jaxllm_quantized_matmul",
    "jaxllm_make_panels",
    "jaxllm_panel_matmul",
    "jaxllm_grouped_panel_matmul",
    "jaxllm_normalize",
    "jaxllm_rotate",
    "jaxllm_rotate_qkv",
    "jaxllm_gated",
    "jaxllm_gated_matmul",
    "jaxllm_rms_norm",
    "jaxllm_draw",
    "jaxllm_best",
    "jaxllm_zeros",
)


def exists() -> bool:
    """Whether the library for this source and jaxlib is built."""
    return _library().exists()


@functools.cache
def is_built() -> bool:
    """Whether the library for this source and jaxlib exists; warns once if not."""
    built = exists()
    if not built:
        log.warning(
            "the C++ kernels for CPUs are not built, and XLA's code, about a fifth slower, serves in their place. With "
            "a compiler (g++ or clang++), python -m jaxllm.pallas_kernels.native.build builds them"
        )
    return built


@functools.cache
def load() -> ctypes.CDLL:
    """The library, for functions that are no custom calls."""
    return ctypes.CDLL(str(_library()))


@functools.cache
def load_holding_gil() -> ctypes.PyDLL:
    """The library, for functions that return at once: other Python threads wait for them."""
    return ctypes.PyDLL(str(_library()))


@functools.cache
def instruction_set() -> str:
    """Registers the custom calls, and returns the instruction set that this CPU runs."""
    import jax

    library = load()
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    library.jaxllm_instruction_set.restype = ctypes.c_char_p
    name = library.jaxllm_instruction_set().decode()
    log.info("the native CPU kernels use %s", name)
    return name


def multiplies_pairs() -> bool:
    """Whether products of bfloat16 take two numbers at once, twice as many a second as of float32."""
    return is_built() and instruction_set() in ("amx", "avx512_bf16", "neon_bf16")


def ffi_call(target: str, results: Any, **options: Any) -> Any:
    """`jax.ffi.ffi_call` of one of `TARGETS`."""
    import jax

    instruction_set()
    return jax.ffi.ffi_call(target, results, **options)


def num_rows(num_tokens: Any, axes: tuple[int, ...]) -> Any:
    """How many rows of `axes`, tokens first, belong to the first `num_tokens`, as custom calls take it; None: all."""
    import jax.numpy as jnp

    if num_tokens is None:
        return jnp.zeros(0, jnp.int32)
    return jnp.reshape(num_tokens * jnp.int32(math.prod(axes[1:])), 1)


def _library() -> Path:
    import jaxlib.version

    from jaxllm.pallas_kernels.native import build  # here, so that it can be run as a module too

    return build.library(jaxlib.version.__version__)
