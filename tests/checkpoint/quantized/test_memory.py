"""What a host holds while weights are quantised as they are read: those made so far, and two dense ones at most."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import checkpoints

SIZES = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
SIZES |= {"intermediate_size": 16384, "vocab_size": 512}
OVERHEAD = 96 << 20  # of the compiler, and of threads that read
LOAD = """
import re, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
from flax import nnx
from jaxllm.engine.model_source import Reading, model_source
from jaxllm.sharding.mesh import make_mesh

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

jnp.zeros(8).block_until_ready()
source = model_source(Path(sys.argv[1]), "float32", "cpu", None, Reading(skip_tokenizer_init=True, quantization="int8"))
mesh, most, over = make_mesh(None), 0, threading.Event()
source.expand(mesh)
abstract, before = nnx.split(source.model)[1], anonymous_bytes()

def watch():
    global most
    while not over.wait(0.002):
        most = max(most, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
params = jax.block_until_ready(source.place(abstract, mesh))
over.set()
watcher.join()
print(most - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_dense_weights_at_once(tmp_path):
    """1 GB of dense weights become a quarter of that."""
    checkpoints.write_config(tmp_path, **SIZES)
    names, weight_map = checkpoints.shapes(checkpoints.HF | SIZES), {}
    for i in range(8):
        file = f"model-{i}.safetensors"
        part = {name: np.full(shape, 0.5, np.float32) for name, shape in list(names.items())[i::8]}
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    checkpoints.write_index(tmp_path, weight_map)
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=True)
    most, quantised = json.loads(f"[{done.stdout.strip().replace(' ', ',')}]")
    largest = 4 * 2 * SIZES["intermediate_size"] * SIZES["hidden_size"]  # gate and up, which are one product
    assert most - quantised < 2 * largest + OVERHEAD, f"{(most - quantised) >> 20} MB besides what is left"
