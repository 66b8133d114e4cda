"""Planning for absent hardware: targets, models, meshes, what doesn't fit, and the report's arithmetic."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jaxllm.aot import chips, collectives, efficiency, floors, prepare, thunks
from jaxllm.aot.hlo import Instruction
from jaxllm.checkpoint.config import read_config
from jaxllm.cli.aot import main
from jaxllm.engine import sizing
from jaxllm.engine.config import MEM_FRACTION_VARIABLES
from jaxllm.engine.device import lowering
from jaxllm.errors import MeshError, ModelFormatError, OutOfMemoryError
from jaxllm.models import transformer
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.quantized_matmul import stored_bytes

LLAMA, V6E_4 = "llama-3.1-8b", chips.parse_target("v6e-4")


@pytest.fixture
def on_cpu(monkeypatch):
    """Prepares for the target with CPU devices in the place of its own."""
    monkeypatch.setattr(prepare, "devices", lambda target: jax.devices()[: target.count])
    monkeypatch.setattr(native, "is_built", lambda: False)


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("v5e-1", "v5e:1x1"),
        ("v5e-8", "v5e:2x4"),
        ("v6e-2", "v6e:2x2"),
        ("v6e-16", "v6e:4x4"),
        ("V5P-8", "v5p:2x2x2"),
        ("v7x-1", "tpu7x:1x1x1"),
        ("v7x-8", "tpu7x:2x2x1"),
        ("a100-1", "1x1x1"),
        ("h100-8", "1x1x8"),
        ("h200-16", "1x2x8"),
    ],
)
def test_targets(text, topology):
    target = chips.parse_target(text)
    assert (str(target), target.topology) == (text.lower(), topology)


@pytest.mark.parametrize(
    ("text", "num_hosts", "size", "topology"),
    [
        ("v6e-8", None, 8, "v6e:2x4"),
        ("v6e-8", 2, 4, "v6e:2x4"),
        ("v5e-16", None, 4, "v5e:4x4"),
        ("v6e-16", 2, 8, "v6e:4x4"),
        ("v5p-8", None, 4, "v5p:2x2x2"),
        ("v7x-16", None, 8, "tpu7x:2x2x2"),
        ("v6e-1", 1, 1, "v6e:1x1"),
        ("h100-16", None, 8, "1x2x8"),
        ("h100-8", 2, 4, "1x2x4"),
    ],
)
def test_hosts(text, num_hosts, size, topology):
    target = chips.parse_target(text, num_hosts)
    assert (target.host_size, target.topology, target.num_hosts) == (size, topology, target.count // size)


@pytest.mark.parametrize(
    ("text", "num_hosts", "message"),
    [
        ("v6e-16", 3, "3 hosts can't have the 16 devices of v6e-16: a host of v6e has 4 or 8"),
        ("v6e-16", 16, "a host of v6e has 4 or 8"),
        ("v5p-8", 1, "1 hosts can't have the 8 devices of v5p-8: a host of v5p has 4"),
        ("h100-16", 1, "a host of h100 has 1 to 8"),
        ("h100-16", 0, "0 hosts"),
    ],
)
def test_hosts_that_are_not_made(text, num_hosts, message):
    with pytest.raises(ValueError, match=message):
        chips.parse_target(text, num_hosts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9-8", r"target 'v9-8' is unknown: give a chip of \['a100', .*'v7x'\]"),
        ("v6e", "unknown"),
        ("v6e-0", r"number of devices must be in \[1, 256\] for v6e"),
        ("v6e-512", r"\[1, 256\]"),
        ("h100-many", r"\[1, 64\] for h100"),
    ],
)
def test_bad_targets(text, message):
    with pytest.raises(ValueError, match=message):
        chips.parse_target(text)


def test_gpu_targets_agree_with_the_table():
    for chip in (chip for chip in chips.CHIPS.values() if chip.platform == "gpu"):
        text = (chips.GPU_TARGETS / f"{chip.name}.txtpb").read_text()
        fields = dict(line.strip().split(": ", 1) for line in text.splitlines() if ": " in line and "{" not in line)
        assert int(fields["device_memory_size"]) == chip.memory_bytes
        assert abs(int(fields["memory_bandwidth"]) / chip.bandwidth - 1) < 1e-3


def test_memory_that_jax_may_use(monkeypatch):
    for name in MEM_FRACTION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    h100, v6e = chips.CHIPS["h100"], chips.CHIPS["v6e"]
    assert h100.usable_bytes == int(0.92 * h100.memory_bytes)  # what the commands set
    for name in reversed(MEM_FRACTION_VARIABLES):
        monkeypatch.setenv(name, "0.9")
        assert h100.usable_bytes == int(0.9 * h100.memory_bytes)
    assert v6e.usable_bytes == v6e.memory_bytes


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(chips, "find_spec", lambda name: None)
    with pytest.raises(chips.UnavailableTargetError, match=r"for v6e-8: libtpu is not installed; pip install"):
        chips.devices(chips.parse_target("v6e-8"))
    with pytest.raises(chips.UnavailableTargetError, match=r"for h200-1: JAX's CUDA plugin is not installed"):
        chips.devices(chips.parse_target("h200-1"))


def test_models(tmp_path):
    assert (prepare.find_model(LLAMA) / "config.json").is_file()
    (tmp_path / "config.json").write_text("{}")
    assert prepare.find_model(str(tmp_path)) == prepare.find_model(str(tmp_path / "config.json")) == tmp_path
    with pytest.raises(ValueError, match=r"model 'gpt-9' is neither .* bundled \['gemma-3-4b', 'llama-3.1-8b'"):
        prepare.find_model("gpt-9")
    with pytest.raises(ModelFormatError, match="lacks the key 'architectures'"):
        prepare.prepare(str(tmp_path), chips.parse_target("v6e-1"))


@pytest.mark.parametrize(
    ("name", "billions"), [(LLAMA, 8.03), ("llama-3.3-70b", 70.55), ("qwen3-0.6b", 0.596), ("gemma-3-4b", 3.88)]
)
def test_bundled_models_have_their_size(name, billions):
    spec = read_config(prepare.find_model(name), jnp.bfloat16)
    leaves = jax.tree.leaves(nnx.state(transformer.abstract(spec.module.Model, spec.cfg)))
    assert sum(leaf.size for leaf in leaves) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_sizes_are_the_engines(on_cpu):
    """On 4 devices: a quarter of what is sharded each, and a pool that leaves room for a step."""
    prepared = prepare.prepare(LLAMA, chips.parse_target("v6e-4"), max_num_seqs=64, max_num_batched_tokens=512)
    config = prepared.config
    assert dict(prepared.mesh.shape) == {"tensor": 4}
    assert config.max_model_len == prepared.cfg.max_len == 131072
    assert list(prepared.layouts) == sorted({config.min_bucket, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512})
    assert len(prepared.jobs()) == len(set(prepared.jobs())) > len(prepared.layouts)
    pool = 2 * 2 * 128 * config.block_size * 2 * 32 * config.num_blocks
    assert 4e9 < pool < prepared.target.chip.usable_bytes - 4.0e9
    assert prepared.decode_bucket(9) == 16
    assert prepared.decode_names(9) == (("step", 16), ("sample", 16))
    assert set(prepared.decode_names(64)) <= set(prepared.jobs())
    with pytest.raises(ValueError, match=r"a batch of 65 is not in \[1, 64\], max_num_seqs"):
        prepared.decode_bucket(65)


def test_fewest_bytes(on_cpu):
    prepared = prepare.prepare(LLAMA, chips.parse_target("v6e-4"))
    weights, kv = efficiency.fewest_bytes(prepared, 8, 4096)
    table = 128256 * 4096 // 4  # of which 8 rows are read
    norms = 65 * 4096  # on every device
    sharded = (8_030_261_248 - 65 * 4096 - 128256 * 4096) // 4
    assert weights == 2 * (sharded + norms + table * 8 // (128256 // 4))
    assert kv == 8 * 4096 * 32 * 2 * 2 * 128 * 2


def test_fewest_bytes_of_windows_and_tied_tables(on_cpu):
    prepared = prepare.prepare("gemma-3-4b", chips.parse_target("v6e-1"))
    weights, kv = efficiency.fewest_bytes(prepared, 2, 4096)
    assert weights == 2 * sum(leaf.size for _, leaf in prepared.tensors())
    assert kv == 2 * (29 * 1024 + 5 * 4096) * 2 * 4 * 256 * 2


@pytest.mark.parametrize("tied", [False, True])
def test_fewest_bytes_of_quantised_tables(on_cpu, tmp_path, tied):
    """Of a model in MLX's form: rows are looked up in codes, and a tied head has its own."""
    config = json.loads((prepare.find_model(LLAMA) / "config.json").read_text())
    forms = {"quantization": {"group_size": 64, "bits": 4}, "tie_word_embeddings": tied, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | forms))
    prepared = prepare.prepare(str(tmp_path), chips.parse_target("h200-1"))
    weights, _ = efficiency.fewest_bytes(prepared, 2, 16)
    row = 4096 // 2 + 4096 // 64 * (2 + 4)  # codes, scales and offsets
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) // 4096 * row
    assert weights == 2 * row + 128256 * row + layer + 3 * 4096 * 2
    params = sum(stored_bytes(leaf.shape, leaf.dtype) for _, leaf in prepared.tensors())
    assert params == weights + (128256 - 2) * row


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_weights_of_the_form_that_is_asked_for(on_cpu, kind):
    dense, asked = (
        sum(stored_bytes(leaf.shape, leaf.dtype) for _, leaf in prepare.prepare(LLAMA, V6E_4, quantization=q).tensors())
        for q in (None, kind)
    )
    products = 32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    scales = products // 128 * 2 if kind == "int4" else 32 * (2 * 4096 + 2 * 1024 + 4096 + 2 * 14336) * 4
    assert asked == dense - 2 * products + (products // 2 if kind == "int4" else products) + scales


def test_efficiency(on_cpu):
    """A module that reads its weights once and copies its pool."""
    prepared = prepare.prepare(LLAMA, chips.parse_target("v6e-4"))
    text = """HloModule m

ENTRY %main (w: bf16[1000,1000], pool: bf16[500,1000]) -> (bf16[1000,1000], bf16[500,1000]) {
  %w = bf16[1000,1000]{1,0} parameter(0), metadata={op_name="leaves[7]"}
  %pool = bf16[500,1000]{1,0} parameter(1), metadata={op_name="kv_pools[0]"}
  %y = bf16[1000,1000]{1,0} sine(%w)
  %z = bf16[500,1000]{1,0} copy(%pool)
  ROOT %t = (bf16[1000,1000]{1,0}, bf16[500,1000]{1,0}) tuple(%y, %z)
}
"""
    found = efficiency.efficiency(prepared, {"step": text}, 8, 4096)
    assert found.moved == {efficiency.WEIGHTS: 2_000_000, efficiency.POOL: 1_000_000, "intermediates": 3_000_000}
    assert found.ratio == pytest.approx(6e6 / (found.fewest_weights + found.fewest_kv))
    assert found.floor_ms == pytest.approx(found.fewest / 1640e9 * 1e3)
    both = efficiency.efficiency(prepared, {"step": text, "sample": text}, 8, 4096)
    assert both.moved == {kind: 2 * size for kind, size in found.moved.items()}
    assert (both.fewest, both.kernels) == (found.fewest, 2 * found.kernels)
    assert both.largest == {f"{name}: {op}": n for name in ("step", "sample") for op, n in (("y", 4e6), ("z", 2e6))}


def test_floors(on_cpu):
    """Of main memory, and of products: two for each weight of a layer and token, and of attention."""
    prepared = prepare.prepare(LLAMA, V6E_4, max_model_len=8192, max_num_batched_tokens=2048)
    text = """HloModule m

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  ROOT %y = f32[1000]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
    layers, head = 8_030_261_248 - 65 * 4096 - 2 * 128256 * 4096, 128256 * 4096
    assert prepared.active_params == layers
    decode = floors.decode_floor(prepared, {"step": text, "sample": text}, 8, 4096)
    assert decode.flops == (2 * 8 * (layers + head) + 8 * 4096 * 32 * 4 * 32 * 128) / 4
    assert decode.fewest_bytes == sum(efficiency.fewest_bytes(prepared, 8, 4096))
    assert decode.sent == {("all-reduce", False): collectives.Sent(2, 8000, 12000, 0)}
    assert decode.compute_ms == pytest.approx(decode.flops / 918e12 * 1e3)
    assert decode.links_ms == pytest.approx(12000 / 400e9 * 1e3) and decode.network_ms == 0
    assert decode.floor_ms == decode.memory_ms == pytest.approx(decode.fewest_bytes / 1640e9 * 1e3)
    prefill = floors.prefill_floor(prepared, text)
    pairs = 2048 * 2049 // 2 * 32
    assert prefill.flops == (2 * 2048 * layers + pairs * 4 * 32 * 128) / 4 and prefill.floor_ms == prefill.compute_ms


def test_experts_count_as_tokens_are_routed(on_cpu, tmp_path):
    config = json.loads((prepare.find_model(LLAMA) / "config.json").read_text())
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    (tmp_path / "config.json").write_text(
        json.dumps(config | mixture | {"num_experts_per_tok": 2, "num_hidden_layers": 1})
    )
    prepared = prepare.prepare(str(tmp_path), chips.parse_target("h200-1"))
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    assert prepared.active_params == attention + 4096 * 8 + 2 * 3 * 4096 * 14336


def test_what_hosts_read(on_cpu, monkeypatch):
    """Of two hosts, of which each has two of the four devices that share the weights; norms lie on all."""
    prepared = prepare.prepare(LLAMA, V6E_4)
    norms = 2 * 65 * 4096
    assert floors.host_weight_bytes(prepared) == [2 * 8_030_261_248]
    monkeypatch.setattr(prepare.Prepared, "hosts", (0, 0, 1, 1))
    assert floors.host_weight_bytes(prepared) == [8_030_261_248 - norms // 2 + norms] * 2


def test_batches(on_cpu):
    prepared = prepare.prepare(LLAMA, chips.parse_target("v6e-4"), num_blocks=6000)
    assert efficiency.pick_batch(prepared, 32) == 64
    assert efficiency.pick_batch(prepared, 4096) == 32  # of 46 that fit
    assert efficiency.pick_batch(prepared, 4096, 46) == 46
    with pytest.raises(ValueError, match=r"47 sequences of 4096 tokens need 6016 blocks, but there are 6000, for 256"):
        efficiency.pick_batch(prepared, 4096, 47)
    with pytest.raises(ValueError, match="at most 131072 tokens"):
        efficiency.pick_batch(prepared, 131073)


def test_origins_follow_argument_names():
    def name(op_name):
        return efficiency._label(Instruction("p", (), "parameter", ("0",), f'metadata={{op_name="{op_name}"}}'))

    assert [name("leaves[3]"), name("head[0]"), name("kv_pools[0]"), name("packed")] == [
        efficiency.WEIGHTS,
        efficiency.WEIGHTS,
        efficiency.POOL,
        efficiency.INPUTS,
    ]


def test_meshes(on_cpu):
    with pytest.raises(MeshError, match=r"mesh 'tensor=4' has 4 devices, but target v6e-8 has 8; .* 'tensor=8'"):
        prepare.prepare(LLAMA, chips.parse_target("v6e-8"), "tensor=4")
    with pytest.raises(MeshError, match="3 devices, which do not divide"):
        prepare.prepare(LLAMA, chips.parse_target("v6e-3"))
    with pytest.raises(MeshError, match="mesh axis 'stage' has 2 devices that would all do the same work"):
        prepare.prepare(LLAMA, chips.parse_target("v6e-4"), "stage=2,tensor=2")
    both = prepare.prepare(LLAMA, chips.parse_target("v6e-4"), "data=1,tensor=4")
    assert dict(both.mesh.shape) == {"data": 1, "tensor": 4}


def test_what_does_not_fit_is_said_with_numbers(on_cpu):
    with pytest.raises(OutOfMemoryError, match=r"v5e-1: the model does not fit: .* 16\.06 GB .* of 15\.56 GB"):
        prepare.prepare(LLAMA, chips.parse_target("v5e-1"))


def test_thunks():
    text = """000: kCommandBuffer [source | sink]
    001: kCustomKernel [source] gemm
    002: kGemm [prev=001] cublas
    003: kCopy [prev=002] copy
004: kWhile [prev=000]
    005: kCustomKernel condition
    006: kAllReduce all-reduce
"""
    found = thunks.parse(text)
    assert found.outer == Counter(kCommandBuffer=1, kWhile=1)
    assert (found.launches, found.command_buffers) == (5, 1)


def test_command_line_reports_errors(capsys):
    assert main(["--model-config", LLAMA, "--target", "v9-1"]) == 2
    assert "error: target 'v9-1' is unknown" in capsys.readouterr().err


def test_configs_are_plain_facts():
    """No key that the reader doesn't need: these files are ours."""
    for path in prepare.MODELS.glob("*/config.json"):
        assert json.loads(path.read_text())["architectures"]


def test_mesh_is_in_the_engines_order(on_cpu):
    mesh = prepare.make_mesh(chips.parse_target("v6e-4"), "data=2,tensor=2")
    want = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    assert mesh == want


def test_a_tpu_begins_with_eight_tokens_and_what_prompts_need(on_cpu, monkeypatch):
    """A row alone takes it longer than eight; large steps come soon, the smallest with its sampler first."""
    for module in (sizing, lowering):
        monkeypatch.setattr(module, "platform_of", lambda mesh: "tpu")
    prepared = prepare.prepare(LLAMA, chips.parse_target("v6e-4"), max_num_seqs=64, max_num_batched_tokens=2048)
    assert list(prepared.layouts)[:3] == [8, 16, 32] and prepared.config.min_bucket == 8
    names = list(prepared.jobs())
    assert names[: lowering.NUM_FIRST] == ["init", ("admit", 1), ("step", 8), ("sample", 8)]
    assert names[lowering.NUM_FIRST :][:3] == [("step", 64), ("sample", 64), ("step", 512)]
    assert sorted(n for kind, n in (name for name in names if name[0] == "step")) == list(prepared.layouts)
    assert {n for kind, n in (name for name in names if name[0] == "logits")} == {8, 16, 32, 64}
    assert prepared.decode_names(1) == (("step", 8), ("sample", 8))


def test_what_is_lowered_hardly_grows_with_the_layers(on_cpu, tmp_path):
    """Layers that are alike are lowered once: another one is a call, with its weights."""
    config, lengths = json.loads((prepare.find_model(LLAMA) / "config.json").read_text()), {}
    for num_layers in (2, 8):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
        prepared = prepare.prepare(
            str(tmp_path), chips.parse_target("v6e-2"), max_model_len=256, max_num_seqs=8, max_num_batched_tokens=8
        )
        lengths[num_layers] = len(prepared.lower(prepared.jobs()["step", 8]).as_text())
    assert (lengths[8] - lengths[2]) / 6 < lengths[2] / 8
