"""Deploy files: the checkers of Kubernetes, Docker and the shell accept them, and our own parser their commands."""

import copy
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from math import prod

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from jaxllm.cli.serve_options import make_parser
from jaxllm.server.http.middleware import PUBLIC_PATHS
from tests.fake_server import running
from tests.test_docs import command_lines
from tests.test_packaging import FOLDERS, ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
SCRIPT = DEPLOY / "slurm" / "serve.sbatch"
KUBERNETES = "1.34"
# https://lws.sigs.k8s.io, v1: the names that we use, of those that there are
LEADER_WORKER_SET = {
    "replicas": int,
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    "rolloutStrategy": {
        "type": {"RollingUpdate"},
        "rollingUpdateConfiguration": {"maxUnavailable": int, "maxSurge": int},
    },
    "leaderWorkerTemplate": {
        "size": int,
        "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
        "leaderTemplate": "pod",
        "workerTemplate": "pod",
    },
}
by_name = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)


def documents(file):
    return list(yaml.safe_load_all(file.read_text()))


OBJECTS = {f"{file.stem}-{one['kind']}": one for file in MANIFESTS for one in documents(file)}
(SLICE,) = [one for one in OBJECTS.values() if one["kind"] == "LeaderWorkerSet"]


def check(found, wanted=LEADER_WORKER_SET):
    """Raises for what is no part of a LeaderWorkerSet."""
    if wanted == "pod":
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **found}, KUBERNETES, strict=True)
    elif isinstance(wanted, dict):
        assert isinstance(found, dict) and not found.keys() - wanted.keys()
        for name, part in found.items():
            check(part, wanted[name])
    else:
        assert isinstance(found, wanted) if isinstance(wanted, type) else found in wanted


def validate(one):
    if one["kind"] == "LeaderWorkerSet":
        assert one["apiVersion"] == "leaderworkerset.x-k8s.io/v1" and set(one) == {*one} & {
            *"apiVersion kind metadata spec".split()
        }
        check(one["spec"])
    else:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def templates() -> dict:
    """Of pods, by name."""
    group = SLICE["spec"]["leaderWorkerTemplate"]
    found = {name: one["spec"]["template"] for name, one in OBJECTS.items() if one["kind"] == "Deployment"}
    return found | {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}


def parsed(words):
    """The options of a `jaxllm serve`, which ends the test if they are wrong."""
    return make_parser().parse_args(words)


# Kubernetes


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_fit_their_schemas(name):
    validate(OBJECTS[name])


@pytest.mark.parametrize("template", ["leaderTemplate", "workerTemplate"])
def test_a_wrong_field_is_noticed(template):
    wrong = copy.deepcopy(SLICE)
    (container,) = wrong["spec"]["leaderWorkerTemplate"][template]["spec"]["containers"]
    container["readynessProbe"] = {"httpGet": {"path": "/ready", "port": "http"}}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        validate(wrong)
    wrong = copy.deepcopy(SLICE)
    wrong["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    with pytest.raises(AssertionError):
        validate(wrong)


@pytest.mark.parametrize("name", templates())
def test_pods_run_a_command_that_there_is(name):
    spec = templates()[name]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["jaxllm", "serve"]
    given = {one["name"]: one for one in container["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda match: given[match[1]] and "10.0.0.1", word) for word in container["args"]]
    arguments = parsed(words)
    assert arguments.host == "0.0.0.0" and "JAXLLM_API_KEY" in given, "open, and without a key"
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(mounts) == {one["name"] for one in spec["volumes"]}
    assert {"/cache", "/dev/shm"} <= set(mounts.values())  # noqa: S108 - where a volume is mounted
    security = container["securityContext"]
    assert not security["allowPrivilegeEscalation"] and "privileged" not in security
    (chips,) = [int(n) for resource, n in container["resources"]["limits"].items() if "/" in resource]
    is_group = name in ("leader", "worker")
    num_hosts = SLICE["spec"]["leaderWorkerTemplate"]["size"] if is_group else 1
    assert arguments.tensor_parallel_size == chips * num_hosts
    if is_group:
        topology = spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        assert prod(map(int, topology.split("x"))) == chips * num_hosts
        (secret,) = [one for one in spec["volumes"] if "secret" in one]
        folder, key = arguments.cluster_secret_file.rsplit("/", 1)
        assert mounts["secrets"] == folder and secret["secret"]["items"] == [{"key": key, "path": key}]
        assert arguments.cluster == "tpu" and arguments.bind == "10.0.0.1"
    if name != "worker":
        assert container["ports"] == [{"name": "http", "containerPort": arguments.port}]
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        paths = {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
        assert probes == {kind: {"path": path, "port": "http"} for kind, path in paths.items()}
        assert PUBLIC_PATHS >= set(paths.values()), "probes have no key"
        pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] >= pause_s + arguments.shutdown_timeout + 10


def test_all_hosts_of_a_slice_run_the_same():
    leader, worker = (copy.deepcopy(templates()[role]) for role in ("leader", "worker"))
    assert leader["metadata"]["labels"].pop("role") == "leader" and worker["metadata"]["labels"].pop("role") == "worker"
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
        del leader["spec"]["containers"][0][name]  # of HTTP, which the leader alone serves
    assert leader == worker


def test_services_lead_to_pods():
    pods = {name: template["metadata"]["labels"] for name, template in templates().items()}
    for role in ("leader", "worker"):  # to which the controller adds this one
        pods[role] |= {"leaderworkerset.sigs.k8s.io/name": SLICE["metadata"]["name"]}
    for one in OBJECTS.values():
        if one["kind"] == "Service":
            assert sum(one["spec"]["selector"].items() <= labels.items() for labels in pods.values()) == 1
            assert one["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


# Slurm


@pytest.mark.parametrize("command", [["bash", "-n"], ["shellcheck"]], ids=lambda command: command[0])
def test_the_script_is_a_script(command):
    ran = subprocess.run([tool(command[0]), *command[1:], SCRIPT], capture_output=True, text=True, timeout=60)
    assert not ran.returncode, ran.stdout + ran.stderr


def tool(name: str) -> str:
    """A program of this environment, or of the machine."""
    return shutil.which(name, path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("status", [0, 3])
def test_the_script_starts_one_task_a_node_with_a_secret_of_its_own(status, tmp_path):
    """In a job of two nodes, where `srun` notes what it is asked for."""
    (tmp_path / "srun").write_text(
        f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >asked\nstat -c %a .jaxllm-secret-7 >mode\n'
        f"cp .jaxllm-secret-7 secret\nexit {status}\n"
    )
    (tmp_path / "scontrol").write_text("#!/usr/bin/env bash\nprintf 'gpu01\\ngpu02\\n'\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "gpu[01-02]",
    }
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXLLM_MODEL": "my model"}
    ran = subprocess.run(["bash", SCRIPT], env=job, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (status, "the server is on gpu01\n"), ran.stderr
    *options, _, _ = asked = (tmp_path / "asked").read_text().splitlines()
    where = asked.index("jaxllm")
    assert options[:where] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1"] and asked[where + 1] == "serve"
    arguments = parsed(asked[where + 2 :])
    assert (arguments.cluster, arguments.tensor_parallel_size, arguments.host) == ("slurm", 16, "127.0.0.1")
    assert arguments.cluster_secret_file == str(tmp_path / ".jaxllm-secret-7")
    assert (tmp_path / "mode").read_text() == "600\n" and len((tmp_path / "secret").read_text().strip()) == 64
    assert not (tmp_path / ".jaxllm-secret-7").exists()


def test_the_script_asks_for_a_model():
    ran = subprocess.run(["bash", SCRIPT], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60)
    assert ran.returncode and "JAXLLM_MODEL" in ran.stderr


# Docker


@by_name
def test_hadolint_has_nothing_to_say(file):
    ran = subprocess.run([tool("hadolint"), file], capture_output=True, text=True, timeout=60)
    assert not ran.returncode and not ran.stdout, ran.stdout + ran.stderr


def test_the_dockerfiles_differ_in_their_devices():
    plain = {re.sub(r"\A(#.*\n)+|(?<=^ARG DEVICES=)\w+$", "", file.read_text(), flags=re.M) for file in DOCKERFILES}
    assert [file.suffix for file in DOCKERFILES] == [".cpu", ".cuda", ".tpu"] and len(plain) == 1


def instructions(file) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in DockerfileParser(fileobj=io.BytesIO(file.read_bytes())).structure:
        found.setdefault(one["instruction"], []).append(one["value"])
    return found


@by_name
def test_images_hold_what_is_locked_and_no_more(file):
    found = instructions(file)
    defaults = dict(value.split("=") for value in found["ARG"] if "=" in value)
    sources = [re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], value).split()[0] for value in found["COPY"]]
    assert (ROOT / sources[0]).is_file() and "constraints-" in sources[0]
    assert any("--require-hashes --only-binary :all: -r constraints.txt" in value for value in found["RUN"])
    assert any("--no-deps --no-build-isolation ." in value for value in found["RUN"])
    assert found["USER"] == ["10001:10001"] and "ADD" not in found
    assert not re.search(r"secret|token|password|--mount", file.read_text(), re.IGNORECASE)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored[0] == "*" and {"**/*.so", "**/__pycache__"} <= set(ignored)
    taken = {line[1:] for line in ignored if line.startswith("!")}
    assert all(list(ROOT.glob(pattern)) for pattern in taken)
    assert {*FOLDERS, "src", "pyproject.toml", "setup.py", "README.md", "LICENSE"} <= taken


@by_name
def test_images_start_a_server_that_says_where_it_opens(file):
    (entry,) = instructions(file)["ENTRYPOINT"]
    python, m, module, *words = json.loads(entry)
    assert (python, m, module) == ("python", "-m", "jaxllm.serve") and parsed(words).host == "0.0.0.0"
    (line,) = re.findall(r"^# +docker run (.*)$", file.read_text(), re.MULTILINE)
    options, _, model = re.split(r"jaxllm:(\w+) ?", line)
    arguments = parsed(words + shlex.split(model))
    is_loopback = "-p 127.0.0.1:8000:8000" in options or ("--network host" in options and arguments.host == "127.0.0.1")
    assert is_loopback, "it opens to everyone, without a key"


def test_the_health_check_asks_the_server():
    (check,) = instructions(DOCKERFILES[0])["HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    assert command[0] == "python" and "8000" in command[-1]
    with running() as web:
        command = [sys.executable, "-c", command[-1].replace("8000", str(web.port))]
        assert subprocess.run(command, timeout=60).returncode == 0
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=60).returncode == 1


# Documents


@pytest.mark.parametrize("document", ["deploy/README.md", "docs/several_hosts.md"])
def test_commands_in_documents_parse(document):
    lines = [words[2:] for words in command_lines(document) if words[:2] == ["jaxllm", "serve"] and len(words) > 2]
    assert lines
    for words in lines:
        parsed(words)
