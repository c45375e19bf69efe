"""The grouped kernel under compute-sanitizer: small steps have to be clean, and a planted fault has to be seen.

    PYTHONPATH=overlay:tests/gpu python3 tests/gpu/sanitize.py

One line for each verdict; ends with 1 if one fails. Needs a GPU whose driver lets the sanitizer in.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

TOOLS = {"memcheck": ["--leak-check", "no"], "racecheck": ["--racecheck-report", "all"]}
FOUND = 9  # exit code of a run in which the tool found something
TIMEOUT_S = 240

HIDDEN, WIDTH, TOKENS, TOP_K = 256, 128, 150, 4
COUNTS = (0, 1, 17, 128, 129, 40)

PLANTED = {
    "memcheck": 'extern "C" __global__ void planted(int *data) { data[threadIdx.x] = 1; }',
    "racecheck": """extern "C" __global__ void planted(int *data) {
                      __shared__ int shared[64];
                      shared[threadIdx.x] = threadIdx.x;
                      data[threadIdx.x % 8] = shared[(threadIdx.x + 33) % 64];
                    }""",
}


def run_steps() -> None:
    import torch
    from judging import check
    from packed_experts import Routing, inputs, make_experts, oracle, route_counts
    from vllm_exl3 import ops
    from vllm_exl3.format import Codebook

    x, routing = inputs(TOKENS, HIDDEN), route_counts(COUNTS, TOKENS, TOP_K)
    there = Routing(routing.ids.cuda(), routing.weights.cuda())
    for bits, codebook, shared in (
        (4, Codebook.MCG, True), (4, Codebook.MCG, False), (3, Codebook.MUL1, True), (2.5, Codebook.MUL1, False),
        (2, Codebook.THREE_INST, True),
    ):  # fmt: skip
        # The oracle stays on the CPU: the sanitizer slows every kernel.
        packed = make_experts(len(COUNTS), HIDDEN, WIDTH, bits=bits, codebook=codebook, shared_suh=shared)
        on_gpu = on_device(packed)
        check(step(x.cuda(), there, on_gpu).cpu(), oracle(x, routing, packed))
        inner = torch.empty(HIDDEN, WIDTH, dtype=torch.float16, device="cuda")
        ops.decode_inner(on_gpu.w13_trellis[0, 1].contiguous(), codebook, inner)
        torch.cuda.synchronize()


def on_device(packed):
    tensors = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
    return dataclasses.replace(packed, **{n: t.cuda() for n, t in tensors.items() if hasattr(t, "cuda")})


def step(x, routing, packed):
    """Buffers of exactly the size that is needed, so that a byte too far is seen."""
    import torch
    from vllm_exl3 import ops

    size = ops.workspace_bytes(TOKENS, TOP_K, packed.count, HIDDEN, WIDTH)
    out = torch.empty(x.shape, dtype=torch.float32, device="cuda")
    ops.fat_moe(
        x, routing.ids, routing.weights, packed, out=out,
        workspace=torch.empty(size, dtype=torch.uint8, device="cuda"), limit=10.0,
    )  # fmt: skip
    torch.cuda.synchronize()
    return out


def run_planted(tool: str) -> None:
    import torch

    data = torch.zeros(8, dtype=torch.int32, device="cuda")
    torch.cuda._compile_kernel(PLANTED[tool], "planted")((1, 1, 1), (64, 1, 1), (data,))
    torch.cuda.synchronize()


def sanitized(tool: str, *arguments: str) -> subprocess.CompletedProcess:
    """torch's own allocator would hide what lies between its buffers."""
    return subprocess.run(
        ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--error-exitcode", str(FOUND), sys.executable,
         str(Path(__file__)), *arguments],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
    )  # fmt: skip


def main() -> int:
    failed = 0
    for tool in TOOLS:
        for what, arguments, wanted in (("steps", ["steps"], 0), ("planted fault", ["planted", tool], FOUND)):
            done = sanitized(tool, *arguments)
            passed = done.returncode == wanted
            summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
            print(f"{'PASS' if passed else 'FAIL'} {tool}, {what}: ended with {done.returncode}; {summary}", flush=True)
            if not passed:
                failed += 1
                print(done.stdout[-6000:], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["steps"]:
        run_steps()
    elif sys.argv[1:2] == ["planted"]:
        run_planted(sys.argv[2])
    else:
        sys.exit(main())
