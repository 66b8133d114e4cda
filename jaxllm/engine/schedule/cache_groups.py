"""Groups of layers whose cached values live equally long, and which share block tables therefore."""

from typing import NamedTuple


class CacheGroup(NamedTuple):
    """Layers that keep what a token may still read: of all tokens before it, or of the last ones.

    What a block of theirs holds takes `num_pages` pages of the pool, which are all of one size.
    """

    window: int | None = None  # tokens that a token reads, itself the last of them; None: all
    num_pages: int = 1
    is_state: bool = False  # a token's value is made of the one before it, in the same place while a block lasts

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that tokens from `position` on read."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int) -> int | None:
        """Blocks that a sequence needs at once for a step of `num_tokens` tokens, wherever in it they are. None: all
        that it has."""
        return None if self.window is None else -(-(self.window + num_tokens - 2) // block_size) + 1


EVERYTHING = (CacheGroup(),)  # all layers keep what they have of all tokens
