"""vLLM's command line for the cluster: one table that says which flag comes from which setting."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher import server_parser

MODEL_ID = "GLM-5.3-Flash-EXL3"

# The plugin's: prefill chunks end on whole pools of the indexer. vLLM's own where EXL3_GUARDS_OFF names chunk-ends.
SCHEDULER = "vllm_exl3.guards.chunk_ends.scheduler"

# Heads of GLM-5.3-Flash's vision tower and of the DFlash2 draft. What they do not divide by is not sliced.
VISION_HEADS = 16
DRAFT_HEADS = 32

GIB = 1 << 30

Value = str | bool | None


@dataclass(frozen=True)
class Flag:
    """`value` gives a word, True for the flag alone, or None for nothing at all."""

    name: str
    settings: tuple[str, ...]  # whose value it carries; none: it is fixed
    value: Callable[[Mapping, Mapping[str, str]], Value]  # of (config, paths as the server sees them)


def compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def api_host(config) -> str:
    """Loopback, unless a key is set or BIND says where to listen."""
    return config["BIND"] or ("0.0.0.0" if config["VLLM_API_KEY"] else "127.0.0.1")


def kv_cache_bytes(config) -> str | None:
    return str(int(float(config["KV_CACHE_GIB"]) * GIB)) if config["KV_CACHE_GIB"] not in ("", None) else None


def speculative_config(config, paths: Mapping[str, str]) -> str | None:
    nodes = config.topology.nodes
    if config["SPEC_METHOD"] == "none":
        return None
    if config["SPEC_METHOD"] == "mtp":
        return compact_json({"method": "mtp", "num_speculative_tokens": config["SPEC_TOKENS"]})
    return compact_json({
        "method": "dflash",
        "model": paths["draft"],
        "num_speculative_tokens": config["SPEC_TOKENS"],
        # The target packs its cache; without a word of its own the draft would take the same type, which its
        # attention cannot read. (The checkpoint's own draft layer is attention of the target's kind and needs it.)
        "kv_cache_dtype": "auto",
        "attention_backend": config["DRAFT_ATTENTION"],
        "draft_tensor_parallel_size": nodes if DRAFT_HEADS % nodes == 0 else 1,
    })  # fmt: skip


def media_limits(config, _paths) -> str | None:
    return compact_json({"image": config["IMAGE_LIMIT"], "video": config["VIDEO_LIMIT"]}) if config["VISION"] else None


def vision_mode(config, _paths) -> str | None:
    return "data" if config["VISION"] and VISION_HEADS % config.topology.nodes else None


def text_of(name: str) -> Callable[[Mapping, Mapping[str, str]], Value]:
    return lambda config, paths: str(config[name]) if config[name] not in ("", None) else None


def when(name: str, wanted: bool) -> Callable[[Mapping, Mapping[str, str]], Value]:
    return lambda config, paths: True if bool(config[name]) is wanted else None


def always(word: Value) -> Callable[[Mapping, Mapping[str, str]], Value]:
    return lambda config, paths: word


FLAGS = (
    Flag("--model", ("MODEL_DIR",), lambda config, paths: paths["model"]),
    Flag("--served-model-name", (), always(MODEL_ID)),
    Flag("--quantization", (), always("exl3")),
    Flag("--host", ("BIND", "VLLM_API_KEY"), lambda config, paths: api_host(config)),
    Flag("--port", ("PORT",), text_of("PORT")),
    # The plugin's door does both; these are vLLM's own bars behind it.
    Flag("--allowed-origins", ("CORS_ORIGINS",), always("[]")),
    Flag("--max-logprobs", ("MAX_LOGPROBS",), text_of("MAX_LOGPROBS")),
    Flag("--tensor-parallel-size", (), lambda config, paths: str(config.topology.nodes)),
    Flag("--enable-expert-parallel", ("EXPERT_PARALLEL",), when("EXPERT_PARALLEL", True)),
    Flag("--distributed-executor-backend", ("EXECUTOR",), text_of("EXECUTOR")),
    Flag("--max-model-len", ("MAX_MODEL_LEN",), text_of("MAX_MODEL_LEN")),
    # Also given beside a fixed cache size: vLLM compares it with the free memory before it loads anything.
    Flag("--gpu-memory-utilization", ("GPU_MEM_UTIL",), text_of("GPU_MEM_UTIL")),
    Flag("--kv-cache-memory-bytes", ("KV_CACHE_GIB",), lambda config, paths: kv_cache_bytes(config)),
    Flag("--kv-cache-dtype", ("KV_CACHE_DTYPE",), text_of("KV_CACHE_DTYPE")),
    Flag("--max-num-seqs", ("MAX_NUM_SEQS",), text_of("MAX_NUM_SEQS")),
    Flag("--max-num-batched-tokens", ("MAX_NUM_BATCHED_TOKENS",), text_of("MAX_NUM_BATCHED_TOKENS")),
    Flag("--enable-prefix-caching", ("PREFIX_CACHE",), when("PREFIX_CACHE", True)),
    Flag("--no-enable-prefix-caching", ("PREFIX_CACHE",), when("PREFIX_CACHE", False)),
    Flag("--scheduler-cls", (), always(SCHEDULER)),
    Flag("--no-async-scheduling", ("ASYNC_SCHEDULING",), when("ASYNC_SCHEDULING", False)),
    Flag("--enforce-eager", ("ENFORCE_EAGER",), when("ENFORCE_EAGER", True)),
    Flag("--no-enable-flashinfer-autotune", ("AUTOTUNE",), when("AUTOTUNE", False)),
    Flag("--moe-backend", ("MOE_BACKEND",), text_of("MOE_BACKEND")),
    Flag("--speculative-config", ("SPEC_METHOD", "SPEC_TOKENS", "DRAFT_DIR", "DRAFT_ATTENTION"), speculative_config),
    Flag("--limit-mm-per-prompt", ("IMAGE_LIMIT", "VIDEO_LIMIT"), media_limits),
    Flag("--mm-encoder-tp-mode", (), vision_mode),
    Flag("--language-model-only", ("VISION",), when("VISION", False)),
    Flag(
        "--additional-config", ("KDA_PREFILL_BACKEND",),
        lambda config, paths: compact_json({"kda_prefill_backend": config["KDA_PREFILL_BACKEND"]}),
    ),
    # Tools and reasoning in the form of GLM-5.3's chat template.
    Flag("--enable-auto-tool-choice", (), always(True)),
    Flag("--tool-call-parser", (), always("glm47")),
    Flag("--reasoning-parser", (), always("glm47")),
    # Tells each client, and the canary, how much of its prompt came from the prefix cache.
    Flag("--enable-prompt-tokens-details", (), always(True)),
)  # fmt: skip

# Flags that the launcher never passes, or passes to some ranks only, and that a user must not pass either.
RESERVED = {
    "--nnodes": "the topology's start script decides it",
    "--node-rank": "the launcher numbers the ranks",
    "--master-addr": "it is HEAD_IP",
    "--master-port": "set MASTER_PORT",
    "--headless": "the launcher gives it to the ranks that need it",
    "--api-key": "set VLLM_API_KEY, so that the key stays out of argument lists",
    "--config": "a file of flags would not be seen by these checks; write the flags into EXTRA_ARGS",
    "--kda-prefill-backend": "set KDA_PREFILL_BACKEND",
    "--attention-backend": "the model's is sparse MLA, others do not read its cache; set DRAFT_ATTENTION for the draft",
    "--pipeline-parallel-size": "the model is sliced over the nodes by tensor parallelism",
    "--data-parallel-size": "the nodes serve one copy of the model",
    "--api-server-count": "answers are watched in one process",
}

SHORT = {
    "-q": "--quantization", "-tp": "--tensor-parallel-size", "-ep": "--enable-expert-parallel", "-n": "--nnodes",
    "-r": "--node-rank", "-sc": "--speculative-config", "-dcp": "--decode-context-parallel-size",
    "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size", "-asc": "--api-server-count",
}  # fmt: skip


def server_flags(config, paths: Mapping[str, str]) -> list[str]:
    """Every flag that all ranks share, the user's own last."""
    words: list[str] = []
    for flag in FLAGS:
        value = flag.value(config, paths)
        if value is True:
            words.append(flag.name)
        elif value is not None:
            words += [flag.name, value]
    return [*words, *config["EXTRA_ARGS"]]


def flag_of(word: str) -> str | None:
    """The flag that a word of EXTRA_ARGS stands for, as vLLM reads it: `--a_b=1`, `--a-b.key` and `-ab` too."""
    short = next((name for name in SHORT if word == name or word.startswith(f"{name}=")), None)
    if short:
        return SHORT[short]
    if not word.startswith("--") or word == "--":
        return None
    return word.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def base_name(flag: str) -> str:
    return "--" + flag.removeprefix("--").removeprefix("no-")


@functools.cache
def reasons() -> dict[str, str]:
    """Why EXTRA_ARGS may not hold a flag, by every way in which vLLM lets it be written, its opposites too."""
    owned = {row.name: f"set {' or '.join(row.settings)} instead" if row.settings else "the launcher decides it"
             for row in FLAGS}  # fmt: skip
    found: dict[str, str] = {}
    for flag, reason in {**RESERVED, **owned}.items():
        for name in (flag, base_name(flag), *server_parser.names_by_flag().get(flag, ())):
            found.setdefault(name, RESERVED.get(flag, reason))
    return found


def why_not_extra(flag: str) -> str | None:
    """Why EXTRA_ARGS may not hold this flag; None if it may."""
    known, base = reasons(), base_name(flag)
    if flag in known or base in known:
        return known.get(flag) or known[base]
    if flag in server_parser.names_by_flag():
        return None
    # vLLM's parser accepts any unambiguous beginning of a flag.
    longer = [name for name in known for start in (flag, base) if len(base) > 3 and name.startswith(start)]
    return f"it abbreviates {longer[0]}; write flags in full" if longer else None
