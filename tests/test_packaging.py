"""The folders install as one package, imports point one way, and commands start without jax."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import jaxllm.models.qwen3
from jaxllm.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "jaxllm": "jaxllm",
    "models": "jaxllm.models",
    "sharding": "jaxllm.sharding",
    "pallas_kernels": "jaxllm.pallas_kernels",
}


def sources() -> dict[str, Path]:
    """Module name -> file, of the whole package."""
    found = {}
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = file
    return found


def imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_pyproject_lists_every_package():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(tool["packages"])
    (root,) = tool["package-dir"].values()
    assert [path.name for path in (ROOT / root).iterdir() if path.suffix != ".egg-info"] == ["jaxllm"]
    for package in tool["packages"]:
        assert (ROOT / root / package.replace(".", "/") / "__init__.py").is_file(), package


def test_generic_names_stay_out_of_the_import_path():
    assert not {"models", "sharding", "pallas_kernels"} & set(sys.modules)


def test_all_folders_come_from_one_tree():
    home = Path(jaxllm.__file__).parents[1]
    assert Path(jaxllm.models.qwen3.__file__).is_relative_to(home)


NAMES_OF_VLLM = {  # that only import what programs for vLLM look for there
    "jaxllm.engine.arg_utils",
    "jaxllm.engine.async_llm_engine",
    "jaxllm.engine.llm_engine",
}


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("jaxllm.pallas_kernels", ["jaxllm.models", "jaxllm.sharding", "jaxllm.engine", "jaxllm.llm"]),
        ("jaxllm.sharding", ["jaxllm.models", "jaxllm.pallas_kernels", "jaxllm.engine", "jaxllm.llm"]),
        ("jaxllm.models", ["jaxllm.engine", "jaxllm.checkpoint", "jaxllm.llm", "jaxllm.text"]),
        ("jaxllm.checkpoint", ["jaxllm.engine", "jaxllm.llm", "jaxllm.hub"]),
        ("jaxllm.hub", ["jaxllm.engine", "jaxllm.llm", "jaxllm.server", "jaxllm.cli", "jax"]),
        ("jaxllm.text", ["jaxllm.engine", "jaxllm.llm", "jax"]),
        ("jaxllm.grammar", ["jaxllm.engine", "jaxllm.llm", "jaxllm.server", "jax"]),
        ("jaxllm.from_vllm", ["jaxllm.engine", "jaxllm.llm", "jaxllm.sampling_params", "jaxllm.text", "jax"]),
        ("jaxllm.engine", ["jaxllm.llm", "jaxllm.async_llm", "jaxllm.server", "jaxllm.cli"]),
        ("jaxllm.engine.schedule", ["jaxllm.engine.device", "jaxllm.engine.beam", "jaxllm.engine.engine"]),
        ("jaxllm.engine.beam", ["jaxllm.engine.device", "jaxllm.engine.engine"]),
        ("jaxllm.engine.device", ["jaxllm.engine.engine", "jaxllm.checkpoint", "jaxllm.text"]),
        ("jaxllm.async_llm", ["jaxllm.server"]),
        ("jaxllm.server.openai.parsing", ["jax", "jaxllm.engine", "jaxllm.llm"]),
    ],
)
def test_imports_point_one_way(layer, forbidden):
    modules = {name: file for name, file in sources().items() if name == layer or name.startswith(f"{layer}.")}
    assert modules
    modules = {name: file for name, file in modules.items() if name not in NAMES_OF_VLLM}
    for name, file in modules.items():
        for imported in imports(file):
            bad = [f for f in forbidden if imported == f or imported.startswith(f"{f}.")]
            assert not bad, f"{name} imports {imported}"


def test_serving_is_part_of_the_plain_install():
    """What the commands and the server import comes with `pip install .`, without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", needed)[0].lower().replace("-", "_") for needed in project["dependencies"]}
    declared = names | {"yaml"} if "pyyaml" in names else names
    extras = {"opentelemetry", "argcomplete", "matplotlib", "optax"}
    for name, file in sources().items():
        if name.startswith(("jaxllm.server", "jaxllm.cli")):
            roots = {imported.split(".")[0] for imported in imports(file)} - {"jaxllm"} - sys.stdlib_module_names
            assert roots <= declared | extras, name
    assert "serve" not in project["optional-dependencies"] and {"uvicorn", "starlette"} <= declared


def test_no_module_takes_pickles():
    for name, file in sources().items():
        if name not in ("jaxllm.convert.weights", "jaxllm.convert.shards"):  # in a process of their own
            assert not {"pickle", "cloudpickle", "dill", "torch"} & imports(file), name


def test_class_names_are_unique():
    homes: dict[str, list[str]] = {}
    for name, file in sources().items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(name)
    shared = {"Config", "DecoderLayer", "Model"}  # each architecture's file has its own
    assert not {name: where for name, where in homes.items() if len(where) > 1 and name not in shared}


JAX_FREE = [
    *("jaxllm.text", "jaxllm.grammar", "jaxllm.convert", "jaxllm.cli", "jaxllm.server.http", "jaxllm.server.openai"),
    *("jaxllm.server.observe", "jaxllm.server.page", "jaxllm.server.pooling", "jaxllm.server.server"),
    "jaxllm.server.served_model",
    *("jaxllm.server.engine.client", "jaxllm.server.engine.process_client", "jaxllm.server.engine.engine_process"),
    *("jaxllm.hub", "jaxllm.engine.intake", "jaxllm.checkpoint.files", "jaxllm.checkpoint.tensors"),
    *("jaxllm.from_vllm", "jaxllm.keyword_fields", "jaxllm.lora", "jaxllm.distributed", "jaxllm.utils"),
    *("jaxllm.checkpoint.generation_config", "jaxllm.sampling_params", "jaxllm.structured_outputs", "jaxllm.outputs"),
]
IN_THE_WORKER = {  # of conversions; they need packages of the `convert` extra
    "jaxllm.convert.byte_level_source",
    "jaxllm.convert.sentencepiece_source",
    "jaxllm.convert.shards",
    "jaxllm.convert.weights",
}


@pytest.mark.parametrize("layer", JAX_FREE)
def test_nothing_it_imports_imports_jax(layer):
    """Transitive: a process of its own imports the layer's modules and looks at what was loaded."""
    modules = sorted({name for name in sources() if f"{name}.".startswith(f"{layer}.")} - IN_THE_WORKER)
    assert modules
    code = f"""
import importlib, sys
for name in {modules!r}:
    if name.rpartition(".")[2] != "__main__":
        importlib.import_module(name)
        assert "jax" not in sys.modules, f"{{name}} imports jax"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("jaxllm", "jaxllm.generate", "jaxllm.bench", "jaxllm.chat", "jaxllm.convert", "jaxllm.serve", "jaxllm.eval"),
        *(f"jaxllm {command}" for command in COMMANDS),
    ],
)
def test_help_needs_no_jax(command):
    module, *arguments = command.split()
    code = f"""
import runpy, sys
sys.argv = ["x", *{arguments!r}, "--help"]
try:
    runpy.run_module({module!r}, run_name="__main__")
finally:
    assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def build(kind: str, tree: Path, out: Path) -> Path:
    """A `wheel` or `sdist` of the tree, without the native kernels, whose compiler is away."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=tree,
        capture_output=True,
        text=True,
        env=os.environ | {"CXX": "false"},
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this checkout, where builds leave what they want."""
    copy = tmp_path_factory.mktemp("tree") / "checkout"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "native-*.so")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    (copy / "pallas_kernels/native/native-0123456789abcdef.so").write_text("another environment's")
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """Built from the source distribution."""
    home = tmp_path_factory.mktemp("wheel")
    with tarfile.open(build("sdist", tree, home)) as sdist:
        sdist.extractall(home / "sdist", filter="data")
    (unpacked,) = (home / "sdist").iterdir()
    return build("wheel", unpacked, home)


@pytest.fixture(scope="module")
def editable(tree, tmp_path_factory):
    """The interpreter of an environment with an editable install of the tree, beside what this one has."""
    home = tmp_path_factory.mktemp("editable")
    venv.create(home / "env", with_pip=False)
    (site,) = (home / "env/lib").glob("python*/site-packages")
    with zipfile.ZipFile(build("editable", tree, home)) as wheel:
        wheel.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read there
    return home / "env/bin/python"


@pytest.mark.slow
def test_an_editable_install_is_a_path_to_a_folder_with_one_name(tree, editable):
    (pth,) = editable.parents[1].glob("lib/python*/site-packages/__editable__*")
    assert pth.read_text().strip() == str(tree / "src")
    assert {path.name for path in (tree / "src").iterdir()} <= {"jaxllm", "jaxllm.egg-info"}


@pytest.mark.slow
def test_an_editable_install_runs_from_anywhere(tree, editable, tmp_path):
    code = """
import importlib.util, multiprocessing, jaxllm, jaxllm.models, jaxllm.sharding, jaxllm.pallas_kernels
if __name__ == "__main__":
    print(jaxllm.__file__, jaxllm.__version__)
    assert not any(map(importlib.util.find_spec, ("models", "sharding", "pallas_kernels", "tests")))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(jaxllm.SamplingParams, (), {"n": 3}).n)
"""
    (tmp_path / "script.py").write_text(code)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    for arguments, text in (
        (["script.py"], f"{tree}/src/jaxllm/__init__.py 0.1.0\n3\n"),
        (["-m", "jaxllm.generate", "def f(", "--max-tokens", "8"], "def f("),
    ):
        done = subprocess.run([editable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith(text), done.stderr


@pytest.mark.slow
def test_type_checkers_find_an_editable_install(editable, tmp_path):
    """And none of the folders' own names."""
    (tmp_path / "script.py").write_text("""
import jaxllm.pallas_kernels.dispatch
from jaxllm import LLM, SamplingParams
from jaxllm.models import qwen3
from jaxllm.sharding.mesh import make_mesh
reveal_type(LLM)
reveal_type(qwen3.Model)
reveal_type(make_mesh)
reveal_type(jaxllm.pallas_kernels.dispatch.Op)
SamplingParams(tempperature=1)
import models
""")
    pyright = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(editable), "script.py"]
    done = subprocess.run(pyright, cwd=tmp_path, capture_output=True, text=True)
    found = [report["message"] for report in json.loads(done.stdout)["generalDiagnostics"]]
    assert [text.partition(" is ")[2].partition("(")[0] for text in found[:4]] == [
        '"type[LLM]"',
        '"type[Model]"',
        '"',
        '"type[Op]"',
    ]
    assert [text.partition(" could")[0] for text in found[4:]] == [
        'No parameter named "tempperature"',
        'Import "models"',
    ]


@pytest.mark.slow
def test_a_wheel_holds_each_module_once_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    modules = {
        name.replace("/__init__.py", ".py").removesuffix(".py").replace("/", ".")
        for name in names
        if name[-3:] == ".py"
    }
    assert modules == set(sources())
    assert {name.split("/")[0] for name in names} == {"jaxllm", "jaxllm-0.1.0.dist-info"}
    assert "jaxllm-0.1.0.dist-info/licenses/LICENSE" in names
    assert {"jaxllm/py.typed", "jaxllm/default_model/model.safetensors", "jaxllm/server/page/index.html"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
def test_an_installed_wheel_writes_text(wheel, tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    code = "import jaxllm.models; print(jaxllm.models.__file__)"
    for command, text in (
        ([sys.executable, "-c", code], str(tmp_path / "site")),
        ([sys.executable, "-m", "jaxllm.generate", "def f(", "--max-tokens", "8"], "def f("),
        ([str(tmp_path / "site/bin/jaxllm"), "--version"], "jaxllm 0.1.0"),
    ):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith(text), done.stderr
