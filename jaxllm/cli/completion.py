"""Completes command lines in the shell, through argcomplete (extra: completion): commands, options, models' names."""

import argparse
import os
from importlib import import_module
from typing import Any

from jaxllm.hub.names import SMOLLM2

VARIABLE = "_ARGCOMPLETE"  # set by the shell's hook while it asks


def module_of(command: str) -> str:
    """The module with the command's `main` and `_parser`."""
    return f"jaxllm.cli.{command.replace('-', '_')}"


def complete(commands: dict[str, str]) -> None:
    """Answers the shell and exits. `commands` are those of `jaxllm`, and what each does."""
    import argcomplete

    typed = os.environ.get("COMP_LINE", "").split()[1:2]
    root = argparse.ArgumentParser(prog="jaxllm")
    subparsers = root.add_subparsers()
    for name, text in commands.items():  # only the typed command's module is imported: a TAB has to be quick
        parents = [import_module(module_of(name))._parser()] if name in typed else []
        subparsers.add_parser(name, help=text, parents=parents, add_help=False)
    argcomplete.autocomplete(root)


def completes_models(action: argparse.Action, *, paths: bool = True) -> None:
    """Completes the option by names in the cache, and by `paths`."""

    def names(prefix: str, parsed_args: argparse.Namespace, **options: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        from jaxllm.hub.cache import cache_dir, cached_names

        known = [SMOLLM2, *cached_names(cache_dir(getattr(parsed_args, "download_dir", None)))]
        files = FilesCompleter()(prefix=prefix, parsed_args=parsed_args, **options) if paths else ()
        return [name for name in known if name.startswith(prefix)] + list(files)

    vars(action)["completer"] = names  # an attribute of argcomplete's, which argparse does not declare
