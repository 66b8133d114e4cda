"""What devices and hosts have, what other engines will take of it, and what is said before an engine takes it."""

import subprocess
import sys
import weakref
from dataclasses import replace

import pytest

from jaxllm.engine.config import MEM_FRACTION_VARIABLES
from jaxllm.engine.device import device_memory, memory, memory_plan
from jaxllm.engine.device.device_memory import Claim, DeviceMemory
from jaxllm.errors import OutOfMemoryError
from jaxllm.sharding.mesh import make_mesh
from tests.engine.device.test_memory import CONFIG, H200, host, shape_of


class FakeDevice:
    """Of a GPU's memory JAX may allocate `limit`."""

    def __init__(self, limit, in_use, platform="gpu"):
        self.platform, self.stats = platform, {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self):
        return self.stats


def test_the_fullest_device_counts_and_a_gpu_has_more_than_jax_may_allocate(monkeypatch):
    for name in MEM_FRACTION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    gpus = [FakeDevice(60 << 30, in_use) for in_use in (1 << 30, 5 << 30, 0)]
    assert device_memory.fullest(gpus) == DeviceMemory(80 << 30, 60 << 30, 5 << 30)
    for name in reversed(MEM_FRACTION_VARIABLES):
        monkeypatch.setenv(name, "0.5")
        assert device_memory.fullest(gpus).total == 120 << 30
    assert device_memory.fullest([FakeDevice(60 << 30, 0, "tpu")]) == DeviceMemory(60 << 30, 60 << 30, 0)


def test_a_device_that_does_not_tell_needs_a_number_of_blocks_and_is_believed():
    mesh, silent = make_mesh(None), FakeDevice(1, 0)
    silent.stats = None
    assert device_memory.fullest([FakeDevice(1 << 30, 0), silent]) is None
    with pytest.raises(ValueError, match="does not say how much memory it has .* give num_blocks"):
        memory.kv_budget(shape_of(mesh), CONFIG, mesh, None)
    memory.check_num_blocks(shape_of(mesh), CONFIG, 10**6, mesh, None)


def test_members_of_a_group_go_by_the_least_of_all():
    """In whatever order they learn of each other, and no member has less than what all go by."""
    found = [DeviceMemory(100, 90, 10, 0), DeviceMemory(100, 80, 5, 20), DeviceMemory(120, 95, 40, 3)]
    assert {device_memory.least(found), device_memory.least(found[::-1])} == {DeviceMemory(100, 80, 40, 20)}
    assert device_memory.least(found).free <= min(each.free for each in found)
    assert device_memory.least(found[:1]) == found[0]
    parts = [DeviceMemory(64, 64, 8, is_host=True, swap=4), DeviceMemory(32, 32, 1, is_host=True)]
    assert device_memory.least(parts) == DeviceMemory(32, 32, 8, is_host=True)


def test_cpu_devices_and_processes_of_one_machine_share_its_memory(monkeypatch):
    for name, num_bytes in {"machine_bytes": 64 << 30, "free_bytes": 48 << 30, "swap_free_bytes": 8 << 30}.items():
        monkeypatch.setattr(device_memory, name, lambda num_bytes=num_bytes: num_bytes)
    monkeypatch.setattr(device_memory, "_CLAIMS", weakref.WeakSet())
    whole = device_memory.measure(make_mesh(None))
    assert whole == DeviceMemory(64 << 30, 64 << 30, 16 << 30, is_host=True, swap=8 << 30)
    eighth = device_memory.measure(make_mesh("tensor=4"), processes_here=2)
    assert eighth == DeviceMemory(8 << 30, 8 << 30, 2 << 30, is_host=True, swap=1 << 30)
    claim = Claim(make_mesh("tensor=2"), 1 << 30, 1 << 30)
    assert device_memory.measure(make_mesh(None)).claimed == 4 << 30
    assert device_memory.measure(make_mesh("tensor=4")).claimed == 1 << 30
    claim.release()
    assert device_memory.measure(make_mesh(None)) == whole


def said(device, config, **options) -> memory_plan.MemoryPlan:
    """The plan of the 8B model with 4096 blocks, after it was told."""
    mesh = make_mesh(None)
    plan = memory_plan.MemoryPlan.of(shape_of(mesh), replace(config, num_blocks=4096), mesh, **options)
    plan.tell(replace(config, num_blocks=4096), mesh, device)
    return plan


def test_the_share_is_of_the_whole_card_and_less_only_if_jax_may_not(caplog):
    card = 100 << 30
    all_of_it, most, little = (DeviceMemory(card, int(card * share), 0) for share in (1.0, 0.92, 0.75))
    assert all_of_it.usable(None) == int(0.92 * card) and all_of_it.usable(0.5) == card // 2
    assert 0.9 * card < most.usable(None) < 0.92 * card
    assert 0.73 * card < little.usable(0.9) < 0.75 * card
    with caplog.at_level("INFO", logger=memory_plan.__name__):
        said(most, CONFIG)
    assert "of the 107.37 GB of each device the process may use 96.81 GB; other arrays of this process" in caplog.text
    assert "XLA_CLIENT_MEM_FRACTION" not in caplog.text
    said(little, replace(CONFIG, gpu_memory_utilization=0.9))
    assert "JAX may allocate 75 % of the device, less than gpu_memory_utilization=0.9: set XLA_CLIENT" in caplog.text


def test_what_is_taken_is_said_in_numbers(caplog, monkeypatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: 50_000_000_000)
    monkeypatch.setattr(memory_plan, "machine_bytes", lambda: 64_000_000_000)
    config, params = replace(CONFIG, swap_space=2.0), memory.leaf_bytes(shape_of(make_mesh(None)).leaves)
    with caplog.at_level("INFO", logger=memory_plan.__name__):
        plan = said(H200._replace(in_use=params + 3 * 10**9, claimed=10**9), config, has_params=True, loading=10**8)
    assert plan.pool == 4096 * 32 * (131072 + 4) and plan.device == plan.params + plan.pool + plan.step
    step = f"{plan.step / 1e9:.2f}"
    assert caplog.messages == [
        f"each device: 16.06 GB for parameters, 17.18 GB for the KV pool of 4096 blocks, {step} GB for a step and "
        f"slots: {plan.device / 1e9:.2f} GB in all",
        "of the 149.25 GB of each device the process may use 137.31 GB; other arrays of this process have 3.00 GB, and "
        "other engines of it will take 1.00 GB; what other processes use is not known here",
        "the host: 2.15 GB at most for swapped blocks, 0.10 GB at most while parameters load; 50.00 of 64.00 GB are "
        "free",
    ]
    caplog.clear()
    with caplog.at_level("INFO", logger=memory_plan.__name__):
        said(host(100 << 30, claimed=1 << 30), config)
        said(None, config)
    assert (
        "each of 1 devices has 171.80 GB of the machine's memory, of which 64.42 GB are in use by all programs, and "
        "other engines of this process will take 1.07 GB"
    ) in caplog.messages
    assert "the devices do not say how much memory they have" in caplog.messages


def test_a_host_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: 8 * 10**9)
    shape, mesh = shape_of(make_mesh(None)), make_mesh(None)
    small, swap = replace(CONFIG, num_blocks=4096), {"swap_space": 4.0}

    def plan(config, device, **options):
        return memory_plan.plan_engine(shape, config, mesh, device, **options)

    plan(replace(small, **swap), H200, loading=10**9).release()
    with pytest.raises(OutOfMemoryError, match=r"swap_space=4 GiB does not fit: of 4.00 GB .* 3.00 GB are left"):
        plan(replace(small, **swap), H200, loading=10**9, processes_here=2)
    plan(small, H200, loading=4 * 10**9, processes_here=2).release()  # without a number, as far as there is
    with pytest.raises(OutOfMemoryError, match=r"loading takes up to 4.10 GB .* of which 4.00 GB are free"):
        plan(small, H200, loading=41 * 10**8, processes_here=2)
    with pytest.raises(OutOfMemoryError, match=r"of 8.00 GB .* 0.00 GB are left beside what else"):
        plan(replace(small, **swap), host(8 * 10**9))


class Taker:
    """Holds what an executor does."""

    leaves: tuple = ()
    state: object = None


def test_what_other_engines_will_take_counts_until_they_have_it(monkeypatch):
    monkeypatch.setattr(device_memory, "_CLAIMS", weakref.WeakSet())
    mesh, taker = make_mesh(None), Taker()
    gpu, other = FakeDevice(80 << 30, 0), FakeDevice(80 << 30, 0)
    claim = Claim(mesh, 10 << 30, 20 << 30)
    claim.devices, claim.is_host = frozenset([gpu]), False
    assert device_memory.fullest([gpu]).claimed == 30 << 30 and device_memory.fullest([other]).claimed == 0
    assert device_memory.fullest([other, gpu]).claimed == 30 << 30, "the fullest is that with less to come"
    claim.follow(taker)
    taker.leaves = ("weights",)
    assert device_memory.fullest([gpu]).claimed == 20 << 30
    taker.state = "pool"
    assert device_memory.fullest([gpu]).claimed == 0
    taker.leaves, taker.state = (), None  # it lets go for a while
    assert device_memory.fullest([gpu]).claimed == 30 << 30
    del claim
    assert device_memory.fullest([gpu]).claimed == 0, "its engine is gone"


TWO_ENGINES = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from jaxllm import LLM
from jaxllm.engine.device import device_memory, memory
from jaxllm.sharding.mesh import make_mesh

# So much that the first pool is as large as its slots could use, whatever other programs do.
for name in ("machine_bytes", "free_bytes"):
    setattr(device_memory, name, lambda: 120 << 20)
device_memory.swap_free_bytes = lambda: 0
memory.CPU_KV_SHARE = 1.0


def claimed():
    return device_memory.measure(make_mesh(None)).claimed


sizes = dict(max_num_seqs=4, max_num_batched_tokens=64)
with LLM(**sizes) as first:
    pools = [claimed()]
    with LLM(**sizes) as second:
        pools.append(claimed() - pools[0])
        texts = [llm.generate("Hello", use_tqdm=False)[0].outputs[0].text for llm in (first, second)]
        numbers = [llm.stats().num_blocks for llm in (first, second)]
        assert texts[0] == texts[1], texts
    assert claimed() == pools[0]
assert claimed() == 0
print(*numbers, *pools)
"""


def test_a_second_engine_takes_what_the_first_has_left():
    """In a process of its own. A CPU takes a pool's memory as it is written: none of the first one is in use yet."""
    done = subprocess.run([sys.executable, "-c", TWO_ENGINES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, two, first_pool, second_pool = (int(n) for n in done.stdout.split())
    assert 0 < two < one and first_pool // one == second_pool // two
    block, room = first_pool // one, 120 << 20
    assert block * (one + two) < room
    for number in (one, two):
        assert f"GB for the KV pool of {number} blocks" in done.stderr
    assert done.stderr.count("GB for parameters") == 2
    assert f"other engines of this process will take {first_pool / 1e9:.2f} GB" in done.stderr
