"""Time to have a model's parameters on the devices, from safetensors and from what Orbax has saved, both in the page
cache: the engine's own ways, without what it compiles. The model is a Qwen3 of random parameters."""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs import table_lines

_COLUMNS = (
    ("safetensors_s", "safetensors s", ".2f"),
    ("orbax_s", "Orbax s", ".2f"),
    ("ratio", "ratio", ".2f"),
    ("safetensors_cpu_s", "safetensors CPU s", ".2f"),
    ("orbax_cpu_s", "Orbax CPU s", ".2f"),
)


def run(*, layers: int, meshes: list[str], dtype: str, repeats: int) -> dict[str, Any]:
    """The report; medians of `repeats` runs of each, which take turns."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    from jaxllm.models import qwen3, save_hf
    from jaxllm.models.layers import LayerSpec, Rope

    layer = LayerSpec(rope=Rope(theta=1e4))
    sizes: dict[str, Any] = dict(vocab=32768, embed=1024, heads=16, kv_heads=8, head_dim=64, mlp=3072, max_len=2048)
    cfg = qwen3.Config(layers=(layer,) * layers, tie_embeddings=True, **sizes)
    model, rows = qwen3.Model(cfg, rngs=nnx.Rngs(0)), []
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(model, nnx.Param))
    num_params = sum(leaf.get_value().size for leaf in nnx.to_flat_state(state).leaves)
    with tempfile.TemporaryDirectory() as folder:
        hf, saved = Path(folder) / "hf", Path(folder) / "orbax"
        save_hf(model, hf, dtype=dtype)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(saved, state)
        del model, state
        for mesh in meshes:
            ways = {"safetensors": _loading(hf, mesh, dtype, None), "orbax": _loading(saved, mesh, dtype, hf)}
            rows.append({"mesh": mesh} | _times(ways, repeats))
    options = {"layers": layers, "dtype": dtype, "repeats": repeats, "num_params": num_params}
    return {"benchmark": "checkpoints", "options": options, "results": rows}


def _loading(path: Path, spec: str, dtype: str, config: Path | None) -> Callable[[], Any]:
    """What puts the parameters at `path` on a mesh, as the engine does."""
    from jaxllm.engine.build import open_model
    from jaxllm.engine.model_source import Reading
    from jaxllm.sharding.mesh import make_mesh

    reading, mesh = Reading(skip_tokenizer_init=True, config=config), make_mesh(spec)

    def load() -> Any:
        source, state, _ = open_model(path, dtype, None, reading, mesh)
        return source.place(state, mesh)

    return load


def _times(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    import jax

    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + repeats):
        for name, load in ways.items():
            gc.collect()
            began, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(load())
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)
    found = {f"{name}_s": median(wall[name][1:]) for name in ways}
    found |= {f"{name}_cpu_s": median(cpu[name][1:]) for name in ways}
    return found | {"ratio": found["safetensors_s"] / found["orbax_s"]}


def table(report: dict[str, Any]) -> str:
    """A line for each mesh."""
    options = report["options"]
    lines = [
        f"{options['num_params'] / 1e6:.0f} million parameters in {options['dtype']}",
        *table_lines(report["results"], "mesh", _COLUMNS, 19),
        f"medians of {options['repeats']} runs in turns",
    ]
    return "\n".join(lines)
