"""FlashInfer's own code for NoPE MLA, as vLLM 0.33.0 pins it: its kernels compile for a DGX Spark and fit on it, and
its host code, which needs no GPU, takes what the plugin passes."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_kernels import REPOSITORY, build_kernels
from vllm_exl3.nope_mla.geometry import COMPACT, HEADS, NATIVE, PADDED

CASES = Path(__file__).parent / "data/sparse_mla_cases.cu"
NOPE, ROPED = 3, 2  # of FlashInfer's ModelType
FORMS = (NATIVE, PADDED, COMPACT)
SPARK_SMS, SPARK_SHARED_BYTES = 48, 101_376
DECODE, SG, MG = 0, 1, 2  # of FlashInfer's kernel variants
UNPACKED = ("flashinfer/data/include/", "flashinfer/data/cccl/", "flashinfer/data/csrc/tvm_ffi_utils.h",
            "flashinfer/data/csrc/sparse_mla_sm120/", "flashinfer/mla/_sparse_mla_sm120/", "tvm_ffi/")  # fmt: skip


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return build_kernels.find_toolchain().nvcc
    except build_kernels.KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def site(nvcc, tmp_path_factory) -> Path:
    """A folder with what is needed of both packages; nothing is installed."""
    folder = tmp_path_factory.mktemp("flashinfer")
    pinned = REPOSITORY / "requirements/flashinfer.txt"
    download = "-m pip download -q --no-deps --require-hashes --only-binary :all:".split()
    subprocess.run([sys.executable, *download, "-r", pinned, "-d", folder], check=True, timeout=300)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(UNPACKED)])
    return folder


def run_nvcc(nvcc: Path, site: Path, *words) -> subprocess.CompletedProcess:
    data, tvm = site / "flashinfer/data", site / "tvm_ffi"
    includes = [data / "cccl/cub", data / "cccl/libcudacxx/include", data / "cccl/thrust", data / "include",
                data / "csrc", tvm / "include", tvm / "3rdparty/dlpack/include"]  # fmt: skip
    flags = ["-std=c++17", "-use_fast_math", "--expt-relaxed-constexpr", build_kernels.gencode("12.1a")]
    command = [nvcc, *flags, *(f"-I{folder}" for folder in includes), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


# Kernels

# vLLM's CPU build hides Triton, which needs no GPU to compile for one.
COMPILE_WRITER = """
import sys, types, triton, triton.language
utils = types.ModuleType("vllm.triton_utils")
utils.tl, utils.triton = triton.language, triton
sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm.triton_utils": utils}
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_exl3.nope_mla import write_rows
types_ = {"latent": "*bf16", "cache": "*u8", "slots": "*i64"} | dict.fromkeys(
    ("latent_stride", "block_stride", "block_tokens"), "i32")
fixed = {"LATENT": 512, "GROUP": 128, "GROUPS": 4, "ROW_BYTES": 528}
source = ASTSource(fn=write_rows._write_rows_kernel, constexprs=fixed,
                   signature=types_ | dict.fromkeys(fixed, "constexpr"))
print(triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"])
"""


@pytest.mark.parametrize("architecture", [90, 121])
def test_the_compact_writer_compiles_and_rounds_as_vllms_does(architecture):
    pytest.importorskip("triton", reason="Triton is not in the lock: it is 1 GB")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_WRITER, str(architecture)], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "div.rn.f32" in done.stdout and "cvt.rn.satfinite.e4m3x2.f32" in done.stdout
    assert "f64" not in done.stdout and ".approx" not in done.stdout and ".ftz" not in done.stdout


@pytest.mark.nvcc
def test_the_needed_kernels_compile_for_a_spark_without_spills(nvcc, site, tmp_path):
    done = run_nvcc(nvcc, site, "-O3", "-Xptxas=-v", "-c", CASES, "-o", tmp_path / "cases.o")
    assert done.returncode == 0, done.stderr[-3000:]
    log = done.stderr + done.stdout
    compiled = re.findall(r"entry function '(\S+)' for 'sm_121a'", log)
    for model in (NOPE, ROPED):
        decode = [name for name in compiled if f"sparse_mla_decode_dsv3_2_kernelIL9ModelType{model}E" in name]
        prefill = [name for name in compiled if re.search(rf"sparse_mla_prefill\w*_kernelIL9ModelType{model}E", name)]
        assert len(decode) == 2 and len(prefill) == 2
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


@pytest.mark.nvcc
def test_a_row_that_differs_would_not_compile(nvcc, site, tmp_path):
    traits = site / "flashinfer/data/include/flashinfer/attention/sparse_mla_sm120/model/kv_cache_traits.cuh"
    text, row = traits.read_text(), "D_NOPE + SCALE_BYTES_PER_TOKEN"
    try:
        traits.write_text(text.replace(f"{row};  // 528", f"{row} + 16;"))
        done = run_nvcc(nvcc, site, "-c", CASES, "-o", tmp_path / "none.o")
    finally:
        traits.write_text(text)
    assert done.returncode != 0 and "assert" in done.stderr


@pytest.mark.nvcc
def test_the_tables_that_the_plugin_reads_are_there(site):
    exported = (site / "flashinfer/mla/_sparse_mla_sm120/__init__.py").read_text()
    assert "_DECODE_GLM53_NOPE_DISPATCH," in exported and "_DECODE_DSV3_2_DISPATCH," in exported


# Host code: what is planned for a call, with a Spark's numbers

@pytest.fixture(scope="module")
def planner(nvcc, site, tmp_path_factory):
    """FlashInfer's planner as a module of tvm_ffi."""
    library = tmp_path_factory.mktemp("planner") / "planner.so"
    source, lib = site / "flashinfer/data/csrc/sparse_mla_sm120/attention_resolve.cu", site / "tvm_ffi/lib"
    done = run_nvcc(nvcc, site, "-O1", "-DNDEBUG", "-Xcompiler=-fPIC", "-shared", "-cudart=static", "-nodlink", source,
                    "-o", library, "-L", nvcc.parent.parent / "lib", "-L", lib, "-ltvm_ffi",
                    f"-Xlinker=-rpath={lib}")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # it would compile something else
        import tvm_ffi
    return tvm_ffi.load_module(str(library))


def call(form, tokens: int, heads: int, *, row: int | None = None, topk: int = 2176, variant: int = DECODE) -> list:
    """FlashInfer's description of a call: dense pages of 64 rows, no lengths, no sink."""
    row = row or form.row_bytes
    model = ROPED if form is PADDED else NOPE
    return [model, tokens, heads, topk, 0, 64, 0, 64 * row, 0, row, topk, 0, heads, 0, 0, 0, 0, variant]


def variants(planner, form, tokens: int, heads: int, **more) -> list[int]:
    """The kernels that take a call."""
    return sorted(planner.metadata_candidates(call(form, tokens, heads, **more), 1, SPARK_SMS, SPARK_SHARED_BYTES))


def plan(planner, form, tokens: int, heads: int, variant: int) -> dict:
    described = call(form, tokens, heads, variant=variant)
    return dict(planner.resolve_attention(described, 1, 0, SPARK_SMS, SPARK_SHARED_BYTES)["inspect"]().items())


@pytest.mark.nvcc
def test_the_widths_of_queries_name_the_kernels(planner):
    assert [planner.resolve_format(form.columns, "arbitrary_fp32") for form in FORMS] == [NOPE, ROPED, NOPE]


@pytest.mark.nvcc
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_number_of_heads_that_the_plugin_passes_has_kernels(planner, form):
    for heads in HEADS:
        assert variants(planner, form, 64, heads)[0] == DECODE and len(variants(planner, form, 64, heads)) > 1
        assert variants(planner, form, 7168, heads) and DECODE not in variants(planner, form, 7168, heads)
    # Hence the padding of 22 heads:
    assert variants(planner, form, 64, 22) == [DECODE] and variants(planner, form, 7168, 22) == []


@pytest.mark.nvcc
def test_rows_are_taken_as_they_are_laid_out_and_no_others(planner):
    for form, row in ((NATIVE, 656), (COMPACT, 528), (PADDED, 656)):
        assert variants(planner, form, 65, 32, row=row) == [MG]
    for form, row in ((COMPACT, 520), (COMPACT, 530), (PADDED, 528)):
        assert variants(planner, form, 65, 32, row=row) == []


@pytest.mark.nvcc
@pytest.mark.parametrize("heads, long", [(16, SG), (32, MG)])
def test_all_geometries_split_the_work_in_the_same_way(planner, heads, long):
    """Then sums are taken in the same order."""
    order = ("implementation", "numeric_route", "merge", "cpb", "active_splits", "block_threads")
    cases = [(tokens, DECODE) for tokens in range(1, 65)] + [(tokens, long) for tokens in (1, 65, 501, 7168)]
    splits = set()
    for tokens, variant in cases:
        plans = [plan(planner, form, tokens, heads, variant) for form in FORMS]
        orders = [[str(one[name]) for name in order] for one in plans]
        assert orders[0] == orders[1] == orders[2]
        splits.add(orders[0][4])
    assert len(splits) > 1  # it depends on the call
