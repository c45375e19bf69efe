"""The arms of a soak: what may go wrong together, which of it a platform lacks, and vLLM's options for it."""

from __future__ import annotations

import itertools
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu" / "engine"))

from prove import KV, dflash2, mtp

AXES = {
    "cache": ("cache", "nocache"),
    "drafts": ("nodrafts", "mtp1", "mtp3", "dflash7"),
    "schedule": ("sync", "async"),
    "mode": ("eager", "graphs"),
    "kda": ("triton", "flashkda"),
    "kv": ("auto", "fp8"),
}


@dataclass(frozen=True)
class Arm:
    cache: str
    drafts: str
    schedule: str
    mode: str
    kda: str
    kv: str

    @property
    def name(self) -> str:
        return "-".join(astuple(self))

    @property
    def is_plain(self) -> bool:
        return self == plain(self.kv)


def plain(kv: str) -> Arm:
    """The arm that gives the floor: each thing that this soak looks at is off."""
    return Arm("nocache", "nodrafts", "sync", "eager", "triton", kv)


def named(name: str) -> Arm:
    """Raises ValueError, listing the words, for a name that is no arm's."""
    words = name.split("-")
    if len(words) != len(AXES) or any(word not in AXES[axis] for axis, word in zip(AXES, words, strict=False)):
        shape = "-".join("(" + "|".join(values) + ")" for values in AXES.values())
        raise ValueError(f"--arms {name}: no such arm; a name is {shape}, or a set of {', '.join(SETS)}.")
    return Arm(*words)


def product() -> list[Arm]:
    """What the plans start by default (launcher/table.py), and the same with the other ways to draft."""
    return [Arm("cache", drafts, "sync", "graphs", "triton", "auto") for drafts in ("dflash7", "mtp3", "nodrafts")]


def every() -> list[Arm]:
    return [Arm(*words) for words in itertools.product(*AXES.values())]


def pairs(arm: Arm) -> set[tuple]:
    """The pairs of values that an arm has together."""
    values = [(field.name, getattr(arm, field.name)) for field in fields(arm)]
    return set(itertools.combinations(values, 2))


def pairwise(candidates: list[Arm] | None = None) -> list[Arm]:
    """Few arms in which each pair of values occurs that occurs in any candidate; always the same ones."""
    candidates = every() if candidates is None else candidates
    missing, chosen = set().union(*map(pairs, candidates)) if candidates else set(), []
    while missing:
        best = max(candidates, key=lambda arm: len(pairs(arm) & missing))
        chosen.append(best)
        missing -= pairs(best)
    for arm in list(chosen):  # a later one may have made an earlier one needless
        others = [other for other in chosen if other != arm]
        if others and pairs(arm) <= set().union(*map(pairs, others)):
            chosen = others
    return chosen


SETS = {"pairwise": pairwise, "all": lambda candidates=None: candidates or every(), "product": lambda _=None: product()}


# What a platform lacks

CPU_LACKS = {
    "cache": "vLLM switches the prefix cache off for MLA on the CPU",
    "mtp1": "the CPU's KDA decodes one token a step (vllm_exl3/cpu/kda.py)",
    "mtp3": "the CPU's KDA decodes one token a step (vllm_exl3/cpu/kda.py)",
    "dflash7": "the CPU's KDA decodes one token a step (vllm_exl3/cpu/kda.py)",
    "async": "vLLM switches async scheduling off on the CPU",
    "graphs": "CUDA graphs need CUDA",
    "flashkda": "FlashKDA needs CUDA, SM90, SM10x or SM12x",
    "fp8": "the CPU's MLA cache is bf16 only",
    # No words of an arm's name, but what a GPU's soak looks at too.
    "chunks": "vLLM reads every prompt whole where MLA runs on the CPU",
    "indexer": "the CPU's attention is dense, up to 2,048 tokens",
}
SM_LACKS = {
    "fp8": ("FLASHMLA_SPARSE with fp8_ds_mla was run on SM90 only; SM12x packs FP8 rows under the name auto", (9,)),
    "flashkda": ("FlashKDA needs SM90, SM10x or SM12x", (9, 10, 12)),
}


@dataclass(frozen=True)
class Platform:
    name: str  # cpu or cuda
    major: int = 0  # of the GPU's compute capability


def lacking(platform: Platform) -> dict[str, str]:
    """Value of an axis -> why this platform does not have it."""
    if platform.name == "cpu":
        return dict(CPU_LACKS)
    return {value: f"{why}, this is SM{platform.major}x" for value, (why, majors) in SM_LACKS.items()
            if platform.major not in majors}  # fmt: skip


def choose(wanted: str, platform: Platform) -> tuple[list[Arm], dict[str, str]]:
    """(arms to run, {arm or value: why it is not run}). `wanted`: a set's name or names of arms, with commas.

    A set is made of what the platform has. Raises ValueError for unknown names.
    """
    lacks = lacking(platform)
    if wanted in SETS:
        there = [arm for arm in every() if not lacks.keys() & set(astuple(arm))]
        if wanted == "product":
            return _without(product(), lacks)
        return SETS[wanted](there), lacks
    return _without([named(name) for name in wanted.split(",")], lacks)


def _without(arms: list[Arm], lacks: dict[str, str]) -> tuple[list[Arm], dict[str, str]]:
    gone = {arm.name: "; ".join(lacks[word] for word in astuple(arm) if word in lacks)
            for arm in arms if lacks.keys() & set(astuple(arm))}  # fmt: skip
    return [arm for arm in arms if arm.name not in gone], gone


# vLLM's options

DRAFTS = {"nodrafts": {}, "mtp1": mtp(1), "mtp3": mtp(3), "dflash7": dflash2("local-dflash2")}
# As the launcher's plans have it: vLLM chooses its sparse MLA for SM12x, in whose place the plugin has put its own, and
# MLA_GEOMETRY and PDL come from the environment.
SM12X_KV = {"auto": {"kv_cache_dtype": "fp8"}}


def options(arm: Arm, platform: Platform) -> dict:
    """Keyword arguments of vLLM's LLM for what the arm's name says; a draft's folder by its name."""
    if platform.name == "cpu":
        return {"enable_prefix_caching": False}
    return {
        "enable_prefix_caching": arm.cache == "cache",
        "async_scheduling": arm.schedule == "async",
        "enforce_eager": arm.mode == "eager",
        "additional_config": {"kda_prefill_backend": arm.kda},
        **(SM12X_KV if platform.major == 12 else KV)[arm.kv],
        **DRAFTS[arm.drafts],
    }


def model_of(arm: Arm) -> str:
    """The folder that the arm serves, by its name in the work folder."""
    return "local-mtp" if arm.drafts.startswith("mtp") else "local"
