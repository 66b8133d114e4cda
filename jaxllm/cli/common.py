"""Shared by the commands: engine options, exit codes, and the compilation cache."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.argument_checks import check_float
from jaxllm.cli.completion import completes_models
from jaxllm.cli.environment import unused_note
from jaxllm.cli.parser import StoreModel, json_object
from jaxllm.cli.streams import flushed, reader_gone, replace_closed
from jaxllm.cli.texts import error_text
from jaxllm.cli.vllm_flags import add_vllm_flags
from jaxllm.engine.config import GPU_MEMORY_UTILIZATION, MEM_FRACTION_VARIABLES, PREEMPTIONS
from jaxllm.errors import JaxLLMError
from jaxllm.interrupts import WholeImports, no_lost_interrupt
from jaxllm.models.tasks import TASKS
from jaxllm.sampling_params import drawing_fields
from jaxllm.stderr import say

log = logging.getLogger(__name__)

_ENGINE_OPTIONS = (
    "model",
    "revision",
    "download_dir",
    "tokenizer",
    "dtype",
    "mesh",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_bytes",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "preemption",
    "swap_space",
    "kv_cache_dtype",
    "calculate_kv_scales",
    "record",
    "load_format",
    "quantization",
    "hf_overrides",
    "task",
    "max_logprobs",
    "logprobs_mode",
    "batch_invariant",
)
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,  # no limit, not even the file system's default
}
EXIT_USER_ERROR, EXIT_INTERRUPTED = (2, 130)  # the latter as a shell reports the signal


def program(name: str) -> str:
    """The command's name in its messages, according to how it was started."""
    return f"jaxllm {name}" if Path(sys.argv[0]).name in ("jaxllm", "jaxllm.exe") else f"python -m jaxllm.{name}"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the model as an argument without an option, beside `--model` of `add_engine_arguments`."""
    completes_models(
        parser.add_argument("model", nargs="?", action=StoreModel, metavar="MODEL", help="the same as --model")
    )


def add_loading_arguments(group: Any) -> None:
    """Adds to a parser, or a group of it, which model is loaded, and onto which devices."""
    add = group.add_argument
    model = add(
        "--model",
        action=StoreModel,
        metavar="NAME",
        help="a directory in Hugging Face format, a .gguf file, a model of the hub as org/name[@revision][:FILE.gguf], "
        "or smollm2 (default: the embedded model)",
    )
    completes_models(model)
    add("--revision", metavar="REV", help="branch, tag or commit of a model of the hub (default: main)")
    add("--download-dir", metavar="DIR", help="where models of the hub are kept (default: huggingface_hub's cache)")
    add("--tokenizer", metavar="DIR", help="a directory or .gguf file with another tokenizer (default: the model's)")
    add(
        "--dtype",
        help="of weights and computation: bfloat16, float16, float32 or auto (default: auto: bfloat16; on a CPU "
        "float32, or bfloat16 for files of 16-bit floats where the processor multiplies pairs of them)",
    )
    add("--mesh", metavar="SPEC", help="devices per axis, e.g. tensor=4, or data=2,tensor=4 (default: one device)")
    add("--tensor-parallel-size", type=int, metavar="N", help="same as --mesh tensor=N")
    add(
        "--quantization",
        metavar="KIND",
        help="int8, int4 or fp8: dense weights become that while they load; gguf: a file's blocks stay as they are, as "
        "on a CPU without --dtype anyway",
    )
    add("--kv-cache-dtype", metavar="KIND", help="int8 or fp8: keys and values in 8 bits (default: the model's dtype)")
    add(
        "--calculate-kv-scales",
        action=argparse.BooleanOptionalAction,
        help="measure the scales of 8-bit keys and values at the start, as is done for int8 without any",
    )
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}  # vLLM's names of the same
    add("-tp", type=int, dest="tensor_parallel_size", **hidden)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the engine's options. An option that is not given leaves the engine's default."""
    group = parser.add_argument_group("engine")
    add_loading_arguments(group)
    add = group.add_argument
    add("--max-model-len", type=int, metavar="N", help="maximum tokens of a sequence, prompt included")
    add("--max-num-seqs", type=int, metavar="N", help="maximum number of sequences that run at once")
    add("--max-num-batched-tokens", type=int, metavar="N", help="maximum tokens of a step")
    add("--block-size", type=int, metavar="N", help="tokens of a KV block")
    add("--num-blocks", type=int, metavar="N", help="KV blocks (default: as many as fit)")
    add("--kv-cache-bytes", type=int, metavar="N", help="bytes of the KV pool on each device, instead of --num-blocks")
    add("--gpu-memory-utilization", type=float, metavar="X", help="share of each device's memory (default: 0.92)")
    add("--preemption", choices=PREEMPTIONS, help="how sequences are preempted when KV blocks run out (default: auto)")
    add("--swap-space", type=float, metavar="GIB", help="host memory for swapped KV blocks (default: 4)")
    add("--record", metavar="FILE", help="write what is asked of the device to a new file, for jaxllm replay")
    add("--no-prefix-caching", action="store_true", help="compute every prompt in full")
    add("--load-format", metavar="KIND", help="dummy: random weights; safetensors or gguf: only these (default: auto)")
    add("--hf-overrides", type=json_object, metavar="JSON", help="values to use instead of those of config.json")
    add("--task", choices=TASKS, help="embed: of a model that generates, only embeddings (default: as its files say)")
    add("--max-logprobs", type=int, metavar="N", help="most log-probabilities of a token that requests may ask for")
    add(
        "--logprobs-mode",
        metavar="MODE",
        help="raw, processed or sampled: what log-probabilities are of (default: raw)",
    )
    add(
        "--batch-invariant",
        action="store_true",
        default=None,
        help="the same results to the bit in any batch, of dense models on one device",
    )
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}  # vLLM's names of the same
    add("--num-gpu-blocks-override", type=int, dest="num_blocks", **hidden)
    add("--kv-cache-memory-bytes", type=int, dest="kv_cache_bytes", **hidden)
    add("--preemption-mode", choices=PREEMPTIONS, dest="preemption", **hidden)
    add("--no-enable-prefix-caching", action="store_true", dest="no_prefix_caching", **hidden)
    add("--enable-prefix-caching", action="store_false", dest="no_prefix_caching", **hidden)
    add_vllm_flags(parser)


def engine_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `LLM` given on the command line."""
    given = {name: getattr(arguments, name) for name in _ENGINE_OPTIONS}
    given["enable_prefix_caching"] = False if arguments.no_prefix_caching else None
    return {name: value for name, value in given.items() if value is not None}


def located_kwargs(arguments: argparse.Namespace, *, weights: bool = True) -> dict[str, Any]:
    """As `engine_kwargs`, with the path of the model in place of its name: for several processes, which need not each
    ask the hub. Without `weights` its configuration is enough."""
    from jaxllm.hub.locate import locate

    given = engine_kwargs(arguments)
    places = {name: given.pop(name) for name in ("revision", "download_dir") if name in given}
    model = locate(given.pop("model", None), **places, weights=weights)
    return given if model is None else {"model": str(model), **given}


def recommended_fields(model: str | None, **places: Any) -> dict[str, Any]:
    """What the model's files say of how to draw; `places` are where to find it, if it is one of the hub."""
    from jaxllm.checkpoint.formats import open_checkpoint
    from jaxllm.checkpoint.generation_config import default_sampling_params
    from jaxllm.default_model import DEFAULT_MODEL
    from jaxllm.hub.locate import locate

    path = DEFAULT_MODEL if model is None else locate(model, **places, weights=False)
    return drawing_fields(default_sampling_params(open_checkpoint(path)))


def run_command(command: Callable[[], int], *, prints: bool = True) -> int:
    """Runs `command` and returns its exit code; expected errors print one line instead of a traceback. `prints`:
    whether its results go to standard output."""
    try:
        replace_closed(prints=prints)
        note = unused_note()
        if note is not None:
            say(note)
        with WholeImports(), no_lost_interrupt():
            return flushed(command())
    except BrokenPipeError:
        return reader_gone()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        log.debug("the command failed", exc_info=True)
        # Of a Ctrl-C in Python that C++ called JAX's makes a ValueError, and of one in an import Python an ImportError.
        if _comes_from(error, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        if not isinstance(error, ValueError | OSError | JaxLLMError):
            raise
        say(f"error: {error_text(error)}")
        return EXIT_USER_ERROR


def _comes_from(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether such an exception is among the causes and contexts of `error`, and theirs."""
    chain: dict[int, BaseException] = {}  # by id, as causes may be set to a circle
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and id(one) not in chain:
            chain[id(one)] = one
            found += [one.__cause__, one.__context__]
    return any(isinstance(one, kind) for one in chain.values())


def setup_device_memory(gpu_memory_utilization: float | None) -> None:
    """Sets the share of each GPU that JAX preallocates (None: the default). Call it before jax starts. A share set in
    the environment takes precedence. Raises `ValueError` for a share out of range."""
    share = GPU_MEMORY_UTILIZATION if gpu_memory_utilization is None else gpu_memory_utilization
    check_float("gpu_memory_utilization", share, 0.01, 1.0)
    if not any(os.environ.get(name) for name in MEM_FRACTION_VARIABLES):
        os.environ[MEM_FRACTION_VARIABLES[0]] = f"{share:g}"


def setup_compilation_cache() -> None:
    """Where JAX_COMPILATION_CACHE_DIR names a place, has JAX keep all executables there, large or small. Without it the
    engine keeps them in a place of its own. For commands only, because JAX's options apply to the whole process."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if given is None:
        return
    import jax

    if "://" not in given:  # no bucket
        try:
            Path(given).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("there is no compilation cache, so that each start compiles everything: %s", error)
            jax.config.update("jax_compilation_cache_dir", None)
            jax.config.update("jax_enable_compilation_cache", False)
            return
    for name, value in _KEEP_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
