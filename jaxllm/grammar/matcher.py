"""The position of one sequence in its grammar. Masks of allowed next tokens have one bit per token, in int32 words."""

from collections.abc import Sequence
from typing import Any

# What errors of requests begin with whose grammar gives out.
GAVE_OUT = "its grammar can't be followed any further"
NO_TOKEN_ALLOWED = "no token of the model's is allowed by its grammar"  # noqa: S105 - no password


def mask_words(vocab: int) -> int:
    """The int32 words of one row's mask over `vocab` tokens."""
    return -(-vocab // 32)


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(self, inner: Any):
        self.inner = inner  # the library's matcher; this object owns it
        self._num_followed = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Consumes the tokens of `token_ids` that it has not consumed yet; `token_ids` are all of the sequence."""
        if len(token_ids) > self._num_followed:
            new, self._num_followed = token_ids[self._num_followed :], len(token_ids)
            self.inner.consume_tokens(list(new))

    def after(self, token: int) -> "Matcher":
        """A copy advanced by `token`."""
        copy = Matcher(self.inner.deep_copy())
        copy._num_followed = self._num_followed + 1
        copy.inner.consume_token(token)
        return copy

    @property
    def error(self) -> str | None:
        if not self.inner.is_error():
            return None
        return f"{GAVE_OUT}: {first_line(self.inner.get_error())}"

    @property
    def is_over(self) -> bool:
        """Whether only the end of sequence may follow, or the matcher failed (`error`)."""
        return self.inner.is_stopped()

    def ends_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the sequence is complete after these tokens."""
        self.follow(token_ids)
        return self.is_over

    @property
    def may_end(self) -> bool:
        return self.inner.is_accepting()


def first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:200]
