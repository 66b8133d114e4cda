"""Everything is in pyproject.toml, but for the native CPU kernels, which are built where a compiler is."""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel, get_platform
from setuptools.command.build_py import build_py

spec = importlib.util.spec_from_file_location("build_native", "src/jaxllm/pallas_kernels/native/build.py")
build_native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_native)


class Build(build_py):
    """Packs the library that is built now, not those of other environments that a checkout may hold."""

    library: Path | None = None

    def run(self) -> None:
        self.library = build_native.try_build()
        self.data_files = [(*where, self._wanted(names)) for *where, names in self._get_data_files()]
        super().run()

    def _wanted(self, names: list[str]) -> list[str]:
        return [n for n in names if not n.endswith(".so") or (self.library and Path(n).name == self.library.name)]


class Wheel(bdist_wheel):
    """With the library a wheel is this platform's, though any Python 3 can use it."""

    def get_tag(self) -> tuple[str, str, str]:
        has_library = self.get_finalized_command("build_py").library is not None
        return ("py3", "none", get_platform(None).replace("-", "_")) if has_library else super().get_tag()


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
