"""Two processes with a device each load one model: each reads and holds its own half."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.mixtures import write_mixture

ROOT = Path(__file__).parents[2]
OVERHEAD = 16 << 20  # bytes, of threads that read, and of what is made once
SIZES = {"vocab_size": 8001, "hidden_size": 1024, "num_hidden_layers": 2, "intermediate_size": 4096, "head_dim": 128}
MEMBER = """
import json, sys
from pathlib import Path
import jax

folder, address, rank, reader = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address, heartbeat_timeout_seconds=30)

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import load_params, load_quantized
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import canonical, expansion_of, named, place_params
from jaxllm.checkpoint.quantized.make import quantize_model
from jaxllm.checkpoint.quantized.quantize import form_of, quantize
from jaxllm.checkpoint.window import concrete
from jaxllm.engine.device.kv_scales import place_scales
from jaxllm.engine.dummy import random_params
from jaxllm.models import transformer
from jaxllm.pallas_kernels import native
from jaxllm.sharding import rules
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import load

if reader == "numpy":
    native.is_built = lambda: False
mesh = make_mesh("tensor=2")
assert len(mesh.local_devices) == 1 and mesh.size == 2


def number(file, key):
    line = next(line for line in Path(f"/proc/self/{file}").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def abstract(folder, quantization=None):
    spec = read_config(folder, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    if quantization is not None:
        quantize_model(model, quantization)
    expand_model(model, mesh)
    return spec, nnx.state(model, nnx.Param)


def arrays(params):
    return {name: variable.get_value() for name, variable in named(params).items()}


def check(got, whole, variables):
    # What this process has of each array is what the whole one has there.
    for name, array in got.items():
        (shard,) = array.addressable_shards
        box, how = concrete(shard.index, array.shape), expansion_of(variables[name])
        want = whole[name][box] if how is None else how.shard(whole[name], box, (0,) * len(how.canonical), np.empty)
        np.testing.assert_array_equal(shard.data, want, err_msg=name)


# The model in both: its memory, what is read, and the values.
spec, params = abstract(folder / "large")
jnp.zeros(8).block_until_ready()
from_file, memory = number("io", "rchar"), number("status", "VmRSS") << 10
loaded = load_params(open_checkpoint(folder / "large"), spec, params, mesh)
most, from_file = (number("status", "VmHWM") << 10) - memory, number("io", "rchar") - from_file
sizes = [array.addressable_shards[0].data.nbytes for array in arrays(loaded).values()]
shards = {name: np.array(array.addressable_shards[0].data) for name, array in arrays(loaded).items()}

stored = load_file(folder / "large" / "model.safetensors")
gate, up = (stored[f"model.layers.1.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
half = slice(rank * 2048, (rank + 1) * 2048)
np.testing.assert_array_equal(shards["layers.1.mlp.gate_up.weight"], np.stack([gate, up], 1)[:, :, half])
np.testing.assert_array_equal(
    shards["layers.1.mlp.down.weight"], stored["model.layers.1.mlp.down_proj.weight"].T[half]
)
head = np.pad(stored["lm_head.weight"], ((0, 1), (0, 0)))[4001 * rank : 4001 * (rank + 1)]
np.testing.assert_array_equal(shards["lm_head.weight"], head.T)
del loaded, shards, stored

# Each way by which parameters come onto a mesh, which compute together where they do.
alone = jax.sharding.Mesh(np.array(jax.local_devices()), ("tensor",))
small = folder / "small"
spec, params = abstract(small)
variables, whole = named(params), {name: np.asarray(x) for name, x in arrays(load(small, mesh=alone)).items()}
check(arrays(load_params(open_checkpoint(small), spec, params, mesh)), whole, variables)
check(arrays(place_params(nnx.to_pure_dict(load(small, mesh=alone)), params, mesh)), whole, variables)
made = place_params(random_params(spec, params, mesh), params, mesh)
assert all(np.isfinite(array.addressable_shards[0].data).all() for array in arrays(made).values())

_, int8 = abstract(small, "int8")
quantised = arrays(load_quantized(open_checkpoint(small), spec, int8, mesh))
path = "layers.1.mlp.down"
down = quantize(np.ascontiguousarray(whole[f"{path}.weight"].T), form_of("int8", 20))
check(
    {name: quantised[name] for name in (f"{path}.codes", f"{path}.scales")},
    {f"{path}.codes": down.codes, f"{path}.scales": down.scales},
    named(int8),
)
like = jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=rules.sharding((None, "kv_heads"), mesh))
(scales,) = place_scales(np.float32([[3, 4]]).view(np.int32), [like])
np.testing.assert_array_equal(scales.addressable_shards[0].data, [[3], [4]])

# Experts, each half of whose files one process reads.
mesh = make_mesh("expert=2")
spec, params = abstract(folder / "experts")
whole = {name: np.asarray(x) for name, x in arrays(load(folder / "experts", mesh=alone)).items()}
check(arrays(load_params(open_checkpoint(folder / "experts"), spec, params, mesh)), whole, named(params))
print(json.dumps({"most": most, "own": sum(sizes), "largest": max(sizes), "from_file": from_file}))
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("reader", ["C++", "numpy"])
def test_each_process_reads_and_holds_its_half(tmp_path, reader):
    for name in ("large", "small", "experts"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "large", **SIZES)
    write_checkpoint(tmp_path / "small", num_key_value_heads=1, vocab_size=27)
    write_mixture(tmp_path / "experts", "Qwen3Moe")
    total = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert total > 150e6
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    commands = [[sys.executable, "-c", MEMBER, str(tmp_path), address, str(rank), reader] for rank in range(2)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}  # so that the C library keeps nothing that is freed
    members = [
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        outputs = [member.communicate(timeout=240) for member in members]
    finally:
        for member in members:
            member.kill()
        (tmp_path / "large" / "model.safetensors").unlink()
    assert [member.returncode for member in members] == [0, 0], [errors[-2000:] for _, errors in outputs]
    for output, _ in outputs:
        found = json.loads(output.splitlines()[-1])  # gloo writes there too
        assert total / 2 - 2**16 < found["own"] < total / 2 + 2**16
        # Beside what is left: the numbers of one parameter as they are read, and in order before they are padded.
        assert found["most"] <= found["own"] + 2 * found["largest"] + OVERHEAD
        assert found["from_file"] <= found["own"] + 2**20
