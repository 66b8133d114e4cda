"""What the parts of the engine load when they are imported, everything that their imports import included."""

import subprocess
import sys

import pytest

CODE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(" ".join({name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("package", ["jaxllm.engine.schedule", "jaxllm.engine.beam"])
def test_nothing_heavy_is_loaded(package):
    run = subprocess.run([sys.executable, "-c", CODE, package], capture_output=True, text=True, check=True)
    assert "jax" not in run.stdout.split()
