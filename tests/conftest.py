import atexit
import os
import shutil
import tempfile

# What a session compiles it finds again, and nobody else does.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxllm-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# LLVM optimises little of what is compiled, which takes half as long; XLA's own passes are all there. CI's smoke test
# and its slow tests set 0; what is compiled for chips that are not there is as for users.
if "JAXLLM_TARGETS" not in os.environ:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import pytest  # noqa: E402

from tests.tiny import Tiny, clean, make_llm  # noqa: E402


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
