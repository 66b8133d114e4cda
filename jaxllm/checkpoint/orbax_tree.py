"""Parameters that Orbax has saved, restored onto an engine's mesh: an `nnx.State` or nested dicts with its paths, alone
or within a training state, in a directory of their own or in a step of a `CheckpointManager`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxllm.argument_checks import some_of
from jaxllm.checkpoint.orbax_files import find_arrays
from jaxllm.checkpoint.placement import canonical, named, place_params, sharding_before
from jaxllm.errors import ModelFormatError
from jaxllm.models.transformer import Params

_VALUE = "value"  # the key beneath which a State of some versions of Flax keeps a variable's array
Keys = tuple[Any, ...]  # keys that lead to an array


def restore_params(path: Path, dense: Params, params: Params, mesh: Mesh) -> Params:
    """The arrays at `path` in the state that the abstract `params` describe, on `mesh`. `dense` are the abstract
    parameters of the same model on it without quantised weights, which are what is saved.

    Each device reads what it holds, whatever mesh the arrays were saved from, and they become the dtype of `dense`.
    Raises `ModelFormatError` for other names or shapes than the model's, `ImportError` without Orbax.
    """
    ocp = _orbax()
    folder = find_arrays(path).resolve()
    wanted = named(dense)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = _stored(folder, checkpointer.metadata(folder))
        paths = _paths(folder, found, wanted)
        _check_shapes(folder, found, paths, wanted)
        restore = {
            paths[name]: ocp.ArrayRestoreArgs(
                sharding=sharding_before(var, mesh), global_shape=canonical(var).shape, dtype=canonical(var).dtype
            )
            for name, var in wanted.items()
        }
        args = ocp.args.PyTreeRestore(
            item=_nested({path: found[path] for path in restore}), restore_args=_nested(restore), partial_restore=True
        )
        try:
            tree = checkpointer.restore(folder, args=args)
        except Exception as error:  # noqa: BLE001 - what Orbax raises is of no kind of its own
            reason = str(error).strip().partition("\n")[0][:300]
            raise ModelFormatError(f"{folder} is incomplete or damaged: {reason}. Save it again") from error
    arrays = dict(_leaves(tree))
    by_name = {name: arrays[paths[name]] for name in wanted}
    own = _nested({tuple(name.split(".")): array for name, array in by_name.items()})
    return place_params(own, params, mesh, donate=True)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError("reading an Orbax checkpoint needs orbax-checkpoint: pip install 'jaxllm[orbax]'") from error
    return ocp


def _stored(folder: Path, metadata: Any) -> dict[Keys, Any]:
    """Each array's description by the keys that lead to it."""
    if metadata.item_metadata is None:
        raise ModelFormatError(f"{folder} is incomplete or damaged: Orbax finds no arrays there. Save it again")
    return dict(_leaves(metadata.item_metadata.tree))


def _leaves(tree: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*path, i))
    elif tree is not None:
        yield path, tree


def _nested(leaves: Mapping[Keys, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _paths(folder: Path, found: Mapping[Keys, Any], wanted: Mapping[str, nnx.Variable]) -> dict[str, Keys]:
    """Where the model's parameters are: beneath the shortest keys that have them all, since an optimizer's moments,
    which have the same names, lie deeper."""
    plain = {tuple(map(str, path[:-1] if path[-1] == _VALUE else path)): path for path in found}
    names = {name: tuple(name.split(".")) for name in wanted}
    first = next(iter(names.values()))
    above = [path[: len(path) - len(first)] for path in plain if path[-len(first) :] == first]
    whole = sorted((keys for keys in above if all((*keys, *own) in plain for own in names.values())), key=len)
    if not whole:
        nearest = min(above, key=len, default=())
        missing = sorted(name for name, own in names.items() if (*nearest, *own) not in plain)
        raise ModelFormatError(
            f"{folder} holds other parameters than the model's: it lacks {some_of(missing)}, and has "
            f"{some_of(sorted(map('.'.join, plain)))}. Give the configuration that it was trained with; what another "
            "library has saved jaxllm.models.convert turns into a model's parameters"
        )
    if len(whole) > 1 and len(whole[1]) == len(whole[0]):
        places = ", ".join(".".join(keys) for keys in whole if len(keys) == len(whole[0]))
        raise ModelFormatError(
            f"{folder} holds the parameters of several models: {places}. Restore those that are wanted, and give LLM a "
            "pair (configuration, parameters)"
        )
    own = {(*whole[0], *own) for own in names.values()}
    if spare := sorted(".".join(path) for path in plain if path[: len(whole[0])] == whole[0] and path not in own):
        raise ModelFormatError(
            f"{folder} has more parameters than the model: {some_of(spare)}. Merge adapters before they are saved, or "
            "give the configuration that it was trained with"
        )
    return {name: plain[(*whole[0], *own)] for name, own in names.items()}


def _check_shapes(
    folder: Path, found: Mapping[Keys, Any], paths: Mapping[str, Keys], wanted: Mapping[str, nnx.Variable]
) -> None:
    for name, var in wanted.items():
        stored, want = tuple(found[paths[name]].shape), canonical(var).shape
        if stored != want:
            raise ModelFormatError(
                f"{folder}: {name} has shape {list(stored)}, but the configuration implies {list(want)}; give the one "
                "that it was trained with"
            )
