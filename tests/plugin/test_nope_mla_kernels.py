"""FlashInfer's own kernels for NoPE MLA, as vLLM 0.33.0 pins them: they compile for a DGX Spark and fit on it."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_kernels import REPOSITORY, build_kernels

HERE = Path(__file__).parent
CASES = HERE / "data/sparse_mla_cases.cu"
NOPE, ROPED = 3, 2  # of ModelType, as it stands in a kernel's name
HEADERS = ("flashinfer/data/include/", "flashinfer/data/cccl/", "flashinfer/mla/_sparse_mla_sm120/")


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return build_kernels.find_toolchain().nvcc
    except build_kernels.KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def flashinfer(nvcc, tmp_path_factory) -> Path:
    """The package's folder, unpacked; nothing is installed."""
    folder = tmp_path_factory.mktemp("flashinfer")
    pinned = REPOSITORY / "requirements/flashinfer-sources.txt"
    download = "-m pip download -q --no-deps --require-hashes --only-binary :all:".split()
    subprocess.run([sys.executable, *download, "-r", pinned, "-d", folder], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(HEADERS)])
    return folder / "flashinfer"


def compile_cases(nvcc: Path, flashinfer: Path, target: Path, *flags: str) -> subprocess.CompletedProcess:
    data = flashinfer / "data"
    includes = [data / "cccl/cub", data / "cccl/libcudacxx/include", data / "cccl/thrust", data / "include"]
    command = [
        nvcc, "-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr", build_kernels.gencode("12.1a"),
        *(f"-I{folder}" for folder in includes), *flags, "-c", CASES, "-o", target,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


@pytest.mark.nvcc
def test_the_needed_kernels_compile_for_a_spark_without_spills(nvcc, flashinfer, tmp_path):
    done = compile_cases(nvcc, flashinfer, tmp_path / "cases.o", "-Xptxas=-v")
    assert done.returncode == 0, done.stderr[-3000:]
    log = done.stderr + done.stdout
    compiled = re.findall(r"entry function '(\S+)' for 'sm_121a'", log)
    for model in (NOPE, ROPED):
        decode = [name for name in compiled if f"sparse_mla_decode_dsv3_2_kernelIL9ModelType{model}E" in name]
        prefill = [name for name in compiled if re.search(rf"sparse_mla_prefill\w*_kernelIL9ModelType{model}E", name)]
        assert len(decode) == 2 and len(prefill) == 2
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


@pytest.mark.nvcc
def test_a_row_that_differs_would_not_compile(nvcc, flashinfer, tmp_path):
    """The assertions in the cases are read: with another layout, and with less memory than a Spark has, they fail."""
    traits = flashinfer / "data/include/flashinfer/attention/sparse_mla_sm120/model/kv_cache_traits.cuh"
    text, row = traits.read_text(), "D_NOPE + SCALE_BYTES_PER_TOKEN"
    try:
        traits.write_text(text.replace(f"{row};  // 528", f"{row} + 16;"))
        done = compile_cases(nvcc, flashinfer, tmp_path / "none.o")
    finally:
        traits.write_text(text)
    assert done.returncode != 0 and "assert" in done.stderr


@pytest.mark.nvcc
def test_the_tables_that_the_plugin_reads_are_there(flashinfer):
    exported = (flashinfer / "mla/_sparse_mla_sm120/__init__.py").read_text()
    assert "_DECODE_GLM53_NOPE_DISPATCH," in exported and "_DECODE_DSV3_2_DISPATCH," in exported
