"""A Python for hosts without a GPU: this one's packages, with a stand-in for what vLLM's CPU build lacks.

vLLM's CPU platform names no Ray device, its ranks look for each other in shared memory by a name that two hosts
could share, and its `serve` command asks for the version of a distribution named vllm. Tests only.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = '''\
"""Lends every host a GPU that is none, and keeps ranks of different hosts apart."""
import socket

from vllm_exl3.after_import import after_import


def lend_gpu(module):
    module.CpuPlatform.ray_device_key = "GPU"


def name_host(module):
    shared = module._CPUSHMDistributed
    named = shared.make_group_name
    shared.make_group_name = staticmethod(lambda communicator: f"{named(communicator)}-{socket.gethostname()}")


after_import("vllm.platforms.cpu", lend_gpu)
after_import("vllm.distributed.device_communicators.cpu_communicator", name_host)
'''


def make_python(folder: Path) -> Path:
    """A virtual environment whose packages are those of the one that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    paths = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    packages, ours = Path(paths.stdout.strip()), Path(sysconfig.get_path("purelib"))
    for ray in ours.glob("ray-*.dist-info"):  # the launcher's probe looks for it by name
        (packages / ray.name).symlink_to(ray)
    (packages / "cluster_stand_in.py").write_text(MODULE)
    (packages / "a_packages.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
    (packages / "b_stand_in.pth").write_text("import cluster_stand_in\n")
    metadata = packages / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return python
