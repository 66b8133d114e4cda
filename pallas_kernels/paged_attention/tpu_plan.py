"""Tile sizes of the TPU kernel and what they cost: VMEM and SMEM before anything is compiled, HBM bytes of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

LANES = 128
# Of VMEM: the smallest of a chip that the kernel is for is 64 MiB (v5p, v7x; v5e and v6e have 128). The compiler needs
# some beside the buffers, for what does not fit the registers.
VMEM_BUDGET_BYTES = 44 << 20
VMEM_HEADROOM_BYTES = 12 << 20
SMEM_BUDGET_BYTES = 768 << 10  # of 1 MiB
DECODE_BUFFERS = 4  # tiles of keys in VMEM: one is attended to, the others are on their way
TABLE_ROWS = 8  # block tables in SMEM: those of tiles on their way, and two ahead; as the above a power of two


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tokens (keys, queries) a tile; `*_edge` is the part that is masked where a tile is not wholly visible."""

    decode_keys: int
    decode_edge: int
    queries: int  # positions that one pass over a chunk's keys covers, its new keys included
    sub_queries: int  # of them, those in one matrix product
    keys: int
    edge: int
    vmem_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Static sizes of a call; `head_dim` is a multiple of 128, itemsizes are bytes of a query and of a stored key."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    itemsize: int
    kv_itemsize: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def words(self) -> int:
        """Heads of 32 bit that hold a token's query heads, two bfloat16 heads in one; whole registers of 8."""
        return round_up(self.heads if self.itemsize == 4 else (self.heads + 1) // 2, 8)

    @property
    def new_words(self) -> int:
        """Heads of 32 bit that hold a token's new key and value heads: a bfloat16 key and its value in one."""
        return round_up(2 * self.kv_heads if self.itemsize == 4 else self.kv_heads, 8)

    @property
    def slices(self) -> int:
        """Rows of 128 lanes that a head takes: only rows of that width can be loaded with a stride."""
        return self.head_dim // LANES

    @property
    def rows(self) -> int:
        """Rows of 32 bit and 128 lanes of a token's queries."""
        return self.words * self.slices

    @property
    def new_rows(self) -> int:
        """Rows of 32 bit and 128 lanes of a token's new key and value."""
        return self.new_words * self.slices

    @property
    def unit(self) -> int:
        """Rows of a block that are written together: a tile of the memory's layout."""
        return 32 // self.kv_itemsize

    @property
    def decode_rows(self) -> int:
        """Query heads of a KV head, rounded up to whole registers."""
        return round_up(self.group, 8)

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key and value in the pool."""
        return 2 * self.kv_heads * self.head_dim * self.kv_itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's query, its output, and its new key and value, as the kernel moves them."""
        return (2 * self.words + self.new_words) * self.head_dim * 4


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def head_dim_in_pool(head_dim: int) -> int:
    return round_up(head_dim, LANES)


def decode_bytes(s: Shapes, keys: int) -> int:
    """VMEM of the decode phase."""
    rows = s.kv_heads * s.decode_rows
    tokens = DECODE_BUFFERS * (2 * s.words + s.new_words) * s.head_dim * 4
    state = rows * (2 * s.head_dim + 2 * LANES) * 4 + 2 * s.words * s.head_dim * 4
    return DECODE_BUFFERS * (keys + s.unit) * s.key_bytes + tokens + state


def mixed_bytes(s: Shapes, queries: int, keys: int) -> int:
    """VMEM of the phase for chunks."""
    rows = queries * s.heads
    tokens = 2 * queries * (s.words + s.new_words) * s.head_dim * 4
    state = rows * (s.head_dim * (4 + s.itemsize) + 2 * LANES * 4)
    return 2 * (keys + queries) * s.key_bytes + tokens + state


def pick_tiles(s: Shapes, budget_bytes: int = VMEM_BUDGET_BYTES) -> Tiles:
    """The tiles of a call, as large as pays and fits `budget_bytes` of VMEM; ValueError where none do.

    Decode: about 4096 rows of scores in one go (KV heads times keys), 2 MiB of bfloat16 keys and values in flight a
    buffer. Chunks: 256 queries read a key once, which takes as long as its matrix products on the chips with the
    highest ratio of the two; some 1024 rows of products side by side, so that one's softmax hides in another's product.
    """
    least = max(LANES, s.block_size)
    decode_keys = max(least, min(4096 // next_power(s.kv_heads), 4096))
    queries, keys = max(least, 256), max(least, 512)
    while decode_keys > least and decode_bytes(s, decode_keys) > budget_bytes:
        decode_keys //= 2
    while mixed_bytes(s, queries, keys) > budget_bytes and (keys > least or queries > least):
        if keys >= queries and keys > least:
            keys //= 2
        else:
            queries //= 2
    vmem_bytes = max(decode_bytes(s, decode_keys), mixed_bytes(s, queries, keys))
    if vmem_bytes > budget_bytes:
        raise ValueError(
            f"paged attention needs {vmem_bytes / 2**20:.1f} MiB of VMEM for the smallest tiles of {s}, and may take "
            f"{budget_bytes / 2**20:.1f}: shard the heads over more devices or use smaller blocks"
        )
    product_rows = 256 if s.kv_heads > 2 else 512  # of four heads at once, if there are so many
    sub_queries = min(queries, max(16, product_rows // next_power(s.group)))
    return Tiles(
        decode_keys=decode_keys,
        decode_edge=max(least, min(decode_keys // 2, 1024)),
        queries=queries,
        sub_queries=sub_queries,
        keys=keys,
        edge=min(keys, queries, max(least, 256)),
        vmem_bytes=vmem_bytes,
    )


def next_power(x: int) -> int:
    return 1 << (x - 1).bit_length()


def smem_bytes(seqs: int, blocks_per_seq: int) -> int:
    """SMEM of a call: lengths of all sequences and the block tables of some; ValueError where it does not fit."""
    table = 4 * round_up(blocks_per_seq, LANES)
    total = 4 * (2 * round_up(seqs + 1, LANES) + LANES) + TABLE_ROWS * table
    if total > SMEM_BUDGET_BYTES:
        raise ValueError(
            f"paged attention needs {total} bytes of SMEM for {seqs} sequences of up to {blocks_per_seq} blocks and "
            f"may take {SMEM_BUDGET_BYTES}: use larger blocks, or a smaller max_model_len or max_num_seqs"
        )
    return total


def bytes_moved(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    itemsize: int,
    kv_itemsize: int | None = None,
    sliding_window: int | None = None,
) -> int:
    """Bytes that the kernel reads and writes in HBM for sequences of these lengths (tokens of the step, all tokens).

    Leading sequences of one token count as decodes. `itemsize` is that of the queries, `kv_itemsize` (the same by
    default) the pool's.
    """
    s = Shapes(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim_in_pool(head_dim),
        block_size=block_size,
        itemsize=itemsize,
        kv_itemsize=kv_itemsize or itemsize,
    )
    window = sliding_window or max(kv_lens, default=0) + 1
    queries, block_bytes = pick_tiles(s).queries, block_size * s.key_bytes
    total, decoding = 4 * (2 * len(q_lens) + 3), True
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        decoding &= q_len == 1
        blocks = -(-kv_len // block_size)
        total += q_len * s.token_bytes + 4 * round_up(blocks, LANES)
        if decoding:
            total += (blocks - max(kv_len - window, 0) // block_size) * block_bytes + s.unit * s.key_bytes
            continue
        start = kv_len - q_len
        for at in range(start // block_size * block_size, kv_len, queries):
            first, last = max(at, start), min(at + queries, kv_len)
            read = max(at // block_size - max(first - window + 1, 0) // block_size, 0)
            old = (first > at) + (last % block_size > 0 and not (first > at and last - at < block_size))
            total += (read + old + -(-(last - at) // block_size)) * block_bytes
    return total
