"""`jaxllm generate` over several processes, as it is typed on each host."""

import pytest

from tests.cluster.processes import free_port

# Runs the module that it is given, with what is printed on standard error in a file that it is given too.
SPLIT = "import os, runpy, sys; os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2); del sys.argv[1]; "
SPLIT += "runpy.run_module('jaxllm.generate', run_name='__main__', alter_sys=True)"
PROMPTS = ["def read_lines(path", "import os\nimport"]
COMMAND = [*PROMPTS, "--json", "--token-ids", "--max-tokens", "12", "--temperature", "0"]
SIZES = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--num-blocks", "16"]


@pytest.mark.slow
def test_the_first_host_prints_what_one_alone_does(hosts, secret, tmp_path):
    """And nothing else on standard output: gloo has its own words there."""
    command = [*COMMAND, *SIZES, "--block-size", "8", "--dtype", "float32"]
    alone = hosts.start("-m", "jaxllm.generate", *command)
    assert alone.wait(120) == 0, alone.text
    group = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-hosts", "2", "--cluster-secret-file", str(secret)]
    errors = [tmp_path / f"errors{index}" for index in range(2)]
    leader, follower = (
        hosts.start("-c", SPLIT, str(errors[index]), *command, *group, "--host-index", str(index)) for index in range(2)
    )
    assert leader.wait(120) == 0, errors[0].read_text()
    assert follower.wait(15) == 0, errors[1].read_text()
    assert len(alone.events) == len(PROMPTS) and leader.events == alone.events
    assert len(leader.lines) == len(PROMPTS) and not follower.lines
