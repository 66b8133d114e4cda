"""Calls custom calls of the native library without XLA: each array ends where a page begins that nobody may touch,
what lies before it is NaN and stays so, and arguments can't be written. Under AddressSanitizer nothing around an array
may be read either. Nothing is compiled, so that a call takes as long as its kernel.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import settings

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.native.build import INT8, TABLES

NO_ACCESS, FILL = 0, 0xFF  # bytes that are NaN in every dtype of floats
FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")
DTYPES = {
    **{"bool": 1, "int8": 2, "int32": 4, "int64": 5, "uint8": 6, "uint32": 8, "float16": 10, "float32": 11},
    **{"bfloat16": 16, "float8_e4m3fn": 20, "int4": 21, "uint4": 22, "float4_e2m1fn": 32, "float8_e8m0fnu": 33},
}  # as in xla/ffi/api/c_api.h
BUFFER, SCALAR, EXECUTE = 1, 3, 3
FIRST_FUNCTION, CREATE_ERROR, NUM_THREADS = 6, 0, 12  # words of XLA_FFI_Api
fuzzed = settings(max_examples=int(os.environ.get("JAXLLM_EXAMPLES", "25")), deadline=None)
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _choose(name: str) -> bool:
    choose = native.load().jaxllm_choose_instruction_set
    choose.restype = ctypes.c_bool
    return choose(name.encode())


def _chosen() -> str:
    get = native.load().jaxllm_instruction_set
    get.restype = ctypes.c_char_p
    return get().decode()


@functools.cache
def instruction_sets() -> list[str]:
    """Those that this CPU has."""
    with using(_chosen()):
        return [name for name in (*TABLES, *INT8, "amx") if _choose(name)]


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """The library's kernels are those of the instruction set meanwhile. ValueError if this CPU doesn't have it."""
    before = _chosen()
    if not _choose(name):
        raise ValueError(f"no instruction set {name!r} here; there are {instruction_sets()}")
    try:
        yield
    finally:
        _choose(before)


def with_each_set(check: Callable[[], None]) -> None:
    for name in instruction_sets():
        with using(name):
            check()


class Memory:
    """Of `size` bytes that end a page, between two pages that nobody may touch."""

    def __init__(self, size: int) -> None:
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size, self.before, self._total = size, pages - size, pages + 2 * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._base = libc.mmap(None, self._total, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert self._base != ctypes.c_void_p(-1).value, "no memory"
        self._first = self._base + mmap.PAGESIZE
        self.address = self._first + self.before
        for page in (self._base, self._first + pages):
            assert libc.mprotect(page, mmap.PAGESIZE, NO_ACCESS) == 0
        ctypes.memset(self._first, FILL, pages)
        self._mark("poison")

    def _mark(self, how: str) -> None:
        with contextlib.suppress(AttributeError):  # there is no AddressSanitizer
            getattr(libc, f"__asan_{how}_memory_region")(ctypes.c_void_p(self._first), ctypes.c_size_t(self.before))

    def protect(self) -> None:
        assert not self.size or libc.mprotect(self._first, self.before + self.size, mmap.PROT_READ) == 0

    def close(self) -> None:
        """Raises `AssertionError` if what lies before the array was written."""
        self._mark("unpoison")
        is_intact = ctypes.string_at(self._first, self.before) == bytes([FILL]) * self.before
        libc.munmap(self._base, self._total)
        assert is_intact, "a call has written before an array"


class Guarded:
    """An array as XLA holds it, dense and without a byte of padding: of 4 bits, two a byte, the first one low."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._count = int(np.prod(self.shape))
        self._has_four_bits = self.dtype.name in FOUR_BITS
        self.memory = Memory(-(-self._count // 2) if self._has_four_bits else self._count * self.dtype.itemsize)
        self._dims = _words(*self.shape)
        self.buffer = _words(48, 0, DTYPES[self.dtype.name], self.memory.address, len(shape), _address(self._dims))

    def fill(self, array: np.ndarray) -> None:
        if self._has_four_bits:
            codes = np.pad(array.reshape(-1).view(np.uint8) & 15, (0, array.size % 2))
            array = codes[::2] | codes[1::2] << 4
        ctypes.memmove(self.memory.address, np.ascontiguousarray(array).ctypes.data, self.memory.size)

    def copy(self) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(self.memory.address, self.memory.size), self.dtype).reshape(self.shape)


def _words(*values: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def _address(thing: ctypes.Array) -> int:
    return ctypes.addressof(thing)


def _values(things: Sequence[ctypes.Array], kind: int) -> tuple[list[int], list[ctypes.Array]]:
    """XLA_FFI_Args or XLA_FFI_Rets, without its size; and what it points to."""
    kept = [(ctypes.c_int32 * len(things))(*[kind] * len(things)), _words(*map(_address, things))]
    return [len(things), *map(_address, kept)], kept


def _attributes(options: Mapping[str, bool | np.integer | np.floating]) -> tuple[list[int], list[Any]]:
    """XLA_FFI_Attrs likewise: sorted by name, and each a scalar of its own dtype."""
    names, scalars, kept = [], [], []
    for name, value in sorted(options.items()):
        held, text = np.asarray(value), ctypes.create_string_buffer(name.encode())
        kept += [held, text]
        names.append(_words(_address(text), len(name)))
        scalars.append(_words(DTYPES[held.dtype.name], held.ctypes.data))
    (count, types, values), arrays = _values(scalars, SCALAR)
    list_of_names = _words(*map(_address, names))
    return [count, types, _address(list_of_names), values], [*kept, *names, *scalars, *arrays, list_of_names]


def call(
    target: str,
    arguments: Sequence[np.ndarray],
    results: Sequence[tuple[Sequence[int], Any]],
    *,
    aliases: Mapping[int, int] | None = None,
    threads: int = 2,
    **options: Any,
) -> list[np.ndarray]:
    """What the custom call makes of the arguments: arrays of `results`' shapes and dtypes. `aliases`: from an argument
    to the result that takes its place. Raises `ValueError` with the call's own message if it refuses."""
    aliases, messages = aliases or {}, []

    def create_error(words: Any) -> int:
        messages.append(ctypes.string_at(words[2]).decode())
        return 1

    def num_threads(words: Any) -> int:
        ctypes.c_int64.from_address(words[3]).value = threads
        return 0

    functions = {CREATE_ERROR: FUNCTION(create_error), NUM_THREADS: FUNCTION(num_threads)}
    api = _words(*[0] * 64)
    for place, function in functions.items():
        api[FIRST_FUNCTION + place] = ctypes.cast(function, ctypes.c_void_p).value or 0
    made = [Guarded(shape, dtype) for shape, dtype in results]
    held = [made[aliases[i]] if i in aliases else Guarded(x.shape, x.dtype) for i, x in enumerate(arguments)]
    for i, (own, array) in enumerate(zip(held, arguments, strict=True)):
        own.fill(array)
        if i not in aliases:
            own.memory.protect()
    (args, kept_args), (rets, kept_rets) = (_values([x.buffer for x in own], BUFFER) for own in (held, made))
    attrs, kept = _attributes(options)
    frame = _words(168, 0, _address(api), 0, EXECUTE, 40, 0, *args, 40, 0, *rets, 48, 0, *attrs, 0)
    handler = getattr(native.load(), target)
    handler.restype = ctypes.c_void_p
    failed = handler(frame)
    del kept_args, kept_rets, kept
    arrays = [own.copy() for own in made]
    for own in {id(own): own for own in (*held, *made)}.values():
        own.memory.close()
    if failed:
        raise ValueError(messages[-1])
    return arrays
