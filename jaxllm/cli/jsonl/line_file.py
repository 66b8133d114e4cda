"""A file of lines that are written completely or not at all."""

import fcntl
import os
import stat
import sys
from pathlib import Path


class LineFile:
    """Appends lines to a file, or to standard output for None. Raises `OSError` if the file can't be written, and
    `ValueError` if another process writes it."""

    def __init__(self, path: Path | None, *, reads: bool = False):
        self.path = path
        self.size: int | None = None  # end of the last complete line; None: no regular file
        self.fd: int | None = None
        if path is None:
            return
        self.fd = os.open(path, os.O_CREAT | os.O_APPEND | (os.O_RDWR if reads else os.O_WRONLY), 0o666)
        try:
            status = os.fstat(self.fd)
            if stat.S_ISREG(status.st_mode):
                self.size = status.st_size
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self.fd)
            raise ValueError(f"{path} is being written by another process; wait for it, or give another") from error
        except BaseException:
            os.close(self.fd)
            raise

    def truncate(self, size: int) -> None:
        assert self.fd is not None
        os.ftruncate(self.fd, size)
        self.size = size

    def write(self, line: bytes) -> None:
        """Appends `line`, which ends with a newline."""
        if self.fd is None:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        num_written = 0
        try:
            while num_written < len(line):
                num_written += os.write(self.fd, line[num_written:])
        except OSError as error:
            if self.size is not None:
                os.ftruncate(self.fd, self.size)  # a full disk wrote part of the line
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self.size is not None:
            self.size += len(line)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
