"""Who is in a group: from options, and from what TPU slices, Slurm and Open MPI say."""

import contextlib
import http.server
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.cluster.membership import DEFAULT_PORT, Membership, explicit_membership, find_membership, split_address
from jaxllm.cluster.node_list import expand_node_list
from jaxllm.errors import ClusterError
from tests.test_packaging import ROOT

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[01-03,07]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURMD_NODENAME": "gpu03",
}
RANK = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-0-1.t,t-0-2.t,t-0-3.t", "TPU_WORKER_ID": "3"}
ATTRIBUTES = {
    "worker-network-endpoints": "unknown:unknown:10.0.0.4,unknown:unknown:10.0.0.5",
    "agent-worker-number": "1",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-8'\nWORKER_ID: '1'\n",
}


def member(coordinator, num_hosts, host_index) -> Membership:
    return Membership(coordinator=coordinator, num_hosts=num_hosts, host_index=host_index)


# Options


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("node1:8577", "node1", 8577), ("10.0.0.1:1", "10.0.0.1", 1), ("[fd00::1]:65535", "fd00::1", 65535)],
)
def test_options_are_taken_as_they_are(address, host, port):
    assert explicit_membership(address, 3, 2) == member(address, 3, 2)
    assert split_address(address) == (host, port)


@pytest.mark.parametrize("address", ["node1", "node1:0", "node1:65536", ":80", "fd00::1:80", "http://a:80", "a b:80"])
def test_addresses_that_are_none(address):
    with pytest.raises(ClusterError, match=f"as in 10.0.0.1:{DEFAULT_PORT}"):
        explicit_membership(address, 2, 0)


@pytest.mark.parametrize(
    ("num_hosts", "host_index", "remedy"), [(0, 0, "at least 1"), (2, 2, "0 to 1"), (2, -1, "0 to 1")]
)
def test_numbers_that_can_not_be(num_hosts, host_index, remedy):
    with pytest.raises(ValueError, match=remedy):
        explicit_membership("node1:8577", num_hosts, host_index)


# Slurm


def test_a_step_of_slurm():
    assert find_membership("slurm", STEP) == member("gpu01:8577", 4, 2)
    assert find_membership("slurm", STEP, port=9000) == member("gpu01:9000", 4, 2)
    assert find_membership("slurm", STEP, coordinator="gpu01-ib:9") == member("gpu01-ib:9", 4, 2)


def test_a_step_of_one_node():
    one = STEP | {"SLURM_STEP_NODELIST": "gpu01", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert find_membership("slurm", one | {"SLURMD_NODENAME": "gpu01"}) == member("gpu01:8577", 1, 0)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on 4 nodes.*srun --ntasks-per-node=1"),
        ({"SLURM_STEP_NODELIST": None}, "in no job step.*srun --ntasks-per-node=1"),
        ({"SLURMD_NODENAME": "gpu07"}, "--distribution=block"),
        ({"SLURM_PROCID": None}, "no SLURM_PROCID.*--host-index"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID is 'two'"),
        ({"SLURM_STEP_NODELIST": "gpu[1-"}, r"'gpu\[1-' is no list of nodes"),
    ],
)
def test_steps_that_can_be_no_group(change, remedy):
    with pytest.raises(ClusterError, match=remedy):
        find_membership("slurm", {name: text for name, text in (STEP | change).items() if text is not None})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,07],other5-[1-2]", ["gpu01", "gpu02", "gpu03", "gpu07", "other5-1", "other5-2"]),
        ("r[1-2]n[09-10].x", ["r1n09.x", "r1n10.x", "r2n09.x", "r2n10.x"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["", "a,", "a[]", "a[1", "a]", "a[3-1]", "a[1--2]", "a[1,]", "a b", "a[[1]]", "a[x]"])
def test_lists_of_nodes_that_are_none(text):
    with pytest.raises(ClusterError):
        expand_node_list(text)


def compress(names: list[tuple[str, str]]) -> str:
    """What Slurm makes of prefixes and numbers: neighbours of one prefix and width share brackets."""
    parts = []
    for (prefix, _), group in itertools.groupby(names, lambda name: (name[0], len(name[1]))):
        ranges: list[list[int]] = []
        numbers = [number for _, number in group]
        for number in map(int, numbers):
            if ranges and number == ranges[-1][-1] + 1:
                ranges[-1].append(number)
            else:
                ranges.append([number])
        width = len(numbers[0])
        ends = [sorted({f"{run[0]:0{width}}", f"{run[-1]:0{width}}"}) for run in ranges]
        text = ",".join("-".join(pair) for pair in ends)
        parts.append(prefix + (text if text.isdigit() else f"[{text}]"))
    return ",".join(parts)


@given(
    st.lists(st.tuples(st.sampled_from(["n", "gpu-", "a1b"]), st.from_regex(r"[0-9]{1,3}", fullmatch=True)), min_size=1)
)
def test_what_was_compressed_comes_back(names):
    assert expand_node_list(compress(names)) == [prefix + number for prefix, number in names]


# Open MPI


@pytest.mark.parametrize(
    ("told", "coordinator"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "13.0;tcp://10.96.0.1,10.148.0.1:34911"}, "10.96.0.1:8577"),
        ({"OMPI_MCA_orte_hnp_uri": "13.0;tcp6://[fd00::2,fd00::3]:59187"}, "[fd00::2]:8577"),
        ({"OMPI_MCA_orte_hnp_uri": "13.0;tcp://10.96.0.1:34911;tcp6://[fd00::2]:59187"}, "10.96.0.1:8577"),
        ({"PMIX_NAMESPACE": "prterun-node-01.x.org-9227@1"}, "node-01.x.org:8577"),
        ({"PMIX_NAMESPACE": "prte-node1-9227@3"}, "node1:8577"),
    ],
)
def test_mpirun_tells_where_it_runs(told, coordinator):
    assert find_membership("mpi", RANK | told) == member(coordinator, 2, 1)


def test_rank_0_is_where_mpirun_runs_or_says_so():
    first = RANK | {"OMPI_COMM_WORLD_RANK": "0"}
    assert find_membership("mpi", first | {"OMPI_MCA_orte_hnp_uri": "13.0;tcp://127.0.0.1:1"}).host_index == 0
    elsewhere = first | {"OMPI_MCA_orte_hnp_uri": "13.0;tcp://203.0.113.9:1"}  # an address that no machine has
    with pytest.raises(ClusterError, match="--coordinator HOST:PORT with the host of rank 0"):
        find_membership("mpi", elsewhere)
    assert find_membership("mpi", elsewhere, coordinator="node1:9") == member("node1:9", 2, 0)


@pytest.mark.parametrize(
    ("told", "remedy"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2 ranks run on this host.*--map-by ppr:1:node"),
        ({"PMIX_NAMESPACE": "slurm.pmix.7.0"}, "--coordinator HOST:PORT with the host of rank 0"),
        ({}, "--coordinator HOST:PORT with the host of rank 0"),
        ({"OMPI_COMM_WORLD_SIZE": ""}, "no OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_ranks_that_can_be_no_group(told, remedy):
    with pytest.raises(ClusterError, match=remedy):
        find_membership("mpi", RANK | told)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no Open MPI")
@pytest.mark.parametrize(
    ("hosts", "num_ranks", "expected"),
    [("{}:1", 1, ["1", "0"]), ("{}:1,other:1", 2, ["2", "0", "2", "1"]), ("{}:2", 2, None)],
)
def test_a_real_mpirun(hosts, num_ranks, expected, tmp_path):
    """The other host is this one too: what should be `ssh` runs its command here."""
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    agents = {"PRTE_MCA_plm_ssh_agent": str(agent), "OMPI_MCA_plm_rsh_agent": str(agent)}  # of Open MPI 5, and 4
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    program = "from jaxllm.cluster.membership import find_membership as f; print(f('mpi'))"
    launcher = ["mpirun", "-n", str(num_ranks), "--bind-to", "none", "--host", hosts.format(socket.gethostname())]
    command = [*launcher, sys.executable, "-c", program]
    ran = subprocess.run(command, env=os.environ | allowed | agents, capture_output=True, text=True, timeout=60)
    if expected is None:
        assert ran.returncode and "2 ranks run on this host" in ran.stderr
        return
    found = sorted(ran.stdout.splitlines())
    assert re.findall(r"(?:num_hosts|host_index)=(\d)", "".join(found)) == expected, ran.stderr
    assert len(set(re.findall(r"coordinator='(.+):8577'", ran.stdout))) == 1


# TPU slices


@contextlib.contextmanager
def metadata_server(attributes: dict[str, str], *, failures: int = 0):
    """A server that answers as Google's, after some failures; gives the environment that leads to it."""
    left = [failures]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            status = 403 if self.headers["Metadata-Flavor"] != "Google" else 200 if name in attributes else 404
            if left[0] > 0:
                left[0] -= 1
                status = 503
            self.send_response(status)
            self.end_headers()
            self.wfile.write(attributes.get(name, "none").encode() if status == 200 else b"")

        def log_message(self, *told):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_address[1]}"}
        server.shutdown()
        thread.join()


def test_a_slice_on_gke():
    assert find_membership("tpu", SLICE) == member("t-0.t:8577", 4, 3)
    alone = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    assert find_membership("auto", alone) == member("localhost:8577", 1, 0)


@pytest.mark.parametrize(
    "endpoints", [ATTRIBUTES["worker-network-endpoints"], "10.0.0.4,10.0.0.5"], ids=["triples", "hosts"]
)
@pytest.mark.parametrize("kind", ["tpu", "auto"])
def test_a_slice_of_tpu_vms(kind, endpoints, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    with metadata_server(ATTRIBUTES | {"worker-network-endpoints": endpoints}, failures=1) as environ:
        assert find_membership(kind, environ) == member("10.0.0.4:8577", 2, 1)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"TPU_WORKER_ID": "4"}, "0 to 3"),
        ({"TPU_WORKER_HOSTNAMES": "a,a"}, "one process a host"),
        ({"MEGASCALE_NUM_SLICES": "2"}, "2 TPU slices.*a server on each slice"),
    ],
)
def test_slices_that_can_be_no_group(change, remedy):
    with pytest.raises(ClusterError, match=remedy):
        find_membership("tpu", SLICE | change)


@pytest.mark.parametrize(
    ("attributes", "failures", "remedy"),
    [
        (ATTRIBUTES | {"tpu-env": "A: 'b'\nMEGASCALE_NUM_SLICES: '2'\n"}, 0, "2 TPU slices"),
        ({"agent-worker-number": "0"}, 0, "no worker-network-endpoints"),
        (ATTRIBUTES, 99, "answers 503.*--coordinator"),
    ],
)
def test_tpu_vms_that_can_be_no_group(attributes, failures, remedy, monkeypatch):
    monkeypatch.setattr("jaxllm.cluster.tpu_metadata._PAUSE_S", 0)
    with metadata_server(attributes, failures=failures) as environ, pytest.raises(ClusterError, match=remedy):
        find_membership("tpu", environ)


def test_no_metadata_server(monkeypatch):
    monkeypatch.setattr("jaxllm.cluster.tpu_metadata._PAUSE_S", 0)
    with pytest.raises(ClusterError, match="127.0.0.1:9 does not say tpu-env"):
        find_membership("tpu", {"GCE_METADATA_HOST": "127.0.0.1:9"})


# Any


@pytest.mark.parametrize(
    ("environ", "num_hosts"), [(STEP, 4), (RANK | {"PMIX_NAMESPACE": "prte-a-1@1"}, 2), (SLICE, 4)]
)
def test_auto_takes_what_is_there(environ, num_hosts):
    assert find_membership("auto", environ).num_hosts == num_hosts


def test_auto_does_not_guess():
    with pytest.raises(ClusterError, match="could be slurm or mpi; say which"):
        find_membership("auto", STEP | RANK)
    with (
        metadata_server({}) as environ,
        pytest.raises(ClusterError, match="neither a TPU slice.*SLURM_JOB_ID.*Open MPI"),
    ):
        find_membership("auto", environ)
    with pytest.raises(ClusterError, match="--cluster ray is unknown: it is one of auto, tpu, slurm, mpi"):
        find_membership("ray", {})


def test_it_needs_no_jax():
    program = "import sys, jaxllm.cluster.membership; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
