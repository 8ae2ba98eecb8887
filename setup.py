"""Compiles the kernels that every command needs before modules are copied; all else stands in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from tools import kernels


class BuildWithKernels(build_py):
    """Modules and compiled kernels."""

    def run(self) -> None:
        """Compiles, then builds."""
        kernels.build()
        super().run()


setup(cmdclass={"build_py": BuildWithKernels})
