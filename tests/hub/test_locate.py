"""Names of the hub, against a hub of our own on this machine."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxllm.errors import DownloadError, ModelAccessError, ModelFormatError, ModelNotFoundError
from jaxllm.hub import download
from jaxllm.hub.cache import list_models
from jaxllm.hub.locate import locate
from tests.fake_hub import TOKEN

CONFIG = ["LICENSE", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
WEIGHTS = ["model-0.safetensors", "model-1.safetensors"]


def test_configuration_first_then_exactly_the_weights_of_the_index(hub, cache, files, capsys):
    snapshot = locate("org/tiny")
    commit = hub.repos["org/tiny"].refs["main"]
    assert snapshot == cache / "models--org--tiny/snapshots" / commit
    fetched = hub.fetched()
    assert sorted(fetched[: len(CONFIG)]) == CONFIG and sorted(fetched[len(CONFIG) :]) == WEIGHTS
    assert set(hub.fetched("HEAD")) <= set(CONFIG + WEIGHTS)
    assert all((snapshot / name).read_bytes() == files[name] for name in fetched)
    assert all(f"/resolve/{commit}/" in asked.path for asked in hub.asked if "/resolve/" in asked.path)
    said = capsys.readouterr().err
    assert f"org/tiny is commit {commit}: configuration and tokenizer" in said and "weights" in said


def test_modules_of_sentence_transformers_come_with_the_configuration(hub, files):
    wanted = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"]
    others = ["0_Transformer/model.safetensors", "2_Dense/pytorch_model.bin", "1_a/2_b/config.json", "onnx/config.json"]
    hub.add("org/tiny", files | {name: name.encode() for name in [*wanted, *others]})
    locate("org/tiny")
    fetched = hub.fetched()
    assert set(wanted) < set(fetched[: len(CONFIG + wanted)]) and not set(others) & set(fetched)


def test_what_is_there_is_not_fetched_again(hub):
    first = locate("org/tiny")
    hub.asked.clear()
    assert locate("org/tiny") == first
    assert len(hub.asked) == 1  # which commit main is
    hub.asked.clear()
    assert locate(f"org/tiny@{first.name}") == first
    assert hub.asked == []


def test_revisions(hub, files):
    newer = files | {"LICENSE": b"another"}
    hub.add("org/tiny", newer, "v2")
    assert (locate("org/tiny", revision="v2") / "LICENSE").read_bytes() == b"another"
    assert (locate("org/tiny") / "LICENSE").read_bytes() == files["LICENSE"]
    assert hub.fetched().count("model-0.safetensors") == 1  # both commits have the same
    with pytest.raises(ModelNotFoundError, match="no revision 'v3'"):
        locate("org/tiny@v3")


def test_the_commit_is_the_same_in_both_phases(hub, files, monkeypatch):
    """The repository moves on while the configuration is tried."""
    from jaxllm.text.tokenizer import Tokenizer

    old = hub.repos["org/tiny"].refs["main"]
    real = Tokenizer.from_dir

    def from_dir(folder):
        hub.add("org/tiny", {name: body + b" " for name, body in files.items()})
        return real(folder)

    monkeypatch.setattr(Tokenizer, "from_dir", from_dir)
    snapshot = locate("org/tiny")
    assert snapshot.name == old
    assert (snapshot / "model-1.safetensors").read_bytes() == files["model-1.safetensors"]


def test_a_single_file_of_weights(hub, files):
    config = {name: body for name, body in files.items() if name in CONFIG and "index" not in name}
    hub.add("org/one", config | {"model.safetensors": b"weights", "adapter_model.safetensors": b"no"})
    locate("org/one")
    assert hub.fetched()[-1] == "model.safetensors" and "adapter_model.safetensors" not in hub.fetched()


def test_templates_in_a_folder_come_along(hub, files):
    hub.add("org/tools", files | {"additional_chat_templates/tool_use.jinja": b"{{ 1 }}"})
    assert (locate("org/tools", weights=False) / "additional_chat_templates/tool_use.jinja").is_file()
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"config.json": b'{"architectures": ["TinyVisionModel"]}'}, "TinyVisionModel reads images"),
        ({"tokenizer.json": b"{}"}, "not a sound tokenizer"),
        ({"tokenizer.json": None, "tokenizer.model": b"x"}, "jaxllm.convert"),
        ({"model.safetensors.index.json": b"[]"}, "not a JSON object"),
        ({"model-1.safetensors": None}, "needs model-1.safetensors, which the repository lacks"),
    ],
)
def test_what_can_not_be_served_is_refused_before_any_weights(hub, files, changes, match):
    changed = {name: body for name, body in (files | changes).items() if body is not None}
    hub.add("org/other", changed)
    with pytest.raises(ModelFormatError, match=match):
        locate("org/other")
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_large_files_beside_the_configuration_stay_there(hub, files):
    hub.add("org/other", files | {"results.json": b"{}"}).listed["results.json"] = 10**9
    locate("org/other")
    assert "results.json" not in hub.fetched()


def test_a_tokenizer_of_the_users_own_replaces_a_missing_one(hub, files):
    hub.add("org/other", {name: body for name, body in files.items() if name != "tokenizer.json"})
    assert locate("org/other", tokenizer=False).is_dir()


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["config.json", "pytorch_model.bin", "modeling_tiny.py"], r"pickled weights.*jaxllm convert SRC OUT"),
        (["README.md"], "has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], r"is an adapter \(LoRA\).*merge_and_unload"),
        (["config.json", "adapter_model.safetensors"], "neither model.safetensors nor.*adapter_model.safetensors"),
        (["config.json", "a.Q4.gguf", "b.Q8.gguf"], r"name one, as in org/other:a.Q4.gguf"),
    ],
)
def test_repositories_without_weights_to_read(hub, names, match):
    hub.add("org/other", dict.fromkeys(names, b"{}"))
    with pytest.raises(ModelFormatError, match=match):
        locate("org/other")
    assert hub.fetched("GET") == hub.fetched("HEAD") == []


@pytest.mark.parametrize(
    "hostile", ["../evil.safetensors", "/etc/evil.safetensors", "C:evil.safetensors", "x/y.safetensors"]
)
def test_an_index_with_a_hostile_name(hub, files, hostile):
    index = json.dumps({"weight_map": {"a": "model-0.safetensors", "b": hostile}}).encode()
    hub.add("org/evil", files | {"model.safetensors.index.json": index, hostile: b"evil"})
    with pytest.raises(ModelFormatError, match="must be a .*safetensors file beside it"):
        locate("org/evil")
    assert not [name for name in hub.fetched() if "safetensors" in name and "index" not in name]


def test_a_gguf_model_in_parts(hub, cache):
    parts = [f"sub/big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    hub.add("org/big", {part: part.encode() for part in parts} | {"other.gguf": b"no"})
    first = locate(f"org/big:{parts[0]}")
    assert sorted(hub.fetched()) == parts
    assert [(first.parent / part.split("/")[1]).is_file() for part in parts] == [True] * 3
    assert locate(f"org/big:{parts[0]}") == first and len(hub.fetched()) == 3
    with pytest.raises(ModelFormatError, match="give the first one, big-00001-of-00003.gguf"):
        locate(f"org/big:{parts[1]}")
    hub.add("org/part", {parts[0]: b"GGUF"})
    with pytest.raises(ModelFormatError, match="needs sub/big-00002-of-00003.gguf, sub/big-00003-of-00003.gguf, which"):
        locate(f"org/part:{parts[0]}")


def test_a_gguf_file(hub, cache):
    hub.add("org/quantised", {"sub/a.Q4.gguf": b"GGUF", "a.Q8.gguf": b"no", "config.json": b"{}"})
    path = locate("org/quantised:sub/a.Q4.gguf")
    assert path.read_bytes() == b"GGUF" and path.name == "a.Q4.gguf" and path.is_relative_to(cache)
    assert hub.fetched() == ["sub/a.Q4.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"no file b.gguf; of that kind it has a.Q8.gguf, sub/a.Q4.gguf"):
        locate("org/quantised:b.gguf")


def test_a_gated_repository(hub, cache, monkeypatch, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    hub.repos["org/tiny"].is_gated = True
    with pytest.raises(ModelAccessError, match=rf"accept its licence at {hub.url}/org/tiny.*hf auth login.*HF_TOKEN"):
        locate("org/tiny")
    assert not list(cache.rglob("*.json"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert locate("org/tiny").is_dir()
    assert {asked.authorization for asked in hub.asked} == {None, f"Bearer {TOKEN}"}
    assert TOKEN not in caplog.text and TOKEN not in "".join(capsys.readouterr())


def test_a_missing_repository(hub):
    with pytest.raises(ModelNotFoundError, match="no directory org/missing here.*spelling"):
        locate("org/missing")


def test_a_cut_connection_goes_on_where_it_was(hub, files):
    hub.repos["org/tiny"].cuts["model-1.safetensors"] = 1
    snapshot = locate("org/tiny")
    ranges = [
        asked.range for asked in hub.asked if asked.path.endswith("model-1.safetensors") and asked.method == "GET"
    ]
    first, second = ranges
    assert first is None and 0 < int(second.removeprefix("bytes=").removesuffix("-")) < len(
        files["model-1.safetensors"]
    )
    assert (snapshot / "model-1.safetensors").read_bytes() == files["model-1.safetensors"]


def test_a_connection_that_is_cut_for_good(hub, files, cache):
    repo = hub.repos["org/tiny"]
    repo.cuts["model-1.safetensors"] = 1000
    with pytest.raises(DownloadError, match="connection was cut while org/tiny.*run the same command again"):
        locate("org/tiny")
    repo.cuts.clear()
    hub.asked.clear()
    assert (locate("org/tiny") / "model-1.safetensors").read_bytes() == files["model-1.safetensors"]
    assert "model-1.safetensors" in hub.fetched() and "config.json" not in hub.fetched()


def test_ctrl_c_ends_a_slow_download(hub, cache, monkeypatch):
    hub.repos["org/tiny"].slow.add("model-1.safetensors")

    def interrupted(futures):
        while "model-1.safetensors" not in hub.fetched():
            if all(future.done() for future in futures):  # the configuration
                return list(futures)
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "as_completed", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        locate("org/tiny")
    assert time.monotonic() - start < 5  # of 10 seconds and more
    assert not list(cache.rglob("model-1.safetensors")) and not list(cache.rglob("*.incomplete"))


def test_a_body_of_a_wrong_size(hub):
    hub.repos["org/tiny"].short.add("model-0.safetensors")
    with pytest.raises(DownloadError, match="wrong size.*run the same command again"):
        locate("org/tiny")
    hub.repos["org/tiny"].short.clear()
    assert locate("org/tiny").is_dir()


def test_a_file_of_another_size_than_was_listed(hub, files):
    hub.repos["org/tiny"].listed["model-0.safetensors"] = 5
    with pytest.raises(DownloadError, match="came with .* bytes in place of 5, and was dropped"):
        locate("org/tiny")
    hub.repos["org/tiny"].listed.clear()
    assert (locate("org/tiny") / "model-0.safetensors").read_bytes() == files["model-0.safetensors"]


def test_a_truncated_file_in_the_cache_is_replaced(hub, files):
    stored = locate("org/tiny") / "model-0.safetensors"
    stored.resolve().write_bytes(b"short")
    assert (locate("org/tiny") / "model-0.safetensors").read_bytes() == files["model-0.safetensors"]


def test_a_disk_that_is_too_small(hub, files, monkeypatch, cache):
    config = sum(len(files[name]) for name in CONFIG)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, config))
    with pytest.raises(DownloadError, match="needs .* kB more on the disk of .* free some .*--download-dir"):
        locate("org/tiny")
    assert sorted(hub.fetched()) == CONFIG


def test_offline(hub, offline, cache):
    there = locate("org/tiny")
    hub.asked.clear()
    offline()
    assert locate("org/tiny") == there
    with pytest.raises(ModelNotFoundError, match=rf"HF_HUB_OFFLINE.*Of org/tiny it has {there.name} \(main\)"):
        locate("org/tiny@v2")
    with pytest.raises(ModelNotFoundError, match="It has nothing of org/other"):
        locate("org/other")
    assert hub.asked == []


def test_offline_a_part_is_not_enough(hub, offline, cache):
    snapshot = locate("org/tiny")
    (snapshot / "model-1.safetensors").unlink()
    offline()
    with pytest.raises(ModelNotFoundError, match="org/tiny is not complete"):
        locate("org/tiny")
    assert [model.is_complete for model in list_models(cache)] == [False]


def test_without_a_network_the_cache_is_used_and_said(hub, caplog, monkeypatch):
    from huggingface_hub import constants

    there = locate("org/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port of "discard", where nobody listens
    assert locate("org/tiny") == there
    assert "can't be reached" in caplog.text and "may not be the newest" in caplog.text
    with pytest.raises(DownloadError, match="can't be reached.*Check the network"):
        locate("org/other")


def test_a_hub_that_is_down(hub, caplog):
    hub.status = 503
    with pytest.raises(DownloadError, match="HTTP 503 for org/tiny; wait a little"):
        locate("org/tiny")
    hub.status = None
    there = locate("org/tiny")
    hub.status = 503
    assert locate("org/tiny") == there
    assert "HTTP 503" in caplog.text and "may not be the newest" in caplog.text


def test_what_is_no_hub(hub, monkeypatch):
    for hub.status in (404, 418):
        with pytest.raises(DownloadError, match=f"HTTP {hub.status} for org/tiny, as no hub does"):
            locate("org/tiny")


def test_a_commit_that_is_none(hub, cache):
    repo = hub.repos["org/tiny"]
    (files,) = repo.commits.values()
    repo.commits["../../.."], repo.refs["main"] = files, "../../.."
    with pytest.raises(DownloadError, match=r"gives '../../..' as the commit of org/tiny"):
        locate("org/tiny")
    assert not hub.fetched()


def test_a_token_that_is_refused(hub):
    hub.status = 403
    with pytest.raises(ModelAccessError, match=r"refuses org/tiny \(HTTP 403\).*token"):
        locate("org/tiny")


def test_a_mirror_that_tells_no_sizes(hub, files):
    hub.repos["org/tiny"].tells_sizes = False
    assert (locate("org/tiny") / "model-0.safetensors").read_bytes() == files["model-0.safetensors"]


def test_a_directory_of_the_users_choice(hub, tmp_path, cache):
    assert locate("org/tiny", download_dir=tmp_path / "mine").is_relative_to(tmp_path / "mine")
    assert not cache.exists()


def test_a_directory_that_can_not_be_one(hub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="org/tiny can't be stored .*--download-dir"):
        locate("org/tiny", download_dir=tmp_path / "file")


def test_a_disk_that_fills_up(hub, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "hf_hub_download", full)
    with pytest.raises(DownloadError, match="disk became full while org/tiny"):
        locate("org/tiny")


def test_what_is_no_name_passes_through(tmp_path):
    assert locate(None) is None and locate(tmp_path) == tmp_path and locate(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="is no name"):
        locate(tmp_path, revision="v2")


def test_two_processes_fetch_each_file_once(hub, files, cache):
    code = "from jaxllm.hub.locate import locate; print(locate('org/tiny'))"
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    root = Path(__file__).parents[2]
    start = dict(stdout=subprocess.PIPE, text=True, env=os.environ | variables, cwd=root)
    hub.meeting = threading.Barrier(2)
    processes = [subprocess.Popen([sys.executable, "-c", code], **start) for _ in range(2)]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    assert sorted(hub.fetched()) == sorted(CONFIG + WEIGHTS)
    assert all((Path(first.strip()) / name).read_bytes() == files[name] for name in CONFIG + WEIGHTS)
