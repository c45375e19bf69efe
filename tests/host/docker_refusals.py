"""What Docker's daemon says where a way to the GPU does not work, word for word, from reports of its users."""

PREFIX = "docker: Error response from daemon: "
CREATE = (
    "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: "
)

# (way, what is said) by what is wrong on the node
REFUSALS = {
    "toolkit in CDI mode": (
        "gpus",
        PREFIX + CREATE + "error during container init: error running prestart hook #0: exit status 1, stdout: , "
        "stderr: Using requested mode 'cdi'\ninvoking the NVIDIA Container Runtime Hook directly (e.g. specifying the "
        "docker --gpus flag) is not supported. Please use the NVIDIA Container Runtime (e.g. specify the "
        "--runtime=nvidia flag) instead: unknown",
    ),
    "no toolkit": ("gpus", PREFIX + 'could not select device driver "" with capabilities: [[gpu]]'),
    "no toolkit, Docker 29": (
        "gpus", PREFIX + "failed to discover GPU vendor from CDI: no known GPU vendor found"
    ),
    "hook removed": (
        "gpus",
        PREFIX + CREATE + "error during container init: error running hook #1: fork/exec "
        "/usr/bin/nvidia-container-runtime-hook: no such file or directory: unknown",
    ),
    "driver updated": (
        "gpus",
        PREFIX + CREATE + "error during container init: error running prestart hook #0: exit status 1, stdout: , "
        "stderr: Auto-detected mode as 'legacy'\nnvidia-container-cli: initialization error: nvml error: "
        "driver/library version mismatch: unknown",
    ),
    "driver not loaded": (
        "gpus",
        PREFIX + CREATE + "error during container init: error running prestart hook #0: exit status 1, stdout: , "
        "stderr: Auto-detected mode as 'legacy'\nnvidia-container-cli: initialization error: nvml error: driver not "
        "loaded: unknown",
    ),
    "no CDI description": (
        "cdi", PREFIX + "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all"
    ),
    "CDI off": ("cdi", PREFIX + 'could not select device driver "cdi" with capabilities: []'),
    "Docker without CDI": (
        "cdi",
        PREFIX + 'error gathering device information while adding custom device "nvidia.com/gpu=all": no such file or '
        "directory",
    ),
    "no runtime": ("runtime", PREFIX + "unknown or invalid runtime name: nvidia"),
    "no runtime, older Docker": ("runtime", PREFIX + "Unknown runtime specified nvidia."),
    "runtime without a description": (
        "runtime",
        PREFIX + "failed to create task for container: failed to create shim task: OCI runtime create failed: could "
        "not apply required modification to OCI specification: error modifying OCI spec: failed to inject CDI devices: "
        "unresolvable CDI devices nvidia.com/gpu=all: unknown",
    ),
    "container without the GPU's programs": (
        "runtime",
        PREFIX + CREATE + 'exec: "nvidia-smi": executable file not found in $PATH: unknown',
    ),
}  # fmt: skip

CDI_MODE = REFUSALS["toolkit in CDI mode"][1]
