"""Rotary position embeddings of heads (arXiv 2104.09864)."""

from jaxtyping import Array, Float, Float32, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

ROTATE, ROTATE_QKV = (
    Op(package=__package__ or "", name=name, implementations=("reference", "native"), preferred={"cpu": ("native",)})
    for name in ("rotate", "rotate_qkv")
)


def rotate(
    x: Float[Array, "*t heads head_dim"],
    sin: Float32[Array, "*t 1 pairs"],
    cos: Float32[Array, "*t 1 pairs"],
    *,
    interleaved: bool = False,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "*t heads head_dim"]:
    """See `reference.rotate`. Of flat tokens those from `num_tokens` on are padding, whose results may be anything."""
    chosen = ROTATE.choose(implementation, placement, x, sin, cos)
    return chosen(x, sin, cos, interleaved=interleaved, num_tokens=num_tokens)


def rotate_qkv(
    qkv: Float[Array, "*t kv_heads members head_dim"],
    sin: Float32[Array, "*t 1 pairs"],
    cos: Float32[Array, "*t 1 pairs"],
    *,
    interleaved: bool = False,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> tuple[
    Float[Array, "*t heads head_dim"], Float[Array, "*t kv_heads head_dim"], Float[Array, "*t kv_heads head_dim"]
]:
    """See `reference.rotate_qkv`. Of flat tokens those from `num_tokens` on are padding, whose results may be
    anything."""
    chosen = ROTATE_QKV.choose(implementation, placement, qkv, sin, cos)
    return chosen(qkv, sin, cos, interleaved=interleaved, num_tokens=num_tokens)
