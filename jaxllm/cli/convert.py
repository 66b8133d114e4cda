"""`python -m jaxllm.convert`: converts a checkpoint with pickled weights or a slow tokenizer."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from jaxllm.cli.common import program, run_command
from jaxllm.cli.parser import CommandParser, Example

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_KINDS = ("int8", "int4", "fp8")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for bad input, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _convert(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        program("convert"),
        description="Writes SRC, a Hugging Face directory with pytorch_model*.bin or a slow tokenizer, to OUT with "
        "safetensors and tokenizer.json. Pickles are read in a separate process, and no code in them runs. Or it "
        "quantises weights, for jaxllm and other engines.",
        examples=[
            Example("convert vicuna-7b vicuna-7b-safetensors", "the way to serve what has pytorch_model*.bin"),
            Example("convert Qwen3-8B Qwen3-8B-int4 --quantization int4", "a fourth of the memory"),
        ],
        epilog="All but --quantization needs the extra: pip install 'jaxllm[convert]'",
    )
    add = parser.add_argument
    add("src", type=Path, metavar="SRC", help="the directory to read")
    add("out", type=Path, metavar="OUT", help="the directory to create; it appears when it is complete")
    add("--dtype", choices=_DTYPES, default="auto", help="of floating-point weights (default: auto, as stored)")
    add("--quantization", choices=_KINDS, help="of the products in the layers, as compressed-tensors; needs no extra")
    add("--max-shard-size", type=_num_bytes, default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    return parser


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B|)", text.upper())
    if match is None or match[2] not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write one as 5GB or 500MB")
    return size


def _convert(arguments: argparse.Namespace) -> int:
    from jaxllm.convert.directory import convert  # imports tokenizers and numpy, which --help does not need

    options = {"dtype": arguments.dtype, "max_shard_bytes": arguments.max_shard_size}
    print(convert(arguments.src, arguments.out, **options, quantization=arguments.quantization))
    return 0
