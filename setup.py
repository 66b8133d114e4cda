"""Everything is in pyproject.toml, but for the native CPU kernels, which are built where a compiler is."""

import importlib.util

from setuptools import setup
from setuptools.command.build_py import build_py

spec = importlib.util.spec_from_file_location("build_native", "pallas_kernels/native/build.py")
build_native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_native)


class Build(build_py):
    def run(self) -> None:
        build_native.main()
        self.data_files = self._get_data_files()  # the library is new
        super().run()


setup(cmdclass={"build_py": Build})
