"""The packages that write the formats, where they are installed, read what the readers do."""

import numpy as np
import pytest

from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.make import compressed, method, open_made

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_of_compressed_tensors(bits, strategy, symmetric, tmp_path):
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    assert package
    groups = 4 if strategy == "group" else 1
    size = {"group_size": 64 // groups} if strategy == "group" else {}
    args = QuantizationArgs(num_bits=bits, strategy=strategy, symmetric=symmetric, **size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(0)
    half = 2 ** (bits - 1)
    state = {
        "weight": torch.randn(24, 64, generator=generator),
        "weight_scale": (torch.rand(24, groups, generator=generator) / half).to(torch.float16).float(),
        "weight_zero_point": torch.randint(-half, half, (24, groups), generator=generator).to(torch.int8),
    }
    if symmetric:
        state["weight_zero_point"] *= 0
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(state, scheme)
    want = compressor.decompress(packed, scheme)["weight"].float().numpy()
    tensors = {name: value.numpy() for name, value in packed.items()}
    config = compressed("pack-quantized", num_bits=bits, strategy=strategy, symmetric=symmetric, **size)
    weight = open_made(tmp_path, config, tensors).module.read()
    np.testing.assert_array_equal(make.dense(weight), want)


@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_fp4_of_compressed_tensors(form, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    is_nv = form.startswith("nv")
    strategy, size = ("tensor_group", 16) if is_nv else ("group", 32)
    args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size)
    made = (make.nvfp4 if is_nv else make.mxfp4)(np.random.default_rng(0))
    state = {
        name: torch.from_numpy(value.view(np.uint8)).view(torch.float8_e4m3fn)
        if value.dtype == make.E4M3
        else torch.from_numpy(value)
        for name, value in made.tensors.items()
    }
    compressor = BaseCompressor.get_value_from_registry(form)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    want = compressor.decompress(state, scheme)["weight"].float().numpy()
    config = compressed(form, type="float", num_bits=4, strategy=strategy, group_size=size)
    got = make.dense(open_made(tmp_path, config, made.tensors).module.read())
    np.testing.assert_allclose(got, want, rtol=2**-7)  # the package computes in bfloat16


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_books_of_bitsandbytes(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    # The package's CPU kernel misreads blocks that run over the ends of rows.
    dense = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(dense, quant_type=kind, compress_statistics=nested, blocksize=64)
    want = functional.dequantize_4bit(packed, state).numpy()
    tensors = {"weight": packed.numpy()}
    tensors |= {f"weight.{name}": value.numpy() for name, value in state.as_dict(packed=True).items()}
    module = open_made(tmp_path, method("bitsandbytes", load_in_4bit=True), tensors).module
    np.testing.assert_array_equal(make.dense(module.read()), want)


def test_int8_of_bitsandbytes(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    made = make.bnb8(np.random.default_rng(0))
    want = functional.int8_vectorwise_dequant(*(torch.from_numpy(made.tensors[name]) for name in ("weight", "SCB")))
    got = make.dense(open_made(tmp_path, method("bitsandbytes", load_in_8bit=True), made.tensors).module.read())
    np.testing.assert_allclose(got, want.numpy(), rtol=2**-22)  # it multiplies with 1/127 last
