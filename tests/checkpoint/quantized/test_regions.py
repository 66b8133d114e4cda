"""Of quantised weights each host reads what its devices hold: regions of modules, in units that files can be cut at."""

import dataclasses
from itertools import pairwise, product

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.gguf.blocks import BLOCKS
from jaxllm.checkpoint.loader import load_params, plan_quantized
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.quantized import gguf
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.checkpoint.quantized.module import Region
from jaxllm.errors import MeshError, ModelFormatError
from jaxllm.models import transformer
from jaxllm.sharding.mesh import make_mesh
from tests import hosts
from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.test_experts import EXPERTS, write_mxfp4
from tests.checkpoint.quantized.test_experts import SIZES as MIXTURE
from tests.checkpoint.quantized.test_formats import CASES
from tests.checkpoint.quantized.test_gguf import FORMS as BLOCK_FORMS
from tests.checkpoint.quantized.test_gguf import random_rows, store
from tests.checkpoint.quantized.test_loading import FORMS, PROJECTIONS, SIZES, Scheme
from tests.checkpoints import FUSED, write_checkpoint
from tests.hosts import check_hosts
from tests.mixtures import write_mixture


def crop(weight, region):
    """The region of a whole module."""
    groups = region.inputs
    if weight.scales.ndim == 2:
        group = weight.codes.shape[1] // weight.scales.shape[1]
        groups = slice(groups.start // group, -(-groups.stop // group))
    return weight._replace(
        codes=weight.codes[region.outputs, region.inputs],
        scales=weight.scales[region.outputs, groups] if weight.scales.ndim == 2 else weight.scales[region.outputs],
        offsets=None if weight.offsets is None else weight.offsets[region.outputs, groups],
        outer=None if weight.outer is None else weight.outer[region.outputs],
    )


def check_same(got, want):
    for name, one, other in zip(want._fields, got, want, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape, name
            np.testing.assert_array_equal(
                np.ascontiguousarray(one).view(np.uint8), np.ascontiguousarray(other).view(np.uint8), err_msg=name
            )


def regions(module):
    """Those between the ends of the module's units: two or three along each axis, if there are so many."""
    parts = []
    for size, unit in zip(module.shape, module.unit, strict=True):
        ends = sorted({0, min(unit, size), size // 2 // unit * unit, size})
        parts.append([slice(*pair) for pair in pairwise(ends)])
    return [Region(*both) for both in product(*parts)]


def check_regions(module):
    whole = module.read()
    found = regions(module)
    with pytest.MonkeyPatch.context() as patch, hosts.count_bytes(patch) as read:
        for region in found:
            check_same(module.read(region), crop(whole, region))
    tables = [tensor for tensor in module.tensors if len(tensor.shape) == 2 and min(tensor.shape) > 1]
    # What has outputs and inputs is read once, all regions together; the rest at most once for each.
    for tensor in module.tensors:
        most = tensor.num_bytes * (1 if tensor in tables else len(found))
        assert read[tensor.name] <= most, tensor.name
    assert all(read[tensor.name] == tensor.num_bytes for tensor in tables)
    return len(found)


UNITS = {  # outputs and inputs
    "awq": (8, 8),
    "awq, whole inputs": (8, 32),  # zero points are those of all inputs together
    "awq, symmetric, whole inputs, bf16": (8, 1),
    "gptq, 3 bits": (32, 32),
    "gptq, 4 bits": (8, 16),
    "gptq, act-order": (8, 64),
    "mlx, 3 bits": (1, 32),
    "W4A16": (1, 16),
    "W4A16, asymmetric": (8, 16),
    "W4A16, act-order": (1, 64),
    "W8A16, by channel": (1, 4),
    "W8A8": (1, 1),
    "FP8": (1, 1),
    "NVFP4": (1, 16),
    "MXFP4": (1, 32),
    "bitsandbytes int8": (1, 1),
    "bitsandbytes nf4": (8, 24),
}


@pytest.mark.parametrize("case", CASES)
def test_a_region_is_that_of_the_whole(case, tmp_path):
    config, made, _ = CASES[case](np.random.default_rng(1))
    module = make.open_made(tmp_path, config, made.tensors).module
    check_regions(module)
    assert module.unit == UNITS.get(case, module.unit)


@pytest.mark.parametrize("name", BLOCK_FORMS)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_region_of_blocks(name, is_interleaved, tmp_path):
    width = 3 * 256
    tensor = store(tmp_path, name, random_rows(name, 16, width), width, is_interleaved=is_interleaved)
    module = gguf.module("q", tensor, 8)
    assert check_regions(module) >= 4 and module.unit == (8 if is_interleaved else 1, BLOCKS[name].num_values)


class Cut(Scheme):
    """Modules whose regions can be read, in units of rows and groups, and how much of each is."""

    def __init__(self, forms, rows=1):
        super().__init__(forms)
        self._rows, self.read = rows, []

    def modules(self, stored):
        modules, rest = super().modules(stored)
        return {name: self._cut(name, module) for name, module in modules.items()}, rest

    def _cut(self, name, module):
        weight, form = module.read(), module.form
        columns = module.shape[1] if form.is_reordered else form.group or 1

        def read(region):
            for part, unit, size in zip(region, (self._rows, columns), module.shape, strict=True):
                assert part.start % unit == 0 and (part.stop % unit == 0 or part.stop == size)
            self.read.append((name, region.shape[0] * region.shape[1] / (module.shape[0] * module.shape[1])))
            return crop(weight, region)

        return dataclasses.replace(module, reader=read, unit=(self._rows, columns))


def loading(folder, mesh, scheme):
    checkpoint, spec = open_checkpoint(folder), read_config(folder, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    plan = plan_quantized(checkpoint, spec, model, scheme.modules)
    expand_model(model, mesh)
    abstract = nnx.state(model, nnx.Param)
    return lambda take: load_params(checkpoint, spec, abstract, mesh, quantized=plan, take=take)


@pytest.mark.parametrize("partition", ["each", "halves", "scattered"])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "act-order"])
def test_products_on_hosts(tmp_path, name, partition):
    """Of eight devices each has half of a KV head's queries, and half a group of some forms' inputs."""
    write_checkpoint(tmp_path, **SIZES, vocab_size=27)
    forms = dict.fromkeys((*PROJECTIONS, "embed_tokens", "lm_head"), FORMS[name])
    mesh, scheme = make_mesh("tensor=8"), Cut(forms)
    load = loading(tmp_path, mesh, scheme)
    found, _ = check_hosts(mesh, load, partition)
    if partition == "halves":
        of_hosts = scheme.read[len(scheme.read) // 3 :]  # one process reads it all before
        assert {share for _, share in of_hosts if share > 0.6} == set()
        assert len(found) == 2


@pytest.mark.parametrize("form", ["act-order", "uint4"])
def test_members_of_other_forms_on_hosts(tmp_path, form):
    write_checkpoint(tmp_path, **SIZES)
    scheme = Cut({"q_proj": FORMS[form], "v_proj": FORMS["int8"], "up_proj": FORMS[form], "lm_head": FORMS[form]}, 2)
    mesh = make_mesh("tensor=8")
    check_hosts(mesh, loading(tmp_path, mesh, scheme), "pairs")


def test_fused_products_on_hosts(tmp_path):
    write_checkpoint(tmp_path, **SIZES, **FUSED)
    mesh = make_mesh("tensor=8")
    scheme = Cut({"qkv_proj": FORMS["int8"], "gate_up_proj": FORMS["uint4"]}, 4)
    check_hosts(mesh, loading(tmp_path, mesh, scheme), "halves")


def test_what_only_padding_would_hold(tmp_path):
    """The order of inputs is every device's, and comes with outputs."""
    write_checkpoint(tmp_path, **SIZES, vocab_size=9)
    mesh = make_mesh("tensor=8")
    load = loading(tmp_path, mesh, Cut({"lm_head": FORMS["act-order"]}))
    with pytest.raises(MeshError, match="some devices would hold nothing but padding of lm_head; take fewer"):
        hosts.load_as([mesh.devices.flat[7]], load)


@pytest.mark.parametrize("spec", ["expert=4,tensor=2", "expert=2,tensor=4"])
@pytest.mark.parametrize("name", ["int8", "uint4", "nvfp4"])
def test_experts_on_hosts(tmp_path, name, spec):
    """Each host reads its own, and nothing of others."""
    write_mixture(tmp_path, "Qwen3Moe", **MIXTURE, num_attention_heads=8, num_key_value_heads=8)
    mesh, scheme = make_mesh(spec), Cut(dict.fromkeys(EXPERTS, FORMS[name]))
    load = loading(tmp_path, mesh, scheme)
    check_hosts(mesh, load, "halves")
    scheme.read.clear()
    hosts.load_as(list(mesh.devices.flat)[:4], load)
    assert {name.split(".")[-2] for name, _ in scheme.read} == {"0", "1"}


def test_stacked_experts_on_hosts(tmp_path):
    """Those of gpt-oss, as its files hold them."""
    write_mxfp4(tmp_path, num_attention_heads=8, num_key_value_heads=8)
    checkpoint, mesh = open_checkpoint(tmp_path), make_mesh("expert=4,tensor=2")
    load = loading(tmp_path, mesh, scheme_of(checkpoint, checkpoint.config()))
    found, _ = check_hosts(mesh, load, "halves")
    stored = checkpoint.tensors()
    for host in found:
        for name, tensor in stored.items():
            if name.endswith(("_blocks", "_scales")):
                assert host.read[name] == tensor.num_bytes // 2


def test_a_part_of_zeros_is_no_damage(tmp_path):
    """All of a tensor's scales are; a host that reads some of them can't tell."""
    rng = np.random.default_rng(0)
    made = make.fp8(rng, scales=(32,))
    made.tensors["weight_scale"][:16] = 0
    module = make.open_made(tmp_path, make.method("fp8"), made.tensors).module
    check_same(module.read(Region(slice(0, 16), slice(0, 64))), crop(module.read(), Region(slice(0, 16), slice(0, 64))))
    made.tensors["weight_scale"][:] = 0
    with pytest.raises(ModelFormatError, match="scales that are all zero"):
        make.open_made(tmp_path, make.method("fp8"), made.tensors).module.read()
