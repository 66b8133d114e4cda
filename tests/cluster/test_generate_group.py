"""`jaxllm generate` over several processes, as it is typed on each host."""

import pytest

from tests.cluster.processes import free_port

PROMPTS = ["def read_lines(path", "import os\nimport"]
COMMAND = ["-m", "jaxllm.generate", *PROMPTS, "--json", "--token-ids", "--max-tokens", "12", "--temperature", "0"]
SIZES = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--num-blocks", "16"]


@pytest.mark.slow
def test_the_first_host_prints_what_one_alone_does(hosts, secret):
    command = [*COMMAND, *SIZES, "--block-size", "8", "--dtype", "float32"]
    alone = hosts.start(*command)
    assert alone.wait(120) == 0, alone.text
    group = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-hosts", "2", "--cluster-secret-file", str(secret)]
    leader, follower = (hosts.start(*command, *group, "--host-index", str(index)) for index in range(2))
    assert leader.wait(120) == 0, leader.text
    assert follower.wait(15) == 0, follower.text
    assert len(alone.events) == len(PROMPTS) and leader.events == alone.events
    assert not follower.events, "it prints nothing of the answers"
