"""Combinations of settings that are known to answer wrongly, hang or not start: the reason, and what lifts it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import ceil

from launcher import server_parser
from launcher.config import BUILT_IN
from launcher.vllm_flags import SHORT, flag_of, server_flags, why_not_extra

# GLM-5.3-Flash's linear attention, from which the size of its state follows.
HEADS = 64
HEAD_WIDTH = 128
CONVOLUTION_WIDTH = 4

# vLLM makes the cache block of a hybrid model as large as one such state, in tokens of this many bytes, rounded up to
# whole indexer blocks.
TOKEN_BYTES = 512
BLOCK_GRAIN = 256

# Neighbouring tokens that the sparse attention's indexer keeps as one.
POOL = 4

RAY_PORT_SPAN = 52

CACHE_TYPES = ("fp8", "auto")

# Flags that move or slice cache rows whose compact form has not been tested there.
ROW_MOVERS = (
    "--decode-context-parallel-size",
    "--kv-transfer-config",
    "--kv-offloading-size",
    "--kv-offloading-backend",
)


def draft_tokens(config) -> int:
    return 0 if config["SPEC_METHOD"] == "none" else int(config["SPEC_TOKENS"])


def state_block_tokens(nodes: int, drafts: int) -> int:
    """Tokens in one cache block: a rank's float32 state and the bfloat16 inputs of its convolution."""
    heads = ceil(HEADS / nodes)
    state = heads * HEAD_WIDTH * HEAD_WIDTH * 4
    convolution = (CONVOLUTION_WIDTH - 1 + drafts) * 3 * heads * HEAD_WIDTH * 2
    return ceil((state + convolution) / TOKEN_BYTES / BLOCK_GRAIN) * BLOCK_GRAIN


def extra_values(config, flag: str) -> list[str]:
    """What EXTRA_ARGS gives to a flag, in either way of writing it."""
    words = config["EXTRA_ARGS"]
    apart = [value for word, value in pairwise(words) if flag_of(word) == flag and "=" not in word]
    return apart + [word.split("=", 1)[1] for word in words if flag_of(word) == flag and "=" in word]


def refuse_cache_type(config) -> Iterable[str]:
    for value in extra_values(config, "--kv-cache-dtype"):
        if value not in CACHE_TYPES:
            yield (
                f"EXTRA_ARGS has --kv-cache-dtype {value}: the sparse attention of this GPU reads packed FP8 rows "
                f"only; leave it out, KV_CACHE_DTYPE is {config['KV_CACHE_DTYPE']}. "
                f"Kernels for another type would lift this."
            )


def refuse_marlin(config) -> str | None:
    named = [value.lower() for value in (str(config["MOE_BACKEND"]), *extra_values(config, "--moe-backend"))]
    if "marlin" not in named:
        return None
    return (
        "MOE_BACKEND is marlin: Marlin multiplies other formats and would read EXL3's packed experts as noise; "
        "clear it, the EXL3 plugin brings its own kernels. Nothing lifts this."
    )


def refuse_compact_rows(config) -> Iterable[str]:
    if config["MLA_GEOMETRY"] != "compact":
        return
    for flag in dict.fromkeys(map(flag_of, config["EXTRA_ARGS"])):
        if flag in ROW_MOVERS:
            yield (
                f"MLA_GEOMETRY is compact and EXTRA_ARGS has {flag}: that path has not been tested with 528-byte rows, "
                f"and a wrong row is a wrong answer without an error; set MLA_GEOMETRY=auto or leave {flag} out. "
                f"A test of ours with both lifts this."
            )


def refuse_triton_attention(config) -> str | None:
    if not any("TRITON_ATTN" in word.upper() for word in config["EXTRA_ARGS"]):
        return None
    return (
        "EXTRA_ARGS names TRITON_ATTN: the model's own attention it cannot be; leave it out, and set "
        "DRAFT_ATTENTION=TRITON_ATTN if you mean the draft's."
    )


def refuse_small_steps(config) -> str | None:
    """A step holds a pool beside all decoding requests, or with the prefix cache a state block once it could at all."""
    drafts, seats, tokens = draft_tokens(config), int(config["MAX_NUM_SEQS"]), int(config["MAX_NUM_BATCHED_TOKENS"])
    decoding = seats * (drafts + 1)
    beside = f"beside {seats} decoding requests of {drafts + 1}"
    guarded = "chunk-ends" not in config["EXL3_GUARDS_OFF"]
    if guarded and tokens < decoding + POOL:
        return (
            f"MAX_NUM_BATCHED_TOKENS is {tokens}: a prefill chunk must hold a whole pool of the indexer ({POOL} "
            f"tokens) {beside}, else a prompt may wait for ever; set it to {decoding + POOL} or more, or lower "
            f"MAX_NUM_SEQS."
        )
    # vLLM's CPU build attends to everything and has no pools, and its states are never reused.
    if config["RUNTIME"] != "docker" or config.topology.nodes not in (2, 3, 4):
        return None
    block = state_block_tokens(config.topology.nodes, drafts)
    needed = block + decoding
    if tokens >= needed or (guarded and (tokens < block or not config["PREFIX_CACHE"])):
        return None
    if guarded:
        return (
            f"MAX_NUM_BATCHED_TOKENS is {tokens}: it holds a state block ({block} tokens), and then vLLM reads "
            f"prompts in whole blocks, but not {beside}, so that a prompt would wait until others end; set it to "
            f"{needed} or more, or below {block}, or lower MAX_NUM_SEQS."
        )
    return (
        f"MAX_NUM_BATCHED_TOKENS is {tokens}: a prefill chunk must hold a whole state block ({block} tokens) {beside}, "
        f"else it starts inside a pool of the indexer and long contexts silently lose tokens; set it to {needed} or "
        f"more, or lower MAX_NUM_SEQS. The guard chunk-ends, which EXL3_GUARDS_OFF turns off, lifts this."
    )


def refuse_sliced_experts(config) -> str | None:
    if config.topology.nodes != 3 or config["EXPERT_PARALLEL"]:
        return None
    return (
        "EXPERT_PARALLEL is off on three nodes: an expert is 2048 wide and its packed tiles do not divide by 3; "
        "set EXPERT_PARALLEL=1, which gives each node 96 whole experts."
    )


def refuse_shared_ports(config) -> Iterable[str]:
    taken = {"PORT": int(config["PORT"])}
    if config["EXECUTOR"] == "mp":
        taken["MASTER_PORT"] = int(config["MASTER_PORT"])
        if taken["PORT"] == taken["MASTER_PORT"]:
            yield f"PORT and MASTER_PORT are both {taken['PORT']}: each listens on its own; change one of them."
        return
    first = int(config["RAY_PORT"])
    last = first + RAY_PORT_SPAN - 1
    for name, port in taken.items():
        if first <= port <= last:
            yield f"{name} is {port}: Ray takes the ports {first} to {last}; change {name} or RAY_PORT."


def refuse_owned_flags(config) -> Iterable[str]:
    told = set()
    for word in config["EXTRA_ARGS"]:
        flag = flag_of(word)
        reason = why_not_extra(flag) if flag and flag not in told else None
        told.add(flag)
        if reason:
            shown = f"{word} ({flag})" if word in SHORT else flag
            yield f"EXTRA_ARGS has {shown}: {reason}, so that the plan and its checks know the value."


def refuse_unreadable_arguments(config) -> Iterable[str]:
    """What the pinned vLLM's parser would refuse, or read as a flag that the launcher decides, minutes from now."""
    words = config["EXTRA_ARGS"]
    # The CPU build, which serves without containers, has another number.
    if not (words or config["MOE_BACKEND"]) or config["RUNTIME"] != "docker" or refuse_secret_in_extra(config):
        return
    names = "EXTRA_ARGS or MOE_BACKEND" if config["MOE_BACKEND"] else "EXTRA_ARGS"
    try:
        server_parser.parse(server_flags(config, {"model": "/model", "draft": "/draft"}))
        given = vars(server_parser.parse(words))
    except server_parser.Refused as error:
        version = server_parser.read_record()["vllm"]
        yield f"{names}: vLLM {version} would refuse the server's arguments ({str(error)[:400]}); correct the setting."
        return
    if given.get("model_tag"):
        yield f"EXTRA_ARGS has {given['model_tag']!r}, which belongs to no flag; leave it out or quote it."
    told = set(map(flag_of, words))
    for flags in server_parser.flags_of(given):
        if not told & set(flags) and (reason := why_not_extra(flags[0])):
            yield f"EXTRA_ARGS has a short or shortened {flags[0]}: {reason}, so that the plan and its checks know it."


def refuse_secret_in_extra(config) -> str | None:
    key = str(config["VLLM_API_KEY"] or "")
    if not key or not any(key in word for word in config["EXTRA_ARGS"]):
        return None
    return (
        "EXTRA_ARGS holds the value of VLLM_API_KEY: every user of the machine can read argument lists; "
        "take it out, the server gets the key from its environment."
    )


REFUSALS: tuple[Callable, ...] = (
    refuse_cache_type, refuse_marlin, refuse_compact_rows, refuse_triton_attention, refuse_small_steps,
    refuse_sliced_experts, refuse_shared_ports, refuse_owned_flags, refuse_unreadable_arguments,
    refuse_secret_in_extra,
)  # fmt: skip


def refusals(config) -> list[str]:
    """All of them; none means that the settings may be planned."""
    found: list[str] = []
    for rule in REFUSALS:
        said = rule(config)
        found += [said] if isinstance(said, str) else list(said or ())
    return [located(config, sentence) for sentence in found]


def located(config, sentence: str) -> str:
    """With the lines, of the env file or elsewhere, that set what the sentence names."""
    named = [name for name in dict.fromkeys(re.findall(r"\b[A-Z][A-Z0-9_]+\b", sentence)) if name in config.sources]
    where = dict.fromkeys(config.sources[name] for name in named if config.sources[name] != BUILT_IN)
    return f"{' and '.join(where)}: {sentence}" if where else sentence


def notes(config) -> list[str]:
    """What is allowed and should still be said."""
    said = []
    if config["BIND"] == "0.0.0.0" and not config["VLLM_API_KEY"]:
        said.append(
            "BIND=0.0.0.0 without VLLM_API_KEY: everyone on the network can use the model and see what is asked; "
            "`./start.sh key` makes a key."
        )
    if config["EXL3_GUARDS_OFF"]:
        said.append(
            f"EXL3_GUARDS_OFF={','.join(config['EXL3_GUARDS_OFF'])}: answers may silently be wrong; "
            f"docs/engine-truth.md says how."
        )
    if config["SPEC_METHOD"] == "dflash" and config["DRAFT_ATTENTION"] != "FLASH_ATTN":
        said.append(
            f"DRAFT_ATTENTION={config['DRAFT_ATTENTION']}: on the older preview it lost most drafts; in vLLM 0.33.0 it "
            f"accepted as many as FLASH_ATTN on an H200, on a Spark it was not measured. `status` shows the acceptance."
        )
    if config["KDA_PREFILL_BACKEND"] != "triton":
        said.append(
            f"KDA_PREFILL_BACKEND={config['KDA_PREFILL_BACKEND']}: public reports tie it to garbled text after long "
            f"tool sessions; triton is the safe choice until warm and cold answers have been shown to be equal."
        )
    return said
