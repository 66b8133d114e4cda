"""What a step needs at least on a target: of main memory, of arithmetic, of the links, and of the network."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.aot import collectives, hlo
from jaxllm.aot.collectives import Collectives, Sent
from jaxllm.aot.efficiency import fewest_bytes
from jaxllm.aot.prepare import Prepared
from jaxllm.engine.device.memory import leaf_bytes


@dataclass(frozen=True)
class Floor:
    """Of each device in a step; each time is a bound by itself, and without the latency of what it counts."""

    what: str
    fewest_bytes: int  # of main memory: weights once, live keys and values once
    flops: float
    sent: Collectives
    memory_ms: float
    compute_ms: float
    links_ms: float  # within slice or host
    network_ms: float  # between hosts, where they have another one

    @property
    def floor_ms(self) -> float:
        """Milliseconds that no such step can be faster than."""
        return max(self.memory_ms, self.compute_ms, self.links_ms, self.network_ms)


def decode_floor(prepared: Prepared, texts: Mapping[str, str], batch: int, context: int) -> Floor:
    """Of the decode step of `batch` sequences on each shard of data, by its executables' kinds and texts."""
    attended = batch * _attended(prepared, context)
    fewest = sum(fewest_bytes(prepared, batch, context))
    what = f"decode of {batch} sequences at {context} tokens"
    return _floor(prepared, what, texts, fewest, batch, batch, attended, -(-context // prepared.config.block_size))


def prefill_floor(prepared: Prepared, step: str) -> Floor:
    """Of the largest step, of this text, as one prompt from its start on each shard of data."""
    config = prepared.config
    length = min(config.max_num_batched_tokens, config.max_model_len)
    weights, kv = fewest_bytes(prepared, length, 1)[0], fewest_bytes(prepared, 1, length)[1]
    attended = sum(_attended(prepared, at) for at in range(1, length + 1))
    what = f"prefill of {length} tokens of one prompt"
    return _floor(prepared, what, {"step": step}, weights + kv, length, 0, attended, -(-length // config.block_size))


def _floor(
    prepared: Prepared,
    what: str,
    texts: Mapping[str, str],
    fewest: int,
    tokens: int,
    samples: int,
    attended: int,
    num_blocks: int,
) -> Floor:
    """`attended`: pairs of a token and one that it attends to, of all layers."""
    cfg, chip, mesh = prepared.cfg, prepared.target.chip, prepared.mesh
    per_shard = mesh.size // mesh.shape.get("data", 1)
    products = prepared.active_params * tokens + cfg.vocab * cfg.embed * samples
    flops = (2 * products + 4 * cfg.heads * cfg.head_dim * attended) / per_shard
    sent = sent_by(prepared, texts, num_blocks)
    total = sum(sent.values(), Sent())
    return Floor(
        what,
        fewest,
        flops,
        sent,
        memory_ms=fewest / chip.bandwidth * 1e3,
        compute_ms=flops / chip.flops * 1e3,
        links_ms=total.link_bytes / chip.link_bandwidth * 1e3,
        network_ms=total.network_bytes / chip.network_bandwidth * 1e3 if total.network_bytes else 0.0,
    )


def _attended(prepared: Prepared, context: int) -> int:
    """Tokens that the last of `context` tokens attends to, in all layers."""
    return sum(min(context, layer.window or context) for layer in prepared.cfg.layers)


def sent_by(prepared: Prepared, texts: Mapping[str, str], num_blocks: int) -> Collectives:
    """What executables of these kinds and texts send; loops of samplers filter, and a plain draw does not."""
    hosts, found = prepared.hosts, Collectives()
    has_network = prepared.target.chip.network_bandwidth > 0
    for name, text in texts.items():
        trips = num_blocks if name == "step" else 0
        one = collectives.count(hlo.parse(text), hosts, has_network=has_network, open_trips=trips)
        for key, sent in one.items():
            found[key] = found.get(key, Sent()) + sent
    return found


def host_weight_bytes(prepared: Prepared) -> list[int]:
    """Bytes of the weights that lie on each host's devices, those of several of its devices once: what it reads."""
    hosts = dict(zip(prepared.mesh.devices.flat, prepared.hosts, strict=True))
    totals = dict.fromkeys(sorted(set(hosts.values())), 0)
    for _, leaf in prepared.tensors():
        places = leaf.sharding.devices_indices_map(leaf.shape).items()
        parts = {(hosts[device], *(each.indices(2**62)[:2] for each in index)) for device, index in places}
        for host, *_ in parts:
            totals[host] += leaf_bytes([leaf])
    return list(totals.values())
