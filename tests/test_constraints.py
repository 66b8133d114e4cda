"""What deployments install is locked: each package with version and hashes, and all that our own asks for."""

import importlib.metadata
import importlib.util
import re
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "deploy").glob("constraints-*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVICES, PYTHONS = ("cpu", "cuda12", "cuda13", "tpu"), ("3.11", "3.12")
LINE = re.compile(r"([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def locked(file: Path) -> dict[str, str]:
    """Name -> version. Nothing else may be in the file, but for comments."""
    text = file.read_text()
    found = LINE.findall(text)
    assert not LINE.sub("", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)), "something is not pinned with hashes"
    assert len({name for name, _, _ in found}) == len(found)
    return {name: version for name, version, _ in found}


def wanted(requirements, python: str) -> list[Requirement]:
    where = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    found = [Requirement(text) for text in requirements]
    return [one for one in found if one.marker is None or one.marker.evaluate(where | {"platform_system": "Linux"})]


def test_there_is_one_for_each_kind_of_device_and_each_python():
    assert {file.name for file in FILES} == {f"constraints-{d}-py{p}.txt" for d in DEVICES for p in PYTHONS}
    assert set(DEVICES) - {"cpu"} <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_dependency_is_locked_in_its_range(file):
    devices, python = re.fullmatch(r"constraints-(\w+)-py([\d.]+)\.txt", file.name).groups()
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["otel"], *extras.get(devices, ()), "setuptools>=77"]
    versions = locked(file)
    for requirement in wanted(asked, python):
        name = canonicalize_name(requirement.name)
        assert name in versions and requirement.specifier.contains(versions[name]), requirement
    assert not re.search(r"https?:|--index|--extra|--find|@", file.read_text()), "it names an index"


@pytest.mark.parametrize("file", [file for file in FILES if "cpu" in file.name], ids=lambda file: file.name)
def test_what_they_need_in_turn_is_locked_too(file):
    """As far as the packages of this environment say."""
    versions, num_asked = locked(file), 0
    for name in versions:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.metadata.version(name) != versions[name]:
            continue
        for requirement in wanted(needs, file.stem.rpartition("-py")[2]):
            num_asked += 1
            needed = canonicalize_name(requirement.name)
            assert needed in versions and requirement.specifier.contains(versions[needed]), f"{name}: {requirement}"
    assert num_asked > 10


@pytest.fixture(scope="module")
def audit():
    loader = SourceFileLoader("audit", str(ROOT / ".ci" / "audit"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("audit", loader))
    loader.exec_module(module)
    return module


FINE = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "no answer"}


def test_an_audit_that_asked_nobody_has_not_passed(audit):
    assert audit.judge({"f": [FINE]})[1] == 0
    assert audit.judge({"f": [FINE, UNKNOWN]})[1] == audit.judge({"f": None})[1] == audit.judge({})[1] == 75
    lines, code = audit.judge({"f": [FINE, UNKNOWN], "g": [FLAWED]})
    assert code == 1 and "  b 2: CVE-1, mended in 3" in lines and any("NOT AUDITED" in line for line in lines)
