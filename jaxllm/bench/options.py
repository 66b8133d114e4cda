"""Shared by the measurements of a model: options, their checks, and the engine made from them."""

import argparse
from pathlib import Path
from typing import Any

from jaxllm.cli.common import add_engine_arguments, add_model_argument, located_kwargs


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repeats", type=int, default=3, metavar="N", help="measured runs (default: 3)")
    add("--json", action="store_true", help="one JSON object instead of a table")
    add_model_argument(parser)
    add_engine_arguments(parser)
    add(
        "--dummy-weights",
        action="store_true",
        help="use random parameters: --model needs only a config.json, and may be that file",
    )


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `open_llm`. Raises `ValueError` for invalid ones, before jax is imported."""
    if arguments.dummy_weights and arguments.model is None:
        raise ValueError("--dummy-weights needs a model configuration; give its directory or config.json with --model")
    located = located_kwargs(arguments, weights=not arguments.dummy_weights)
    return {"dummy_weights": arguments.dummy_weights, **located}


def check_at_least(least: int, **options: Any) -> None:
    for name, value in options.items():
        if not least <= value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}, and finite")


def open_llm(*, dummy_weights: bool, **engine: Any) -> Any:
    """An `LLM` that is ready to serve. `engine` are its keyword arguments."""
    from jaxllm.llm import LLM

    if not dummy_weights:
        return LLM(**engine)
    from jaxllm.engine.dummy import config_folder

    folder = config_folder(Path(engine.pop("model")))
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, **engine)
