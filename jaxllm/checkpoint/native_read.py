"""Tensors into arrays in C++: read, dequantised, cast and placed in one call that holds no lock of Python's, so that
executables are traced meanwhile."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.pallas_kernels import native

_MOST_AXES, _MOST_THREADS = 8, 16
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as in native/gguf_blocks.h
_SOURCES = {name: kind for kind, name in enumerate(("F32", "F16", "BF16", *_BLOCKS))}
_TARGETS = {"float32": 0, "float16": 1, "bfloat16": 2}
_NOT_FINITE, _TOO_SHORT, _CANNOT_READ = 1, 2, 3  # statuses


class FillJob(NamedTuple):
    """A tensor, and its place with the axes that the tensor has in its file."""

    tensor: StoredTensor
    view: np.ndarray


class _Job(ctypes.Structure):  # as in native/load_ops.cc
    _fields_ = (
        ("target", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * _MOST_AXES),
        ("strides", ctypes.c_int64 * _MOST_AXES),
        ("piece_bytes", ctypes.c_int64),
        ("counts", ctypes.c_int64 * _MOST_AXES),
        ("steps", ctypes.c_int64 * _MOST_AXES),
        ("file", ctypes.c_int32),
        ("source_kind", ctypes.c_int32),
        ("target_kind", ctypes.c_int32),
        ("num_axes", ctypes.c_int32),
        ("num_steps", ctypes.c_int32),
        ("shift", ctypes.c_float),
        ("status", ctypes.c_int32),
        ("error", ctypes.c_int32),
    )


def supports(tensor: StoredTensor, target: np.ndarray) -> bool:
    """Whether the kernel is built and knows how; numpy reads the rest."""
    if tensor.data is not None or tensor.dtype not in _SOURCES or target.dtype.name not in _TARGETS or not target.size:
        return False
    if tensor.dtype in _BLOCKS and len(tensor.shape) < 2:  # it divides the first axis, and no block
        return False
    is_same = tensor.dtype == "F16" and not tensor.shift
    return (target.dtype.name != "float16" or is_same) and native.is_built()


def read(jobs: Sequence[FillJob]) -> None:
    """Does the jobs, with all cores. ModelFormatError for files that can't be read, and for values not finite."""
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        for job in jobs:
            if job.tensor.file not in files:
                try:
                    files[job.tensor.file] = os.open(job.tensor.file, os.O_RDONLY)
                except OSError as error:
                    raise job.tensor.unreadable(str(error)) from error
                opened.callback(os.close, files[job.tensor.file])
        packed = (_Job * len(jobs))(*(_pack(job, files[job.tensor.file]) for job in jobs))
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        native.load().jaxllm_read_tensors(packed, ctypes.c_int64(len(jobs)), ctypes.c_int32(threads))
    for job, done in zip(jobs, packed, strict=True):
        if done.status == _NOT_FINITE:
            raise job.tensor.not_finite(job.view.dtype)
        if done.status == _TOO_SHORT:
            raise job.tensor.shorter()
        if done.status == _CANNOT_READ:
            raise job.tensor.unreadable(os.strerror(done.error))


def _pack(job: FillJob, file: int) -> _Job:
    view, tensor = job.view, job.tensor
    axes = ctypes.c_int64 * _MOST_AXES
    return _Job(
        target=view.ctypes.data,
        offset=tensor.offset,
        sizes=axes(*view.shape),
        strides=axes(*(stride // view.itemsize for stride in view.strides)),
        piece_bytes=tensor.piece_bytes,
        counts=axes(*(count for count, _ in tensor.steps)),
        steps=axes(*(step for _, step in tensor.steps)),
        file=file,
        source_kind=_SOURCES[tensor.dtype],
        target_kind=_TARGETS[view.dtype.name],
        num_axes=view.ndim,
        num_steps=len(tensor.steps),
        shift=tensor.shift,
    )
