"""The checkpoints that ./download.sh knows, each pinned to one revision, and their licences."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Pack:
    """A repository on the Hub at one revision. `bytes` is what was reported, until the Hub says the exact sum."""

    id: str
    revision: str
    shards: int
    bytes: int
    licence: str
    kind: str = "model"  # model: goes to MODEL_DIR; draft: to DRAFT_DIR
    restricts: str = ""  # what the licence forbids or asks for, as a clause; empty where it lets everything be served
    content: str = ""  # packs with the same word here hold the same bytes

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.id}"


SHAPLEY = "its terms are its author's own: read them on the page before you serve it to others"

# The first of a kind is the default.
PACKS = (
    Pack(
        "Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw", "25a44fdbf16862a46b7cc9921142c6c81350af2f",
        120, 175_715_896_392, "Apache-2.0", content="tr3-4bpw",
    ),
    Pack(
        "brandonmusic/GLM-5.3-Flash-tr3-4bpw", "5ab363a8dcf6405955fd5f99671e01a1c9fb124b",
        120, 175_715_896_392, "ShapleyMCG", restricts=SHAPLEY, content="tr3-4bpw",
    ),
    Pack(
        "Mia-AiLab/GLM-5.3-Flash-EXL3-4bpw-TensorFold", "76c0b5173166d2795dd48860f45d8224817f894c",
        83, 164 * GIB, "Apache-2.0",
    ),
    Pack(
        "incoai/GLM-5.3-Flash-DFlash2", "bf582e4eacc1810f76656d1811693ff6c6737d2a",
        1, 2_469_606_195, "CC BY-NC-ND 4.0", kind="draft",
        restricts="no commercial use, and no changed versions; SPEC_METHOD=mtp or none does without it",
    ),
)  # fmt: skip


def of_kind(kind: str) -> list[Pack]:
    return [pack for pack in PACKS if pack.kind == kind]


def by_id(name: str) -> Pack | None:
    return next((pack for pack in PACKS if pack.id == name), None)


def twins(pack: Pack) -> list[Pack]:
    """Other packs with the same bytes."""
    return [other for other in PACKS if pack.content and other.content == pack.content and other is not pack]
