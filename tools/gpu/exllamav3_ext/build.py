"""Compile a trimmed `exllamav3_ext` ahead of time, without a GPU and without installing torch.

    build.py --source DIR   the unpacked exllamav3 1.6.5 wheel's folder `exllamav3`
             --torch DIR    the unpacked torch wheel's folder `torch` (headers and libraries to link with)
             --python-include DIR   the target interpreter's headers
             --toolkit DIR  the CUDA toolkit: nvcc and the runtime's headers
             --cuda DIR     the unpacked nvidia-cublas, -cusparse, -cusolver and -cuda-runtime wheels' `nvidia/cu13`
             --out DIR      where exllamav3_ext.cpython-*.so and the objects go

Attention, caches, sampling, the quantiser, CPU experts and the int8 GEMV are left out, and of the bit rates and
codebooks only those asked for are compiled. The module says which in `INSTANCES`, for example
"moe:4:1 coop:4:1 gemm:4:1": function, bits per weight (0: of each matrix its own), codebook (0 3INST, 1 MCG, 2 MUL1).
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSION = "1.6.5"
BITS, CODEBOOKS = range(1, 9), (0, 1, 2)
ALWAYS = (
    "quant/exl3_moe.cu quant/exl3_moe_coop.cu quant/exl3_gemm.cu quant/exl3_gemv.cu quant/exl3_kernel_map.cu "
    "quant/exl3_devctx.cu quant/coop_autotune.cu quant/reconstruct.cu quant/hadamard.cu hgemm.cu activation.cu"
).split()
UNITS = "quant/comp_units"

# What a left-out unit has to define instead: a kernel that is null (exl3_moe fails in its launch, exl3_gemm returns
# shape 0) or a call that raises (exl3_moe_coop).
ABSENT_MOE = "fp_exl3_moe_kernel exl3_moe_kernel_{name}() {{ return nullptr; }}"
ABSENT_COOP = """MoeCoopKernel exl3_moe_coop_kernel_a_{name}({cb}int, bool) {{ absent("exl3_moe_coop", "{name}"); }}
MoeCoopKernel exl3_moe_coop_kernel_b_{name}({cb}bool) {{ absent("exl3_moe_coop", "{name}"); }}"""
ABSENT_GEMM = """fp_exl3_gemm_kernel tfp_exl3_gemm_kernel_fp32_{name}[EXL3_GEMM_NUM_SHAPES + 1] = {{}};
fp_exl3_gemm_kernel tfp_exl3_gemm_kernel_fp16_{name}[EXL3_GEMM_NUM_SHAPES + 1] = {{}};
fp_exl3_mgemm_kernel tfp_exl3_mgemm_kernel_fp32_{name}[EXL3_GEMM_NUM_SHAPES + 1] = {{}};
fp_exl3_mgemm_kernel tfp_exl3_mgemm_kernel_fp16_{name}[EXL3_GEMM_NUM_SHAPES + 1] = {{}};"""
ABSENT_REST = """
bool exl3_gemv_int8_enabled() { return false; }
bool exl3_gemv_int8(
    const at::Tensor&, const at::Tensor&, at::Tensor&, const c10::optional<at::Tensor>&,
    const c10::optional<at::Tensor>&, const c10::optional<at::Tensor>&, cudaStream_t, Graph*) {
  return false;
}
void* exl3_gemv_select_kernel_half(int, bool, int, int, bool) { return nullptr; }
bool hgemm_f16acc_try(const at::Tensor&, const at::Tensor&, at::Tensor&) { return false; }
void Graph::record_param(void*, int, int, int) { absent("exllamav3's own graphs", "any"); }
"""


def chosen_units(moe: list[tuple[int, int]], coop: list[int], gemm: list[tuple[int, int]]) -> list[str]:
    """Source files of the instances, relative to exllamav3_ext."""
    names = [(f"k{bits}",) if bits else ("k0_n128", "k0_n256") for bits, _ in moe]
    files = [f"exl3_moe_inst_{name}_cb{cb}.cu" for some, (_, cb) in zip(names, moe, strict=True) for name in some]
    files += [f"exl3_moe_coop_inst_k{bits}.cu" for bits in coop]
    files += [f"exl3_comp_unit_{bits}_cb{cb}.cu" for bits, cb in gemm]
    return [f"{UNITS}/{file}" for file in files]


def absent_source(moe: list[tuple[int, int]], coop: list[int], gemm: list[tuple[int, int]]) -> str:
    """C++ that defines what the left-out units would, and lists the ones that are in."""
    lines = [f'#include "{name}"' for name in ("quant/exl3_gemm.cuh", "quant/exl3_kernel_map.cuh", "hgemm.cuh")]
    lines += [f'#include "{UNITS}/{name}"' for name in ("exl3_moe_instances.cuh", "exl3_moe_coop_instances.cuh")]
    lines += [
        '#include "quant/exl3_gemv.cuh"',
        '#include "quant/exl3_gemv_int8.cuh"',
        "#include <c10/util/Exception.h>",
    ]
    lines += [
        "[[noreturn]] static void absent(const char* function, const char* name) {",
        '  TORCH_CHECK(false, function, ": ", name, " is not in this trimmed build of exllamav3_ext");',
        "}",
    ]
    names = [f"k{bits}_n{n}_cb{cb}" for bits in range(9) for cb in (1, 2) for n in (128, 256) if (bits, cb) not in moe]
    names += [f"k{bits}_n128_cb2_m{rows}" for bits in range(9) for rows in (32, 64)]
    names += [f"h{bits}_n{n}_cb2" for bits in (1, 2, 3) for n in ("128", "256")]
    names += [f"h{bits}_n128_cb2_m{rows}" for bits in (1, 2, 3) for rows in (32, 64)]
    lines += [ABSENT_MOE.format(name=name) for name in names]
    lines += [ABSENT_COOP.format(name=f"k{bits}", cb="int, ") for bits in BITS if bits not in coop]
    lines += [ABSENT_COOP.format(name=f"h{bits}", cb="") for bits in (1, 2, 3)]
    tables = [f"b{bits}_cb{cb}" for bits in BITS for cb in CODEBOOKS if (bits, cb) not in gemm]
    lines += [ABSENT_GEMM.format(name=name) for name in [*tables, "h1", "h2", "h3"]]
    there = [f"moe:{bits}:{cb}" for bits, cb in moe] + [f"gemm:{bits}:{cb}" for bits, cb in gemm]
    there += [f"coop:{bits}:{cb}" for bits in coop for cb in CODEBOOKS]
    lines += [f'extern const char* const kInstances;\nconst char* const kInstances = "{" ".join(there)}";']
    return "\n".join(lines) + ABSENT_REST


def includes(args: argparse.Namespace) -> list[str]:
    torch = args.torch / "include"
    roots = [args.source / "exllamav3_ext", torch, torch / "torch/csrc/api/include", args.python_include]
    return [f"-I{root}" for root in [*roots, args.toolkit / "include", args.cuda / "include"]]


def compile_command(source: Path, target: Path, args: argparse.Namespace) -> list[str]:
    common = ["-std=c++20", "-O3", "-c", str(source), "-o", str(target), *includes(args)]
    common += [f'-DEXLLAMAV3_VERSION="{VERSION}"']
    if source.suffix == ".cpp":
        return ["g++", "-fPIC", *common]
    flags = ["--use_fast_math", "--expt-relaxed-constexpr", "--compress-mode=size", "-Xcompiler", "-fPIC", "-w"]
    flags += [f"-D__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS")]
    flags += ["-D__CUDA_NO_BFLOAT16_CONVERSIONS__"]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in args.arch]
    return [str(args.toolkit / "bin/nvcc"), *flags, *common]


def compile_one(source: Path, args: argparse.Namespace) -> Path:
    """Compile unless an object newer than its source is there."""
    target = args.out / "objects" / f"{source.stem}.o"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(compile_command(source, target, args), check=True)
        print(f"{target.name} {target.stat().st_size} bytes", flush=True)
    return target


def link_command(objects: list[Path], target: Path, args: argparse.Namespace) -> list[str]:
    libraries = ["c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python"]
    command = ["g++", "-shared", "-s", "-o", str(target), *map(str, objects)]
    command += [f"-L{args.torch / 'lib'}", *[f"-l{name}" for name in libraries]]
    command += [f"-L{args.cuda / 'lib'}", "-l:libcublas.so.13", "-l:libcudart.so.13"]
    return [*command, "-Wl,--allow-shlib-undefined"]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "torch", "python-include", "cuda", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    pairs = lambda text: [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
    parser.add_argument("--moe", type=pairs, default=pairs("4:1"), help="bits:codebook,... of exl3_moe")
    parser.add_argument(
        "--gemm", type=pairs, default=pairs("4:1"), help="bits:codebook,... of exl3_gemm and exl3_mgemm"
    )
    parser.add_argument("--coop", type=lambda text: list(map(int, text.split(","))), default=[4], help="bits,...")
    parser.add_argument("--arch", nargs="+", default=["90"])
    parser.add_argument("--toolkit", type=Path, default=Path("/usr/local/cuda"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--soabi", default="cpython-312-x86_64-linux-gnu", help="file name suffix of the target Python")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    (args.out / "objects").mkdir(parents=True, exist_ok=True)
    absent = args.out / "absent.cu"
    text = absent_source(args.moe, args.coop, args.gemm)
    if not absent.exists() or absent.read_text() != text:
        absent.write_text(text)
    root = args.source / "exllamav3_ext"
    units = chosen_units(args.moe, args.coop, args.gemm)
    sources = [Path(__file__).with_name("bindings.cpp"), absent, *[root / name for name in [*units, *ALWAYS]]]
    with ThreadPoolExecutor(args.jobs) as pool:
        objects = list(pool.map(lambda source: compile_one(source, args), sources))
    target = args.out / f"exllamav3_ext.{args.soabi}.so"
    subprocess.run(link_command(objects, target, args), check=True)
    print(f"{target} {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
