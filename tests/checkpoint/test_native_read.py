"""Tensors read in C++ are bit for bit what numpy makes of them, and damage is told."""

import math
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint import native_read
from jaxllm.checkpoint.native_read import Job
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor
from jaxllm.errors import ModelFormatError
from jaxllm.pallas_kernels import native

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the native library is not built")

TARGETS = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float16", "bfloat16")}
SPECIAL = [0.0, -0.0, 1.0, 2**-24, 3 * 2**-24, 2**-14, 65504.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 3e38, -2.5]


def stored(path, values, dtype, offset=0):
    path.write_bytes(bytes(offset) + values.astype(FLOATS[dtype]).tobytes())
    return StoredTensor(path, "w", dtype, values.shape, offset)


@st.composite
def cases(draw):
    """Shape in the file, order of the axes in the parameter, where it lies there, and both dtypes."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    room = [draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) for _ in shape]
    source, target = draw(st.sampled_from(sorted(FLOATS))), draw(st.sampled_from(sorted(TARGETS)))
    return shape, tuple(order), room, source, target, draw(st.integers(0, 999))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_as_numpy_places_them(tmp_path_factory, case):
    shape, order, room, source, target, seed = case
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        values = rng.choice(np.array([*SPECIAL, *rng.normal(size=20)]), shape).astype(FLOATS[source])
        values = np.where(np.isfinite(values.astype(TARGETS[target])), values, 0).astype(FLOATS[source])
    tensor = stored(tmp_path_factory.getbasetemp() / "w.bin", values, source, offset=8 * (seed % 3))
    whole = np.full([a + shape[i] + b for i, (a, b) in zip(order, room, strict=True)], 7, TARGETS[target])
    place = tuple(slice(a, a + shape[i]) for i, (a, _) in zip(order, room, strict=True))
    want = whole.copy()
    want[place] = values.transpose(order).astype(TARGETS[target])
    if not native_read.supports(tensor, whole):
        assert (source, target) in {("F32", "float16"), ("BF16", "float16")}
        return
    native_read.read([Job(tensor, whole[place].transpose(np.argsort(order)))])
    np.testing.assert_array_equal(whole.view(f"u{whole.itemsize}"), want.view(f"u{want.itemsize}"))


def test_large_ones_are_divided_among_threads(tmp_path):
    shape = (300, 5, 700)  # several chunks, the last of them smaller
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    jobs, targets = [], []
    for i, dtype in enumerate(("BF16", "F32", "F16")):
        tensor = stored(tmp_path / str(i), values, dtype, offset=24)
        targets.append(np.empty((700, 300, 5), np.float32))
        jobs.append(Job(tensor, targets[-1].transpose(1, 2, 0)))
    native_read.read(jobs)
    for target, dtype in zip(targets, ("BF16", "F32", "F16"), strict=True):
        np.testing.assert_array_equal(target, values.astype(FLOATS[dtype]).astype(np.float32).transpose(2, 0, 1))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("source", "target"), [("BF16", "float32"), ("F16", "bfloat16"), ("F32", "float32")])
def test_values_that_are_not_finite(tmp_path, bad, source, target):
    values = np.zeros((50, 60))
    values[33, 7] = bad
    tensor = stored(tmp_path / "w", values, source)
    with pytest.raises(ModelFormatError, match=rf"w: w holds values that are not finite in {target}"):
        native_read.read([Job(tensor, np.empty((50, 60), TARGETS[target]))])


def test_values_out_of_the_targets_range(tmp_path):
    tensor = stored(tmp_path / "w", np.full((2, 2), 3.4e38), "F32")
    with pytest.raises(ModelFormatError, match="not finite in bfloat16"):
        native_read.read([Job(tensor, np.empty((2, 2), TARGETS["bfloat16"]))])


def test_files_that_end_early_or_are_gone(tmp_path):
    values = np.ones((40, 40))
    target = np.empty((40, 40), np.float32)
    good, short = stored(tmp_path / "good", values, "F32"), stored(tmp_path / "short", values, "F32")
    os.truncate(tmp_path / "short", 4000)
    with pytest.raises(ModelFormatError, match="short became shorter while it was read"):
        native_read.read([Job(good, target), Job(short, target)])
    with pytest.raises(ModelFormatError, match="gone cannot be read"):
        native_read.read([Job(good._replace(file=tmp_path / "gone"), target)])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFormatError, match="folder cannot be read .*directory.*; check the disk"):
        native_read.read([Job(good._replace(file=tmp_path / "folder"), target)])
