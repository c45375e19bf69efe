"""The compiled kernels as far as they go without a GPU: they build for every architecture, load, and refuse by name."""

import importlib.util
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("build_kernels", REPOSITORY / "overlay/build_kernels.py")
build_kernels = importlib.util.module_from_spec(_spec)
sys.modules["build_kernels"] = build_kernels
_spec.loader.exec_module(build_kernels)

from vllm_exl3 import ops, selfcheck
from vllm_exl3.architectures import architectures
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.format import Codebook
from vllm_exl3.ops import PackedExperts

# The command


@pytest.mark.parametrize(
    "text, names", [("12.1a;9.0a", ("12.1a", "9.0a")), (" 9.0 , 9.0 ", ("9.0",)), ("12.0f", ("12.0f",))]
)
def test_architectures_are_read(text, names):
    assert build_kernels.parse_architectures(text) == names


@pytest.mark.parametrize("text", ["sm_90", "121a", "9.0 12.1b", " ; "])
def test_odd_architectures_are_refused(text):
    with pytest.raises(build_kernels.KernelBuildError, match="architecture"):
        build_kernels.parse_architectures(text)


def test_gencode_asks_for_machine_code():
    assert build_kernels.gencode("12.1a") == "-gencode=arch=compute_121a,code=sm_121a"


def test_missing_nvcc_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(build_kernels, "SYSTEM_CUDA", tmp_path)
    with pytest.raises(build_kernels.KernelBuildError, match=r"nvcc: is not on PATH.*pip install .*cuda-compiler"):
        build_kernels.find_toolchain()


def test_only_the_binding_includes_torch():
    for source in (REPOSITORY / "overlay/csrc").iterdir():
        text = source.read_text(encoding="utf-8")
        assert ("#include <torch" in text) == (source.name == "binding.cpp"), source.name
        assert "Python.h" not in text and "ATen" not in text, source.name


# The library


@pytest.fixture(scope="session")
def library():
    """Built for both architectures where nvcc is; object files are kept in overlay/build, so only once."""
    try:
        build_kernels.find_toolchain()
    except build_kernels.KernelBuildError as error:
        pytest.skip(str(error))
    folder = REPOSITORY / "overlay/build"
    return build_kernels.build(build_kernels.ARCHITECTURES, folder / "test", folder / "kernels")


@pytest.fixture
def loaded(library, monkeypatch):
    monkeypatch.setattr(ops, "LIBRARY", library)
    ops.load.cache_clear()
    yield ops
    ops.load.cache_clear()


@pytest.mark.nvcc
def test_it_has_machine_code_of_both_architectures(library):
    assert architectures(library) == ("9.0a", "12.1a")
    assert selfcheck.REQUIRED_ARCHITECTURE in build_kernels.ARCHITECTURES


@pytest.mark.nvcc
def test_compiler_log_names_registers_and_spills(library):
    log = (library.parent / build_kernels.LOG).read_text()
    assert "registers" in log and "bytes spill stores" in log and "sm_121a" in log


@pytest.mark.nvcc
def test_it_needs_neither_a_driver_nor_cuda_libraries(library):
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    undefined = subprocess.run(["nm", "-uD", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed and "libcud" not in needed and "python" not in needed
    assert not [line for line in undefined.split() if line.startswith("cu")]


@pytest.mark.nvcc
def test_selfcheck_names_what_is_missing(loaded, capsys, monkeypatch):
    monkeypatch.setattr(selfcheck, "PACKAGES", {"torch": ("torch",), "no-such-package": ("no-such-package",)})
    assert selfcheck.main(["--no-gpu", "--arch", "8.7"]) == 1
    said = capsys.readouterr()
    assert "operator: vllm_exl3::fat_moe(" in said.out and "architectures: 9.0a, 12.1a" in said.out
    assert "no-such-package: is not installed" in said.err and "has no code for 8.7" in said.err
    assert "exllamav3_ext: is not there" in said.err
    monkeypatch.setattr(selfcheck, "PACKAGES", {"torch": ("torch",)})
    monkeypatch.setattr(selfcheck, "image_record", lambda: {"exllamav3": "skipped"})
    assert selfcheck.main(["--no-gpu"]) == 0


def test_selfcheck_without_kernels_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "_kernels.so")
    ops.load.cache_clear()
    assert selfcheck.main(["--no-gpu"]) == 1
    assert "_kernels.so: is not there" in capsys.readouterr().err


def test_a_library_that_is_none_is_refused(monkeypatch, tmp_path):
    (tmp_path / "_kernels.so").write_bytes(b"no library")
    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "_kernels.so")
    ops.load.cache_clear()
    with pytest.raises(Exl3LoadError, match="does not load with torch"):
        ops.load()


def test_architectures_of_a_written_fat_binary(tmp_path):
    def entry(kind, number, flags, payload=b"\x7fELF"):
        return struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, len(payload), number, flags) + payload

    entries = entry(2, 121, 1 << 20) + entry(1, 90, 0) + entry(2, 90, 0) + entry(2, 120, 1 << 21)
    file = tmp_path / "library"
    file.write_bytes(b"x" * 100 + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + b"x" * 10)
    assert architectures(file) == ("9.0", "12.0f", "12.1a")


# What the operators refuse

HIDDEN, WIDTH, EXPERTS, TOKENS, TOP_K = 256, 128, 4, 8, 2


def aligned_bytes(size: int, offset: int = 0) -> torch.Tensor:
    """Starts `offset` bytes after a multiple of 256, as nothing on the CPU does by itself."""
    whole = torch.zeros(size + 512, dtype=torch.uint8)
    start = -whole.data_ptr() % 256 + offset
    return whole[start : start + size]


def arguments(**changed) -> dict:
    trellis = lambda *shape: torch.zeros(EXPERTS, *shape, 64, dtype=torch.int16)
    half = lambda *shape: torch.zeros(EXPERTS, *shape, dtype=torch.float16)
    return {
        "x": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(TOKENS, TOP_K, dtype=torch.int32),
        "topk_weights": torch.zeros(TOKENS, TOP_K),
        "expert_map": None,
        "w13_trellis": trellis(2, HIDDEN // 16, WIDTH // 16),
        "w13_suh": half(2, HIDDEN),
        "w13_svh": half(2, WIDTH),
        "w2_trellis": trellis(WIDTH // 16, HIDDEN // 16),
        "w2_suh": half(WIDTH),
        "w2_svh": half(HIDDEN),
        "codebook": 1,
        "shared_suh": True,
        "limit": math.inf,
        "min_rows": 1,
        "addend": None,
        "workspace": aligned_bytes(2**24),
        "out": torch.zeros(TOKENS, HIDDEN),
    } | changed  # fmt: skip


REFUSED = {
    "x: is float32, expected float16 or bfloat16": {"x": torch.zeros(TOKENS, HIDDEN)},
    "x: has 1 dimensions, expected 2": {"x": torch.zeros(HIDDEN, dtype=torch.half)},
    "x: has the shape [8, 128], expected [8, 256]": {"x": torch.zeros(TOKENS, 128, dtype=torch.half)},
    "topk_ids: is int64, expected int32": {"topk_ids": torch.zeros(TOKENS, TOP_K, dtype=torch.int64)},
    "topk_ids: has the shape [7, 2], expected [8, 2]": {"topk_ids": torch.zeros(7, TOP_K, dtype=torch.int32)},
    "topk_weights: is float16, expected float32": {"topk_weights": torch.zeros(TOKENS, TOP_K).half()},
    "topk_weights: has the shape [8, 3], expected [8, 2]": {"topk_weights": torch.zeros(TOKENS, 3)},
    "expert_map: is int64, expected int32": {"expert_map": torch.zeros(9, dtype=torch.int64)},
    "w13_trellis: is float32, expected int16": {"w13_trellis": torch.zeros(1)},
    "w13_suh: has the shape [4, 2, 128], expected [4, 2, 256]": {"w13_suh": torch.zeros(4, 2, 128).half()},
    "w13_svh: is not contiguous": {"w13_svh": torch.zeros(4, WIDTH, 2).half().mT},
    "w2_trellis: has the shape [4, 8, 16, 80], expected [4, 8, 16, 64]": {
        "w2_trellis": torch.zeros(4, 8, 16, 80, dtype=torch.int16)
    },
    "w2_svh: is bfloat16, expected float16": {"w2_svh": torch.zeros(4, HIDDEN).bfloat16()},
    "codebook: is 3, expected 0 (3inst), 1 (mcg) or 2 (mul1)": {"codebook": 3},
    "min_rows: is 0, expected 1 to 2147483647": {"min_rows": 0},
    "addend: is float16, expected float32": {"addend": torch.zeros(TOKENS, HIDDEN).half()},
    "out: is int32, expected float16 or bfloat16 or float32": {"out": torch.zeros(TOKENS, HIDDEN).int()},
    "workspace: has 1 bytes, 8 tokens need": {"workspace": torch.zeros(1, dtype=torch.uint8)},
    "workspace: does not start at a multiple of 256 bytes": {"workspace": aligned_bytes(2**24, offset=16)},
    "x: is not on a CUDA device": {},
}


@pytest.mark.nvcc
@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_tensors_are_named(loaded, sentence):
    named = arguments(**REFUSED[sentence])
    with pytest.raises(RuntimeError) as caught:
        loaded.load().fat_moe(named.pop("x"), **named)
    assert sentence in str(caught.value)


@pytest.mark.nvcc
def test_decode_inner_names_its_tensors(loaded):
    trellis, inner = torch.zeros(8, 8, 64, dtype=torch.int16), torch.zeros(128, 128, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"inner: has the shape \[128, 64\], expected \[128, 128\]"):
        ops.decode_inner(trellis, Codebook.MCG, inner[:, :64])
    with pytest.raises(RuntimeError, match="trellis: last dimension 60 is no rate"):
        ops.decode_inner(trellis[..., :60].contiguous(), Codebook.MCG, inner)
    with pytest.raises(RuntimeError, match="trellis: is not on a CUDA device"):
        ops.decode_inner(trellis, Codebook.MCG, inner)


@pytest.mark.nvcc
def test_workspace_grows_with_the_tokens(loaded):
    """Scratch is made once for the longest step and serves all shorter ones."""
    for sizes in ((8, 288, 4096, 1024), (8, 96, 4096, 2048), (1, 4, 256, 128)):
        bytes_ = [ops.workspace_bytes(tokens, *sizes) for tokens in range(1, 2000, 7)]
        assert bytes_ == sorted(bytes_)


@pytest.mark.nvcc
def test_fake_versions_serve_a_compiler(loaded):
    from torch._subclasses.fake_tensor import FakeTensorMode

    loaded.load()
    named = arguments()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in named.items()}  # fmt: skip
        names = ("w13_trellis", "w13_suh", "w13_svh", "w2_trellis", "w2_suh", "w2_svh")
        experts = PackedExperts(*(fake[name] for name in names), Codebook.MCG, True)
        ops.fat_moe(
            fake["x"], fake["topk_ids"], fake["topk_weights"], experts, out=fake["out"], workspace=fake["workspace"],
            limit=10.0,
        )  # fmt: skip
        ops.decode_inner(fake["w2_trellis"][0], Codebook.MCG, torch.empty(WIDTH, HIDDEN, dtype=torch.float16))
