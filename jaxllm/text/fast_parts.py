"""Parts of the fast tokenizers that are built from other formats."""

from collections.abc import Mapping, Sequence

from tokenizers.processors import TemplateProcessing

SPACE = "▁"  # SentencePiece's letter for a space


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All merges of two pieces into a third one, best score first.

    Of equal scores SentencePiece takes the leftmost; in a run of one letter that is the longer left part.
    """
    merges = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]


def bos_and_eos(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> TemplateProcessing:
    """Puts the tokens, (text, id), before and after each text."""

    def sequence(name: str, segment: int) -> list[str]:
        parts = [*(token for token, _ in before), name, *(token for token, _ in after)]
        return [f"{part}:{segment}" for part in parts]

    return TemplateProcessing(
        single=sequence("$A", 0), pair=sequence("$A", 0) + sequence("$B", 1), special_tokens=[*{*before, *after}]
    )
