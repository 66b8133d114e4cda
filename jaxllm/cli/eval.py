"""`jaxllm eval`: what a model makes of texts and questions, and how far it is from another model."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from jaxllm.cli.common import (
    add_loading_arguments,
    add_model_argument,
    program,
    run_command,
    setup_compilation_cache,
    setup_device_memory,
)
from jaxllm.cli.completion import completes_models
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.eval import CONTEXT


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for models or files that can't be evaluated."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _evaluate(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        program("eval"),
        description="Measures a model: the perplexity of texts, the divergence of its predictions from those of a "
        "reference (usually the model before it was quantised), and how often it finds the right one of several "
        "choices. Texts are read in chunks, of each of which the second half is scored. One model at a time has its "
        "layers on the devices; of the reference its head stays there, and the host keeps the hidden state of each "
        "token that is scored. docs/evaluation.md defines all numbers.",
        examples=[
            Example("eval smollm2 --text book.txt", "perplexity"),
            Example("eval model-awq --reference model --text book.txt", "what quantisation has cost"),
            Example("eval smollm2 --quantization int8 --reference smollm2 --text book.txt", "and what it would cost"),
            Example("eval smollm2 --kv-cache-dtype fp8 --reference smollm2 --text book.txt", "of a KV cache in 8 bits"),
            Example("eval smollm2 --choices questions.jsonl --json", "accuracy, and the log-likelihood of each choice"),
        ],
    )
    add = parser.add_argument
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts, each read from its beginning")
    add(
        "--choices",
        type=Path,
        metavar="FILE",
        help='questions, an object a line: {"context": "...", "choices": ["...", "..."], "answer": INDEX}',
    )
    completes_models(add("--reference", metavar="NAME", help="a model with the same tokens, to compare with"))
    add("--context", type=int, default=CONTEXT, metavar="N", help="tokens of a chunk (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object instead of a table")
    add_model_argument(parser)
    add_loading_arguments(parser.add_argument_group("models"))
    return parser


def _evaluate(arguments: argparse.Namespace) -> int:
    from jaxllm.eval.inputs import read_questions, read_text

    if not arguments.text and arguments.choices is None:
        raise ValueError("there is nothing to evaluate; give --text FILE, or --choices FILE")
    texts = [read_text(file) for file in arguments.text]
    questions = [] if arguments.choices is None else read_questions(arguments.choices)
    setup_device_memory(None)
    setup_compilation_cache()
    from jaxllm.eval.run import evaluate  # imports jax, which --help does not need
    from jaxllm.eval.table import table
    from jaxllm.from_vllm.dtypes import kv_dtype_name
    from jaxllm.hub.locate import locate

    wants_tokenizer = arguments.tokenizer is None
    places = {"download_dir": arguments.download_dir, "tokenizer": wants_tokenizer}
    found = evaluate(
        locate(arguments.model, revision=arguments.revision, **places),
        texts=texts,
        questions=questions,
        reference=None if arguments.reference is None else locate(arguments.reference, **places),
        context=arguments.context,
        tokenizer=arguments.tokenizer,
        dtype=arguments.dtype or "auto",
        quantization=arguments.quantization,
        kv_cache_dtype=kv_dtype_name(arguments.kv_cache_dtype),
        calculate_kv_scales=bool(arguments.calculate_kv_scales),
        mesh=arguments.mesh,
        tensor_parallel_size=arguments.tensor_parallel_size,
    )
    if arguments.json:
        names = {"model": arguments.model or "embedded", "reference": arguments.reference}
        print(json.dumps({"names": names, **dataclasses.asdict(found)}))
    else:
        print(table(found))
    return 0
