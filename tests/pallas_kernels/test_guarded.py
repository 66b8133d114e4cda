"""What guards the fuzzed arrays works, and the custom calls refuse arrays that don't go together."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxllm.pallas_kernels import native
from tests.pallas_kernels.guarded import call, instruction_sets, using, with_each_set

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

ROOT = Path(__file__).parents[2]
F32, BF16, I32 = np.float32, ml_dtypes.bfloat16, np.int32


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.string_at(end, 1)",
        "ctypes.memset(end, 0, 1)",
        "ctypes.memset(end - 4, 0, 1); memory.close()",
        "protected",
    ],
)
def test_a_touch_of_what_is_around_an_array_is_noticed(touch):
    touch = {"protected": "memory.protect(); ctypes.memset(end - 1, 0, 1)"}.get(touch, touch)
    code = "import ctypes; from tests.pallas_kernels.guarded import Memory; memory = Memory(3); "
    code += f"end = memory.address + 3; ctypes.memset(end - 3, 0, 3); print('begun', flush=True); {touch}"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.stdout == "begun\n" and ran.returncode != 0, ran.stderr


def test_an_instruction_set_that_is_not_there_is_refused():
    assert instruction_sets()[0] == "portable"
    with (
        pytest.raises(ValueError, match="no instruction set 'avx1024' here; there are \\['portable'"),
        using("avx1024"),
    ):
        pass


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


ATTENTION = {"scale": F32(1), "causal": True, "window": np.int64(0), "soft_cap": F32(0), "batch_invariant": False}
PANELS = {"code": 2, "numbers": 0, "part": 8}
PANELS = {name: np.int64(value) for name, value in PANELS.items()} | {"has_offsets": False}
COUNT = np.array([2], I32)  # of rows that are no padding
QUANTISED = [zeros(16, 6, dtype=ml_dtypes.int4), zeros(2, 6), zeros(2, 6), zeros(6)]
CALLS = {  # arguments, results, options, and aliases if there are some
    "jaxllm_matmul": (
        [zeros(3, 4), zeros(4, 5), COUNT],
        [zeros(3, 5)],
        {"transposed": False, "batch_invariant": False},
    ),
    "jaxllm_quantized_matmul": ([zeros(3, 16), *QUANTISED, COUNT], [zeros(3, 6)], {"by_output": False}),
    "jaxllm_make_panels": (
        [zeros(16, 6, dtype=ml_dtypes.int4), zeros(2, 6), zeros(0)],
        [zeros(1, 2, 128, dtype=np.uint8)],
        {},
    ),
    "jaxllm_panel_matmul": ([zeros(3, 16), zeros(1, 2, 128, dtype=np.uint8), zeros(6), COUNT], [zeros(3, 6)], PANELS),
    "jaxllm_grouped_panel_matmul": (
        [zeros(5, 16), zeros(3, 1, 2, 128, dtype=np.uint8), zeros(18), np.array([0, 2, 3, 5], I32)],
        [zeros(5, 6)],
        PANELS,
    ),
    "jaxllm_grouped_matmul": (
        [zeros(5, 16), np.array([0, 2, 3, 5], I32), *(np.stack([x] * 3) for x in QUANTISED)],
        [zeros(5, 6, dtype=F32)],
        {"by_output": False},
    ),
    "jaxllm_paged_attention": (
        [
            *[zeros(4, 4, 3), zeros(4, 2, 3), zeros(4, 2, 3), zeros(5, 2, 2, 4, 3)],
            *[zeros(2, 3, dtype=I32), np.array([0, 2, 4], I32), np.array([5, 6], I32), np.array([1, 2], I32)],
            *[zeros(4), zeros(0)],
        ],
        [zeros(4, 4, 3), zeros(5, 2, 2, 4, 3)],
        ATTENTION,
        {3: 1},
    ),
    "jaxllm_rotate": ([zeros(3, 2, 8), zeros(3, 4), zeros(3, 4), COUNT], [zeros(3, 2, 8)], {"interleaved": False}),
    "jaxllm_rotate_qkv": (
        [zeros(3, 2, 4, 8), zeros(3, 4), zeros(3, 4), COUNT],
        [zeros(3, 4, 8), zeros(3, 2, 8), zeros(3, 2, 8)],
        {"interleaved": False},
    ),
    "jaxllm_gated_matmul": (
        [zeros(3, 4), zeros(4, 10), COUNT],
        [zeros(3, 5)],
        {"batch_invariant": False, "is_gelu": False},
    ),
    "jaxllm_gated": ([zeros(3, 2, 5), COUNT], [zeros(3, 5)], {"is_gelu": False}),
    "jaxllm_add": ([zeros(3, 5), zeros(3, 5), COUNT], [zeros(3, 5)], {}),
    "jaxllm_rms_norm": (
        [zeros(3, 5), zeros(3, 5), zeros(5), COUNT],
        [zeros(3, 5), zeros(3, 5)],
        {"eps": F32(1e-6), "unit_offset": False, "scales_first": False},
    ),
    "jaxllm_copy_blocks": ([zeros(3, 5), zeros(2, 2, dtype=I32)], [zeros(3, 5)], {}, {0: 0}),
    "jaxllm_normalize": ([zeros(3, 5), COUNT], [zeros(3), zeros(3)], {}),
    "jaxllm_draw": (
        [zeros(3, 5), zeros(3) + 1, zeros(3, dtype=I32), zeros(3) + 1, zeros(3), zeros(3, 2, dtype=np.uint32)],
        [zeros(3, dtype=I32), zeros(3)],
        {"partitionable": True},
    ),
    "jaxllm_best": (
        [zeros(3, 5), zeros(3, 5), zeros(3, 1, dtype=I32), COUNT],
        [zeros(3, 2, dtype=I32), zeros(3, 2), zeros(3, 3), zeros(3, 3, dtype=I32)],
        {},
    ),
}
# What may have another size: argument and axis.
FREE = {
    "jaxllm_panel_matmul": {(3, 1)},  # the last panel has room
    "jaxllm_paged_attention": {(3, 0), (3, 3), (4, 1)},  # blocks, their size, and how many of them a sequence has
    "jaxllm_copy_blocks": {(0, 0), (0, 1), (1, 1)},
    "jaxllm_normalize": {(0, 1)},
    "jaxllm_draw": {(0, 1)},
}


@pytest.mark.parametrize("target", CALLS)
def test_arrays_that_do_not_go_together_are_refused(target):
    """Of each array any axis one longer or shorter; what is accepted stays within the arrays."""
    arguments, results, options, *aliases = CALLS[target]
    aliases = aliases[0] if aliases else {}

    def run(arrays):
        arguments_of, results_of = arrays[: len(arguments)], arrays[len(arguments) :]
        shapes = [(x.shape, x.dtype) for x in results_of]
        return call(target, arguments_of, shapes, aliases=aliases, **options)

    def of_one_set():
        run([*arguments, *results])
        for i, array in enumerate([*arguments, *results]):
            if i - len(arguments) in aliases.values():
                continue
            for axis in range(array.ndim):
                for size in {array.shape[axis] + 1, max(array.shape[axis] - 1, 0)} - {array.shape[axis]}:
                    shape = (*array.shape[:axis], size, *array.shape[axis + 1 :])
                    changed = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
                    arrays = [*arguments, *results]
                    arrays[i] = changed
                    for argument, result in aliases.items():
                        arrays[len(arguments) + result] = arrays[argument]
                    if (i, axis) in FREE.get(target, ()) or (array is COUNT and size == 0):  # no count: all rows
                        run(arrays)
                    else:
                        with pytest.raises(ValueError, match=f"{target}|Wrong"):
                            run(arrays)

    with_each_set(of_one_set)
