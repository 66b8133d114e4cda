"""Which tokens sequences have, and how often: counted in the blocks of their history."""

from jaxtyping import Array, Bool, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "",
    name="count_tokens",
    implementations=("reference", "tpu"),
    preferred={"tpu": ("tpu",)},
    on_mesh={"tpu": ("tpu",)},
)


def count_tokens(
    history: Int[Array, "pages block_size"],
    block_table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    prompt_lens: Int[Array, " rows"],
    *,
    vocab: int,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> tuple[Bool[Array, "rows vocab"], Int[Array, "rows vocab"]]:
    """See `reference.count_tokens`. `placement` says where the tables are to lie."""
    given = history, block_table, lengths, prompt_lens
    return OP.choose(implementation, placement, *given, vocab=vocab)(*given, vocab=vocab)
