"""Adds the CUDA kernels to the package when EXL3_CUDA_ARCHS names GPU architectures; without, it is pure Python.

EXL3_CUDA_ARCHS="12.1a;9.0a" pip install --no-build-isolation overlay/
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # pip runs this file without its folder on the path

import build_kernels  # noqa: E402


class BuildKernels(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split(".")).with_suffix(".so"))

    def build_extension(self, extension) -> None:
        architectures = build_kernels.parse_architectures(os.environ["EXL3_CUDA_ARCHS"])
        target = Path(self.get_ext_fullpath(extension.name))
        jobs = int(os.environ.get("EXL3_BUILD_JOBS") or 0) or None
        build_kernels.build(architectures, target.parent, HERE / "build" / "kernels", jobs)


class PlatformWheel(bdist_wheel):
    """The kernels know nothing of Python: one wheel of a platform serves every version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if os.environ.get("EXL3_CUDA_ARCHS"):
    sources = [str(path.relative_to(HERE)) for path in sorted((HERE / "csrc").iterdir())]
    extension = Extension("vllm_exl3._kernels", sources)
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
else:
    setup()
