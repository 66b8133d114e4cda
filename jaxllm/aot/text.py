"""A report as people read it."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from jaxllm.aot.floors import Floor
from jaxllm.aot.prepare import Prepared
from jaxllm.aot.report import Executable, Report

_FLOORS = """\
How it was bounded: each time alone is what such a step takes at least: the fewest bytes of main memory, the products of
active parameters and of attention at bfloat16's peak, and what collectives send, on links that carry nothing else and
without latency; collectives come after what they add up, unless XLA overlaps them. An all-reduce of n devices sends
each byte 2(n-1)/n times, where no switch adds up; on GPUs of several hosts the devices of a host add up first, and each
then meets its like on the others. Weights that a host reads are in the form that its devices have: with KV heads
repeated for devices beyond their number."""
_METHOD = """\
How it was counted: a decode step runs two executables, the forward pass and the sampler, which reads the head; its
numbers are of both. In their optimised modules, every kernel (fusion, custom call, copy, collective) reads its operands
and writes its results once. What is only sliced or gathered counts as much as comes out, what is updated in place as
much as goes in, a loop's body as often as it runs; what lies in VMEM counts nothing, its copies from and to main memory
do. Our attention kernels count what they declare for these lengths, in every layer. Links between devices don't count.
Small intermediates are arrays up to a quarter of a GPU's L2 cache. Nothing was tuned by trying: on a real GPU, XLA may
choose other matrix kernels."""
_COST = """\
The compiler's own cost analysis says {:.3f} GB: it also counts what lies in VMEM, copies there at both ends, and for
our kernels what they declare for their largest batch."""


def render(report: Report, *, top: int = 0) -> str:
    """Lines for a terminal; the `top` instructions that move most at the end."""
    parts = _head(report), _memory(report), _compiled(report), _floors(report), _decode(report, top)
    return "\n\n".join("\n".join(part) for part in parts)


def _head(report: Report) -> Iterator[str]:
    prepared, config = report.prepared, report.prepared.config
    mesh = ",".join(f"{name}={size}" for name, size in prepared.mesh.shape.items())
    yield f"{report.model} on {prepared.target}, mesh {mesh}, {_dtypes(prepared)}"
    sizes = report.host_weight_bytes
    read = " to ".join(f"{size / 1e9:.2f}" for size in sorted({min(sizes), max(sizes)}))
    yield f"Hosts: {len(sizes)}, of {prepared.target.host_size} devices; each reads {read} GB of weights"
    yield f"{config.max_num_seqs} sequences of up to {config.max_model_len} tokens"
    yield f"{config.max_num_batched_tokens} tokens a step"
    tokens = config.num_blocks * config.block_size
    yield f"{config.num_blocks} blocks of {config.block_size} tokens: room for {tokens}"


def _dtypes(prepared: Prepared) -> str:
    names = [jnp.dtype(dtype).name for dtype in (prepared.shape.dtype, prepared.shape.kv_dtype(prepared.config))]
    return names[0] if names[0] == names[1] else f"{names[0]}, keys and values {names[1]}"


def _memory(report: Report) -> Iterator[str]:
    chip, step = report.prepared.target.chip, report.largest
    yield f"Memory of each device, GB; {chip.usable_bytes / 1e9:.2f} may be used"
    rows = {
        "parameters": report.params_bytes,
        "KV pool": report.pool_bytes,
        "slots and sampling": report.state_bytes,
        f"temporaries of '{step.name}'": step.temp_bytes,
        f"results of '{step.name}'": step.output_bytes,
        f"code of {len(report.executables)} executables": report.code_bytes,
        "in all": report.used_bytes,
        "free": chip.usable_bytes - report.used_bytes,
    }
    yield from (f"  {name:<34}{size / 1e9:>10.3f}" for name, size in rows.items())
    for e in dict.fromkeys((*report.decode, report.largest)):
        sizes = {
            "arguments": e.argument_bytes,
            "of which updated in place": e.alias_bytes,
            "results": e.output_bytes,
            "temporaries": e.temp_bytes,
            "code": e.code_bytes,
        }
        yield f"  '{e.name}': " + ", ".join(f"{name} {size / 1e9:.3f}" for name, size in sizes.items())


def _compiled(report: Report) -> Iterator[str]:
    seconds = sum(e.seconds for e in report.executables)
    yield (
        f"Executables of the plan: {report.num_executables}; compiled {len(report.executables)} in {seconds:.1f} s, "
        f"{report.cpu_seconds / 60:.1f} CPU minutes"
    )
    if report.first_cpu_seconds is not None:
        yield f"  {report.first_cpu_seconds:.1f} CPU seconds to the first step: {_names(report.first)}"
    yield from (f"  {e.name:<24}{e.seconds:>8.1f} s{_launches(e)}" for e in report.executables)


def _names(executables: Sequence[Executable]) -> str:
    """'init', 'step 8' and 'sample 8'"""
    *others, last = (f"'{each.name}'" for each in executables)
    return f"{', '.join(others)} and {last}"


def _launches(e: Executable) -> str:
    return "" if e.launches is None else f"{e.launches:>8} launches, command buffers: {e.command_buffers}"


def _floors(report: Report) -> Iterator[str]:
    chip = report.prepared.target.chip
    yield "Floors, of each device; none counts latency"
    for floor in report.floors:
        yield f"  {floor.what}: {floor.floor_ms:.3f} ms a step at least"
        yield f"    {floor.memory_ms:.3f} ms for {floor.fewest_bytes / 1e9:.3f} GB of main memory"
        yield f"    {floor.compute_ms:.3f} ms for {floor.flops / 1e12:.3f} TFLOP at {chip.flops / 1e12:.0f} a second"
        yield f"    {floor.links_ms:.3f} ms on the links, {floor.network_ms:.3f} ms between hosts by another network"
        yield from (f"      {line}" for line in _sent(floor))
    yield f"  links: {chip.link_bandwidth / 1e9:.0f} GB/s, {chip.link}"
    if chip.network_bandwidth:
        yield f"  network between hosts, assumed: {chip.network_bandwidth / 1e9:.0f} GB/s, {chip.network}"
    yield from _FLOORS.splitlines()


def _sent(floor: Floor) -> Iterator[str]:
    for (kind, crosses), sent in floor.sent.items():
        where = "across hosts" if crosses else "within hosts"
        bytes_sent = f"{sent.operand_bytes / 1e6:.3f} MB put in, {sent.link_bytes / 1e6:.3f} MB sent"
        beyond = f", {sent.network_bytes / 1e6:.3f} MB to other hosts" if sent.network_bytes else ""
        yield f"{sent.count} {kind}, {where}: {bytes_sent}{beyond}"


def _decode(report: Report, top: int) -> Iterator[str]:
    e, chip = report.efficiency, report.prepared.target.chip
    names = _names(report.decode)
    yield f"Decode of {e.batch} sequences at {e.context} tokens, {names}: GB of each device and step"
    rows = [*sorted(e.moved.items(), key=lambda row: -row[1]), ("in all", e.total)]
    rows += [("fewest: weights once", e.fewest_weights), ("fewest: live keys and values once", e.fewest_kv)]
    yield from (f"  {name:<34}{size / 1e9:>10.4f}" for name, size in rows)
    yield f"  static efficiency {e.ratio:.3f}: moved over fewest, 1 is best"
    if chip.cache_bytes:
        yield f"    {e.uncached_ratio:.3f} without small intermediates, which the L2 cache can hold"
    yield f"    of keys and values {e.kv_ratio:.3f}, of the rest {e.other_ratio:.3f}"
    yield f"  floor {e.floor_ms:.3f} ms a step, {e.moved_ms:.3f} ms for what is moved"
    yield f"    at {chip.bandwidth / 1e9:.0f} GB/s, {chip.source}"
    if report.decode_launches is None:
        yield f"  {e.kernels} kernels a step in the modules, {e.pallas_calls} of them ours"
    else:
        yield f"  {report.decode_launches} launches a step in the thunk sequences, {e.pallas_calls} of them our kernels"
    if e.open_loops:
        blocks = -(-e.context // report.prepared.config.block_size)
        yield f"  {e.open_loops} loops run until data say so: taken as one trip for each of {blocks} blocks"
    yield from _METHOD.splitlines()
    if report.decode_cost_bytes is not None:
        yield from _COST.format(report.decode_cost_bytes / 1e9).splitlines()
    yield from (f"  {size / 1e6:>12.3f} MB  {name}" for name, size in list(e.largest.items())[:top])
