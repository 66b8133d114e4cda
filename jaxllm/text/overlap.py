"""Where the end of a text may be the beginning of a mark that later text completes."""


def overlap_start(text: str, mark: str) -> int:
    """The start of the longest end of `text` that is a proper beginning of `mark`; `len(text)` if there is none."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(text[start:]):
            return start
        start = text.find(mark[0], start + 1)
    return len(text)
