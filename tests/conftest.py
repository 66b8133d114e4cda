import atexit
import gc
import importlib.metadata
import os
import platform
import shutil
import tempfile

# What a session compiles it finds again, in any of its processes, and nobody else does.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxllm-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# LLVM optimises little of what is compiled, in one module, and fusions don't go through MLIR, which takes a third of
# the time; XLA's own passes are all there. Nor are there fused multiply-adds, which round once where two executables
# fuse as they like. CI's smoke test and some of its slow tests set 0; what is compiled for chips that are not there is
# as for users.
if "JAXLLM_TARGETS" not in os.environ and os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # JAX 0.12's XLA ends the process if it is given
        flags.append("--xla_cpu_use_fusion_emitters=false")
    if platform.machine() == "x86_64":
        flags.append("--xla_cpu_max_isa=AVX")
    os.environ["XLA_FLAGS"] = " ".join(flags)
# Tests make few circles, and many objects that stay.
gc.set_threshold(100_000, 20, 50)

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import pytest  # noqa: E402

from tests import run_time_types  # noqa: E402

run_time_types.install()  # before any of the package is imported

from tests import on_demand  # noqa: E402

on_demand.install()

from tests.tiny import Tiny, clean, make_llm  # noqa: E402


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # all tests and modules, which the collector would visit again and again


@pytest.fixture(scope="session")
def tiny():
    return Tiny()


@pytest.fixture(scope="session")
def shared_llm(tiny):
    llm = make_llm(tiny.model)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared_llm):
    """The shared engine, idle and clean before and after the test."""
    shared_llm.engine.scheduler.pool.forget_keys()
    yield shared_llm
    clean(shared_llm)
