"""What differs between versions of JAX for those who run executables."""

from typing import Any

import jax


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
