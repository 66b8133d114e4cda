import re
import subprocess
import sys

import pytest

from jaxllm.cli import models
from jaxllm.hub import package_index
from jaxllm.hub.cache import cached_names
from jaxllm.hub.locate import locate


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = models.main(arguments)
    return code, *capsys.readouterr()


def test_pull_prints_where_the_model_is(hub, cache, capsys):
    code, out, err = run(capsys, "pull", "org/tiny")
    assert code == 0 and out.strip() == str(locate("org/tiny")) and "weights" in err


def test_pull_of_what_can_not_be_had(hub, capsys):
    code, out, err = run(capsys, "pull", "org/missing")
    assert (code, out) == (2, "") and err.startswith("error: there is no directory org/missing here")
    code, _, err = run(capsys, "pull", "tiny")
    assert code == 2 and "org/name@revision" in err
    locate("org/tiny")
    capsys.readouterr()
    assert "In the cache: org/tiny" in run(capsys, "pull", "tiny")[2]


def test_ls(hub, files, capsys, cache):
    assert run(capsys, "ls") == (0, "", f"no models in {cache}; fetch one with: jaxllm models pull NAME\n")
    hub.add("org/tiny", files | {"LICENSE": b"another"}, "v2")
    hub.add("org/quantised", {"a.gguf": b"GGUF"})
    for name in ("org/tiny", "org/tiny@v2", "org/quantised:a.gguf"):
        locate(name)
    locate("org/tiny@main", weights=False, download_dir=cache.with_name("elsewhere"))
    capsys.readouterr()
    heading, *rows = run(capsys, "ls")[1].splitlines()
    assert heading.split() == ["NAME", "REVISION", "SIZE", "LAST", "USED"]
    day = r"\d{4}-\d\d-\d\d"
    kinds = [re.sub(day, "DAY", re.sub(r"\b[0-9a-f]{12}\b", "HASH", " ".join(row.split()))) for row in rows]
    assert kinds[0] == "org/quantised main HASH 4 bytes DAY"
    assert sorted(kinds[1:]) == ["org/tiny main HASH 65.3 kB DAY", "org/tiny v2 HASH 65.3 kB DAY"]
    (row,) = run(capsys, "ls", "--download-dir", str(cache.with_name("elsewhere")))[1].splitlines()[1:]
    assert "kB, incomplete" in row


def test_ls_says_what_it_leaves_out(hub, capsys, cache, caplog):
    locate("org/tiny")
    (cache / "models--org--broken/blobs").mkdir(parents=True)
    assert len(run(capsys, "ls")[1].splitlines()) == 2
    assert "damaged" in caplog.text and "models--org--broken" in caplog.text


def test_rm_leaves_a_copy_of_the_repository(hub, files, capsys, cache):
    names = ("a/tiny", "org/tiny", "z/tiny")
    for name in names:
        hub.add(name, files)
        locate(name)
    assert len({locate(name).name for name in names}) == 1, "they have one commit"
    assert run(capsys, "rm", "org/tiny", "--yes")[0] == 0
    assert [(cache / f"models--{name.replace('/', '--')}").exists() for name in names] == [True, False, True]


def test_rm(hub, files, capsys, cache):
    hub.add("org/tiny", files | {"LICENSE": b"another"}, "v2")
    newer = locate("org/tiny@v2")
    older = locate("org/tiny")
    capsys.readouterr()
    assert run(capsys, "rm", "org/tiny@v2", "--yes") == (0, "org/tiny@v2: frees 7 bytes\n", "")
    assert older.is_dir() and not newer.exists()
    assert run(capsys, "rm", f"org/tiny@{older.name[:8]}", "--yes")[0] == 0
    assert not older.exists() and cached_names(cache) == []
    code, _, err = run(capsys, "rm", "org/tiny", "--yes")
    assert code == 2 and "org/tiny is not in" in err


@pytest.mark.parametrize(("answer", "is_gone"), [("y", True), ("", False), ("no", False)])
def test_rm_asks(hub, capsys, monkeypatch, answer, is_gone):
    there = locate("org/tiny")
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert models.main(["rm", "org/tiny"]) == int(not is_gone)
    assert asked == ["Remove org/tiny, which frees 65.3 kB? [y/N] "]
    assert there.exists() != is_gone


def test_rm_with_nobody_to_ask_and_of_other_things(hub, capsys, tmp_path, monkeypatch):
    there = locate("org/tiny")
    monkeypatch.setattr(sys, "stdin", None)
    for arguments, match in (
        (["org/tiny"], "add --yes"),
        ([str(tmp_path), "--yes"], "no name that ls prints"),
        (["org/tiny:a.gguf", "--yes"], "no name that ls prints"),
        (["org/tiny@v9", "--yes"], r"means 0 revisions; of org/tiny there are \w{40} \(main\)"),
        (["smollm2", "--yes"], "smollm2 is not on this machine"),
    ):
        code, _, err = run(capsys, "rm", *arguments)
        assert code == 2 and re.search(match, err)
    assert there.is_dir()


def test_jax_is_not_needed(hub, cache):
    code = f"""
import sys
from jaxllm.cli import models
assert models.main(["ls", "--download-dir", {str(cache)!r}]) == 0
assert "jax" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def test_the_packaged_model_is_listed_and_removed(environment, capsys, tmp_path):
    model = package_index.MODELS["smollm2"]
    file = package_index.folder_of("smollm2", None) / model.file
    file.parent.mkdir(parents=True)
    with file.open("wb") as out:
        out.truncate(model.num_bytes)  # a hole
    assert run(capsys, "ls")[1].splitlines()[1].split()[:4] == ["smollm2", "0.1.2", "98.4", "MB"]
    assert run(capsys, "rm", "smollm2", "--yes") == (0, "smollm2: frees 98.4 MB\n", "")
    assert not file.exists()
