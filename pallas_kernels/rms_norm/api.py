"""Root mean square normalisation (arXiv 1910.07467), with the addition that comes before it."""

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "", name="rms_norm", implementations=("reference", "native"), preferred={"cpu": ("native",)}
)


def rms_norm(
    x: Float[Array, "*t width"],
    added: Float[Array, "*t width"] | None,
    scale: Float[Array, " width"],
    *,
    eps: float,
    unit_offset: bool = False,
    scales_first: bool = False,
    fixed_order: bool = False,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> tuple[Float[Array, "*t width"], Float[Array, "*t width"]]:
    """See `reference.rms_norm`. Of flat tokens those from `num_tokens` on are padding, of which nothing is promised."""
    options = {"eps": eps, "unit_offset": unit_offset, "scales_first": scales_first, "fixed_order": fixed_order}
    chosen = OP.choose(implementation, placement, x, added, scale)
    return chosen(x, added, scale, num_tokens=num_tokens, placement=placement, **options)
