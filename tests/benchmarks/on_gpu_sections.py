"""Sections for the tests of `scripts/on_gpu`: each does what its name says, in its own process."""

import os
import signal
import subprocess
import time


def good(record, small):
    record("small", small)
    record("pid", os.getpid())
    record("pid", 0)  # replaces it
    return "all is well"


def failing(record, small):
    record("before", 1)
    raise ValueError("three of four kernels are wrong")


def crashing(record, small):
    record("before", 2)
    os.kill(os.getpid(), signal.SIGSEGV)


def hanging(record, small):
    record("before", 3)
    record("child", subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)
