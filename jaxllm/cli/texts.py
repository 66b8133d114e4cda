"""Texts that were typed, and errors in words."""

import errno
import os

_REASONS = {
    errno.ENOENT: "does not exist; check the path",
    errno.EACCES: "may not be opened by this user; change its permissions, or give another",
    errno.EISDIR: "is a directory; give a file",
    errno.ENOTDIR: "is no path, as a part of it is a file; check the path",
    errno.ENOSPC: "can't be written, as the disk is full",
}


def as_utf8(text: str) -> str:
    """What was typed, where the locale made half surrogates of it: terminals and shells give UTF-8, but under LC_ALL=C
    Python expects ASCII. Raises `ValueError` for bytes that are not UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(text).decode()
    except UnicodeError as error:
        raise ValueError(f"{text!r:.100} is not UTF-8 text; set a locale with UTF-8, as in LC_ALL=C.UTF-8") from error


def error_text(error: Exception) -> str:
    """An error's message for users: of the operating system's, its file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        reason = _REASONS.get(error.errno or 0, f"can't be used: {error.strerror}")
        return f"{os.fspath(error.filename) if isinstance(error.filename, os.PathLike) else error.filename} {reason}"
    return str(error)
