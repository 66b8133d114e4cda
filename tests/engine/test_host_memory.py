"""The machine's memory, and that of a container around this process."""

import os

import pytest

from jaxllm.engine import host_memory

TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEMINFO = f"MemTotal: {TOTAL // 1024} kB\nMemFree: 1 kB\nMemAvailable: {TOTAL // 2048} kB\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files below /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "cgroup")

    def write(**files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def test_a_system_that_tells_nothing(system):
    assert host_memory.machine_bytes() == host_memory.free_bytes() == TOTAL


def test_without_a_container(system):
    system(proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n")
    assert host_memory.machine_bytes() == TOTAL
    assert host_memory.free_bytes() == TOTAL // 2048 * 1024


def test_a_container_of_the_second_version(system):
    system(proc__meminfo=MEMINFO, proc__self__cgroup="0::/user.slice/job\n")
    system(cgroup__user_dot_slice__memory_dot_max="1000000\n", cgroup__user_dot_slice__memory_dot_current="700000\n")
    system(cgroup__user_dot_slice__job__memory_dot_max="max\n", cgroup__memory_dot_max="5000000\n")
    assert (host_memory.machine_bytes(), host_memory.free_bytes()) == (1_000_000, 300_000)
    system(cgroup__user_dot_slice__memory_dot_stat="anon 5\ninactive_file 100000\n")
    assert host_memory.free_bytes() == 400_000


def test_a_container_of_the_first_version_whose_path_is_that_outside(system):
    system(proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n")
    system(cgroup__memory__memory_dot_limit_in_bytes="2000000", cgroup__memory__memory_dot_usage_in_bytes="2500000")
    assert (host_memory.machine_bytes(), host_memory.free_bytes()) == (2_000_000, 0)


def test_swap_space_is_the_systems_and_none_of_a_limited_containers(system):
    assert host_memory.swap_free_bytes() == 0
    system(proc__meminfo=f"{MEMINFO}SwapFree: 7 kB\nHugePages_Total: 0\n", proc__self__cgroup="4:memory:/\n")
    assert host_memory.swap_free_bytes() == 7 * 1024
    system(cgroup__memory__memory_dot_limit_in_bytes=str(2**63 - 4096))  # what says that there is none
    assert host_memory.swap_free_bytes() == 7 * 1024
    system(cgroup__memory__memory_dot_limit_in_bytes="2000000")
    assert host_memory.swap_free_bytes() == 0
