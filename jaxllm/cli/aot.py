"""`jaxllm aot`: compiles a model for TPUs and GPUs without having one, and reports what it needs there."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from jaxllm.aot.chips import CHIPS
from jaxllm.cli.common import program, run_command
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.engine.config import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

CONTEXT = 4096  # tokens of each sequence of the decode step


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a model or target that can't be compiled."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _compile(arguments))


def _compile(arguments: argparse.Namespace) -> int:
    # Silences XLA's log, and keeps JAX from looking for devices.
    for name, value in {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "TPU_STDERR_LOG_LEVEL": "3"}.items():
        os.environ.setdefault(name, value)
    from jaxllm.aot.chips import parse_target
    from jaxllm.aot.prepare import prepare
    from jaxllm.aot.report import make_report, to_json
    from jaxllm.aot.text import render
    from jaxllm.from_vllm.dtypes import kv_dtype_name

    weights, steps = ("dtype", "quantization"), ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    options = (*weights, *steps, "block_size", "num_blocks")
    prepared = prepare(
        arguments.model_config,
        parse_target(arguments.target, arguments.num_hosts),
        arguments.mesh,
        kv_cache_dtype=kv_dtype_name(arguments.kv_cache_dtype),
        **{name: getattr(arguments, name) for name in options},
    )
    report = make_report(
        arguments.model_config,
        prepared,
        batch=arguments.batch,
        context=arguments.context,
        steps_only=arguments.steps_only,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(to_json(report), indent=2) if arguments.json else render(report, top=arguments.top))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        program("aot"),
        description="Compiles the engine's executables for TPUs and GPUs without having one, and prints memory, "
        "compile time, kernels, what the devices and hosts send to each other, the least time of a step, and the bytes "
        "that a decode step moves relative to the fewest possible.",
        examples=[
            Example("aot --model-config llama-3.1-8b --target v6e-8", "a bundled configuration, on eight chips"),
            Example("aot --model-config llama-3.3-70b --target h100-16 --num-hosts 2 --steps-only", "on two hosts"),
        ],
    )
    add = parser.add_argument
    add(
        "--model-config",
        required=True,
        metavar="NAME",
        help="a config.json, a directory with one, or a bundled model's name",
    )
    add(
        "--target",
        required=True,
        metavar="CHIP",
        help=f"chip ({', '.join(CHIPS)}) and number of devices as JAX counts them: v6e-8",
    )
    add(
        "--num-hosts",
        type=int,
        metavar="N",
        help="hosts that share the devices (default: as such a slice has, or one for each 8 GPUs)",
    )
    add("--mesh", metavar="SPEC", help="axes of the mesh, such as tensor=8 (default: all devices on 'tensor')")
    add("--batch", type=int, metavar="N", help="sequences of the decode step (default: 64, or as many as fit)")
    add("--context", type=int, metavar="N", default=CONTEXT, help="tokens of each of them (default: %(default)s)")
    add("--dtype", default="auto", help="of parameters and KV pool (default: bfloat16)")
    add("--kv-cache-dtype", metavar="KIND", default="auto", help="of keys and values: int8 or fp8 (default: the dtype)")
    add("--quantization", metavar="KIND", help="int8, int4 or fp8: of weights that the files hold as floats")
    add("--block-size", type=int, metavar="N", default=BLOCK_SIZE, help="tokens of a KV block (default: %(default)s)")
    add("--num-blocks", type=int, metavar="N", help="KV blocks (default: as many as fit)")
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        default=MAX_NUM_SEQS,
        help="sequences running at once (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=MAX_NUM_BATCHED_TOKENS,
        help="tokens of a step (%(default)s)",
    )
    add("--max-model-len", type=int, metavar="N", help="tokens of a sequence (default: what model and pool allow)")
    add("--steps-only", action="store_true", help="compile only a decode step's executables and the largest step's")
    add("--top", type=int, metavar="N", default=0, help="also list this many instructions that move the most bytes")
    add("--json", action="store_true", help="print one JSON object")
    return parser
