"""What differs between versions of JAX for those who compile and run executables."""

from typing import Any

import jax

Options = dict[str, Any] | None  # of XLA's compiler

# On a CPU: LLVM optimises nothing, and has one module, where it would set up 32 for as many threads, which takes longer
# than what is left to do in them. With JAX 0.10 fusions don't go through MLIR either; 0.12 has no other way.
QUICKLY: Options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


def takes_four_bits(executable: Any) -> Any:
    """The executable, which takes arrays of four bits.

    On a CPU, JAX before 0.12 does not say of such an array that it is packed, as it is and as executables want it, so
    that they would refuse it. It has no public switch for that.
    """
    if jax.__version_info__ < (0, 12):
        inner: Any = getattr(executable, "_executable", None)
        layouts = getattr(inner, "_xla_in_layouts", None)
        if layouts is not None:
            packed = [layout is not None and layout.sub_byte_element_size_in_bits == 4 for layout in layouts]
            inner._xla_in_layouts = [None if one else layout for one, layout in zip(packed, layouts, strict=True)]
    return executable
