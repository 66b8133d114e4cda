"""Tensors read in C++ are bit for bit what numpy makes of them, and damage is told."""

import math
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint import native_read
from jaxllm.checkpoint.gguf.blocks import BLOCKS, dequantize
from jaxllm.checkpoint.native_read import FillJob
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
        assert target == "float16" and source != "F16"
        return
    native_read.read([FillJob(tensor, whole[place].transpose(np.argsort(order)))])
    np.testing.assert_array_equal(whole.view(f"u{whole.itemsize}"), want.view(f"u{want.itemsize}"))


def test_large_ones_are_divided_among_threads(tmp_path):
    shape = (300, 5, 700)  # several chunks, the last of them smaller
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    jobs, targets = [], []
    for i, dtype in enumerate(("BF16", "F32", "F16")):
        tensor = stored(tmp_path / str(i), values, dtype, offset=24)
        targets.append(np.empty((700, 300, 5), np.float32))
        jobs.append(FillJob(tensor, targets[-1].transpose(1, 2, 0)))
    native_read.read(jobs)
    for target, dtype in zip(targets, ("BF16", "F32", "F16"), strict=True):
        np.testing.assert_array_equal(target, values.astype(FLOATS[dtype]).astype(np.float32).transpose(2, 0, 1))


HALVES = {"Q5_1": (0, 2), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # scales; of others the first


def blocks(rng, dtype, num_values):
    """The bytes of any values, which are finite."""
    block = BLOCKS[dtype]
    data = rng.integers(0, 256, (num_values // block.num_values, block.num_bytes), np.uint8)
    for start in HALVES.get(dtype, (0,)):
        data[:, start : start + 2] = rng.normal(size=len(data)).astype(np.float16)[:, None].view(np.uint8)
    return data.reshape(-1)


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", native_read._BLOCKS)
@settings(max_examples=15, deadline=None)
@given(
    lead=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    rows=st.integers(1, 3),
    shift=st.sampled_from([0.0, -1.0]),
    seed=st.integers(0, 999),
)
def test_blocks_are_dequantised_as_in_numpy(tmp_path_factory, dtype, target, lead, rows, shift, seed):
    shape = (*lead, rows * 256)
    data = blocks(np.random.default_rng(seed), dtype, math.prod(shape))
    file = tmp_path_factory.getbasetemp() / "blocks.bin"
    file.write_bytes(bytes(3) + data.tobytes())
    made = np.empty(shape[::-1], TARGETS[target])
    native_read.read([FillJob(StoredTensor(file, "w", dtype, shape, 3, shift=shift), made.T)])
    values = dequantize(dtype, data)
    want = (values + np.float32(shift) if shift else values).reshape(shape).T.astype(TARGETS[target])
    np.testing.assert_array_equal(made.view(f"u{made.itemsize}"), want.view(f"u{made.itemsize}"))


def test_what_is_left_to_numpy(tmp_path):
    def supports(dtype, shape, target):
        return native_read.supports(StoredTensor(tmp_path, "w", dtype, shape, 0), np.empty(shape, TARGETS[target]))

    assert supports("Q4_0", (2, 32), "float32") and not supports("Q4_0", (32,), "float32")
    assert supports("F16", (3,), "float16") and not supports("BF16", (3,), "float16")
    assert not supports("Q3_K", (2, 256), "float32") and not supports("F32", (0, 3), "float32")


def test_a_damaged_scale_is_not_finite(tmp_path):
    data = blocks(np.random.default_rng(0), "Q4_0", 320)
    data[18:20] = 255
    (tmp_path / "w").write_bytes(data.tobytes())
    with pytest.raises(ModelFormatError, match="not finite"):
        native_read.read(
            [FillJob(StoredTensor(tmp_path / "w", "w", "Q4_0", (10, 32), 0), np.empty((10, 32), np.float32))]
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("source", "target"), [("BF16", "float32"), ("F16", "bfloat16"), ("F32", "float32")])
def test_values_that_are_not_finite(tmp_path, bad, source, target):
    values = np.zeros((50, 60))
    values[33, 7] = bad
    tensor = stored(tmp_path / "w", values, source)
    with pytest.raises(ModelFormatError, match=rf"w: w holds values that are not finite in {target}"):
        native_read.read([FillJob(tensor, np.empty((50, 60), TARGETS[target]))])


def test_values_out_of_the_targets_range(tmp_path):
    tensor = stored(tmp_path / "w", np.full((2, 2), 3.4e38), "F32")
    with pytest.raises(ModelFormatError, match="not finite in bfloat16"):
        native_read.read([FillJob(tensor, np.empty((2, 2), TARGETS["bfloat16"]))])


def test_files_that_end_early_or_are_gone(tmp_path):
    values = np.ones((40, 40))
    target = np.empty((40, 40), np.float32)
    good, short = stored(tmp_path / "good", values, "F32"), stored(tmp_path / "short", values, "F32")
    os.truncate(tmp_path / "short", 4000)
    with pytest.raises(ModelFormatError, match="short became shorter while it was read"):
        native_read.read([FillJob(good, target), FillJob(short, target)])
    with pytest.raises(ModelFormatError, match="gone cannot be read"):
        native_read.read([FillJob(good._replace(file=tmp_path / "gone"), target)])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFormatError, match="folder cannot be read .*directory.*; check the disk"):
        native_read.read([FillJob(good._replace(file=tmp_path / "folder"), target)])
