"""Time to have a model's parameters on the devices of one mesh after they were on those of another: by way of
safetensors, and of Orbax. Files stay in the page cache; loading is the engine's own, without what it compiles. The
model is a Qwen3 of random parameters."""

import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs import table_lines

_COLUMNS = (
    ("to", "read on", "s"),
    ("safetensors_save_s", "safetensors: save s", ".2f"),
    ("safetensors_load_s", "load s", ".2f"),
    ("orbax_save_s", "Orbax: save s", ".2f"),
    ("orbax_load_s", "load s", ".2f"),
    ("ratio", "ratio of sums", ".2f"),
)


def run(*, layers: int, meshes: list[str], dtype: str, repeats: int) -> dict[str, Any]:
    """The report: from each mesh to each, medians of `repeats` runs of both, which take turns."""
    import jax
    from flax import nnx

    from jaxllm.models import load, qwen3, save_hf
    from jaxllm.models.layers import LayerSpec, Rope
    from jaxllm.sharding.mesh import make_mesh

    layer = LayerSpec(rope=Rope(theta=1e4))
    sizes: dict[str, Any] = dict(vocab=32768, embed=1024, heads=16, kv_heads=8, head_dim=64, mlp=3072, max_len=2048)
    cfg = qwen3.Config(layers=(layer,) * layers, tie_embeddings=True, **sizes)
    model, rows = qwen3.Model(cfg, rngs=nnx.Rngs(0)), []
    num_params = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    with tempfile.TemporaryDirectory() as folder:
        made = save_hf(model, Path(folder) / "made", dtype=dtype)
        del model
        for saved_on, read_on in product(meshes, meshes):
            model = load(made, mesh=make_mesh(saved_on))
            ways = {"safetensors": (save_hf, None), "orbax": (_save_orbax, made)}
            steps = {
                name: (partial(save, model), _loading(read_on, dtype, config)) for name, (save, config) in ways.items()
            }
            rows.append({"from": saved_on, "to": read_on} | _times(steps, Path(folder) / "saved", repeats))
    options = {"layers": layers, "dtype": dtype, "repeats": repeats, "num_params": num_params}
    return {"benchmark": "checkpoints", "options": options, "results": rows}


def _save_orbax(model: Any, path: Path) -> None:
    import orbax.checkpoint as ocp
    from flax import nnx

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.state(model, nnx.Param))


def _loading(spec: str, dtype: str, config: Path | None) -> Callable[[Path], Any]:
    """What puts the parameters at a path on a mesh, as the engine does."""
    from jaxllm.engine.build import open_model
    from jaxllm.engine.model_source import Reading
    from jaxllm.sharding.mesh import make_mesh

    reading, mesh = Reading(skip_tokenizer_init=True, config=config), make_mesh(spec)

    def load(path: Path) -> Any:
        source, state, _ = open_model(path, dtype, None, reading, mesh)
        return source.place(state, mesh)

    return load


def _times(
    ways: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]], path: Path, repeats: int
) -> dict[str, float]:
    import jax

    wall: dict[str, list[float]] = {}
    for _ in range(1 + repeats):
        for name, steps in ways.items():
            for step, run in zip(("save", "load"), steps, strict=True):
                gc.collect()
                began = time.perf_counter()
                jax.block_until_ready(run(path))
                wall.setdefault(f"{name}_{step}_s", []).append(time.perf_counter() - began)
            shutil.rmtree(path)
    found = {name: median(seconds[1:]) for name, seconds in wall.items()}
    safetensors, orbax = (found[f"{name}_save_s"] + found[f"{name}_load_s"] for name in ways)
    return found | {"ratio": safetensors / orbax}


def table(report: dict[str, Any]) -> str:
    """A line for each pair of meshes."""
    options = report["options"]
    lines = [
        f"{options['num_params'] / 1e6:.0f} million parameters in {options['dtype']}",
        *table_lines(report["results"], "from", _COLUMNS, 21),
        f"medians of {options['repeats']} runs in turns",
    ]
    return "\n".join(lines)
