"""Damaged and hostile files: an error that names the file and what is wrong, soon, and without much memory."""

import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint.gguf.reader import models_in, read_gguf
from jaxllm.errors import ModelFormatError
from tests.gguf_files import write

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
HUGE = 2**63


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(name: bytes = b"t", dims=(32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def file_of(pairs=(), tensors=(), *, version=3, num_keys=None, num_tensors=None, data=b"\0" * 256, magic=b"GGUF"):
    num_keys = len(pairs) if num_keys is None else num_keys
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    header = magic + u32(version) + u64(num_tensors) + u64(num_keys) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + data


SOUND = pair(b"general.architecture", STRING, text(b"llama"))
HOSTILE = {
    "empty": (b"", "takes 4 bytes, but 0 are left"),
    "no_gguf": (file_of(magic=b"GGML"), "does not begin with GGUF"),
    "version_1": (file_of(version=1), r"has version 1; little-endian versions \(2, 3\)"),
    "big_endian": (file_of(version=3 << 24), "is big-endian"),
    "keys": (file_of(num_keys=HUGE), "the number of keys is 9223372036854775808, more than"),
    "tensors": (file_of(num_tensors=HUGE), "the number of tensors is 9223372036854775808, more than"),
    "key": (file_of([u64(HUGE)]), "'a key' takes 9223372036854775808 bytes"),
    "string": (file_of([pair(b"k", STRING, u64(2**40))]), "'k' takes 1099511627776 bytes"),
    "strings": (file_of([pair(b"k", ARRAY, u32(STRING) + u64(2**40))]), "the length of k is 1099511627776"),
    "numbers": (file_of([pair(b"k", ARRAY, u32(UINT32) + u64(2**62))]), "the length of k is 4611686018427387904"),
    "wrapping": (file_of([pair(b"k", ARRAY, u32(UINT32) + u64(2**64 - 1))]), "the length of k is 18446744073709551615"),
    "nested": (file_of([pair(b"k", ARRAY, u32(ARRAY) * 50 + u64(1))]), "k is an array of arrays"),
    "type": (file_of([pair(b"k", 13, b"")]), "'k' has a value of the unknown type 13"),
    "array_type": (file_of([pair(b"k", ARRAY, u32(99) + u64(0))]), "'k' has a value of the unknown type 99"),
    "utf8": (file_of([pair(b"k", STRING, text(b"\xff\xfe"))]), "'k' holds .* not UTF-8"),
    "key_utf8": (file_of([pair(b"\xff", STRING, text(b""))]), "'a key' holds .* not UTF-8"),
    "boolean": (file_of([pair(b"k", BOOL, b"\2")]), "'k' has a boolean that is neither 0 nor 1"),
    "key_twice": (file_of([SOUND, SOUND]), "the key 'general.architecture' is there twice"),
    "alignment": (file_of([pair(b"general.alignment", UINT32, u32(48))]), "alignment=48 must be a power of two"),
    "alignment_0": (file_of([pair(b"general.alignment", UINT32, u32(0))]), "general.alignment=0 must be"),
    "alignment_text": (file_of([pair(b"general.alignment", STRING, text(b"32"))]), "alignment='32' must be an integer"),
    "no_dims": (file_of(tensors=[tensor(dims=())]), "'t' has 0 dimensions"),
    "dims": (file_of(tensors=[text(b"t") + u32(2**31)]), "'t' has 2147483648 dimensions"),
    "empty_dim": (file_of(tensors=[tensor(dims=(32, 0))]), r"'t' has shape \[0, 32\]"),
    "huge_dims": (file_of(tensors=[tensor(dims=(2**63, 2**63))]), "'t' .* ends behind the file's end"),
    "offset": (file_of(tensors=[tensor(offset=160)]), "'t' .* at offset 160 ends behind the file's end"),
    "huge_offset": (file_of(tensors=[tensor(offset=2**64 - 32)]), "ends behind the file's end"),
    "twice": (file_of(tensors=[tensor(), tensor(offset=128)]), "two tensors have one name"),
    "overlap": (file_of(tensors=[tensor(), tensor(b"u", offset=96)]), "the tensors 't' and 'u' overlap"),
    "half_block": (file_of(tensors=[tensor(dims=(33, 1), kind=8)]), "Q8_0 has rows of blocks of 32"),
    "vector_of_blocks": (file_of(tensors=[tensor(dims=(32,), kind=8)]), "Q8_0 has rows of blocks of 32"),
    "iq2": (file_of(tensors=[tensor(kind=16)]), "'t' has type IQ2_XXS, which is not supported; take a file with F32"),
    "no_type": (file_of(tensors=[tensor(kind=4000)]), "'t' has type number 4000, which is not supported"),
    "parts": (file_of([pair(b"split.count", UINT32, u32(3))]), "split.count=3 does not fit the file's name"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, case):
    data, message = HOSTILE[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(ModelFormatError, match=rf"(?s)model.gguf.*{message}"):
        read_gguf(file)
    assert time.perf_counter() - start < 1


def test_a_sound_file_and_each_of_its_beginnings(tmp_path):
    file = tmp_path / "model.gguf"
    tensors = {"a.weight": (np.arange(64, dtype=np.float32).reshape(2, 32), None)}
    metadata = {"x.n": 5, "x.f": 0.1, "x.s": "é", "x.b": True, "x.array": [1, 2], "x.strings": ["a", ""], "x.i": 2**31}
    data = write(file, "llama", metadata, tensors).read_bytes()
    found, stored = read_gguf(file)
    assert (found.integer("x.n"), found.number("x.f"), found.text("x.s"), found.flag("x.b")) == (5, 0.1, "é", True)
    assert found.numbers("x.array").tolist() == [1, 2] and found.strings("x.strings") == ["a", ""]
    assert stored["a.weight"].shape == (2, 32) and stored["a.weight"].num_bytes == 256
    with pytest.raises(ModelFormatError, match="x.s='é' must be an integer"):
        found.integer("x.s")
    with pytest.raises(ModelFormatError, match="x.b=True must be a number"):
        found.number("x.b")
    with pytest.raises(ModelFormatError, match="lacks the key x.z"):
        found.text("x.z")
    for length in range(0, len(data), 7):
        file.write_bytes(data[:length])
        with pytest.raises(ModelFormatError):
            read_gguf(file)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(tmp_path_factory, data):
    whole = file_of(
        [SOUND, pair(b"k", ARRAY, u32(STRING) + u64(2) + text(b"a") + text(b"bc")), pair(b"f", FLOAT32, b"\0\0\0\0")],
        [tensor(b"x", (32, 2)), tensor(b"y", (32, 1), 8, 256)],
        data=b"\0" * 320,
    )
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 321))
        changed[at] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "changed.gguf"
    file.write_bytes(changed)
    try:
        _, tensors = read_gguf(file)
    except ModelFormatError as error:
        assert str(file) in str(error)
        return
    for found in tensors.values():
        assert found.offset + found.num_bytes <= len(changed)


_LIMITED = """
import resource
import sys
from pathlib import Path
from jaxllm.checkpoint.gguf.reader import read_gguf
from jaxllm.errors import ModelFormatError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_gguf(Path(sys.argv[1]))
except ModelFormatError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_file_does_not_make_lengths_credible(tmp_path):
    """Ten gigabytes, nearly all of it a hole: what its header claims is still bounded."""
    file = tmp_path / "model.gguf"
    file.write_bytes(file_of([pair(b"k", STRING, u64(2**33))]))
    with file.open("r+b") as stream:
        stream.truncate(10 * 2**30)
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(file)], capture_output=True, text=True, check=True)
    message, kilobytes = done.stdout.splitlines()
    assert "'k' takes 8589934592 bytes" in message
    assert int(kilobytes) * 1024 < 2**26


def parts(folder, count=2, total=None, names=None):
    """A model in parts, as llama.cpp's gguf-split writes them."""
    files = []
    for i in range(count):
        name = f"m-{i + 1:05}-of-{count:05}.gguf"
        keys = {"split.no": i, "split.count": count, "split.tensors.count": total or count}
        tensors = {names[i] if names else f"t{i}.weight": (np.full((2, 32), i, np.float32), None)}
        files.append(write(folder / name, "llama", keys, tensors))
    return files


def test_a_model_in_parts(tmp_path):
    files = parts(tmp_path)
    _, tensors = read_gguf(files[0])
    assert [tensors[f"t{i}.weight"].file for i in range(2)] == files
    assert models_in(tmp_path) == files[:1]
    with pytest.raises(ModelFormatError, match="is a part of a model; give the first one, m-00001-of-00002.gguf"):
        read_gguf(files[1])
    files[1].unlink()
    with pytest.raises(ModelFormatError, match="m-00002-of-00002.gguf is missing"):
        read_gguf(files[0])


def test_parts_that_do_not_fit(tmp_path):
    with pytest.raises(ModelFormatError, match="split.tensors.count=5 but the 2 parts hold 2 tensors"):
        read_gguf(parts(tmp_path, total=5)[0])
    with pytest.raises(ModelFormatError, match="the tensor 't.weight' is there twice"):
        read_gguf(parts(tmp_path, names=["t.weight", "t.weight"])[0])
    file = parts(tmp_path)[0].rename(tmp_path / "n-00001-of-99999.gguf")
    with pytest.raises(ModelFormatError, match="one of 99999 parts"):
        read_gguf(file)
