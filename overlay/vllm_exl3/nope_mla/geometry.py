"""Which layout of cache rows and queries NoPE MLA takes on SM12x, and why. No vLLM import at module level.

A cache row of GLM-5.3-Flash holds 512 latent values in e4m3 and a float32 scale for each 128 of them: 528 bytes, after
which vLLM's rows have 128 more for rotary columns that this model does not have.
"""

import importlib
import importlib.metadata
from collections.abc import Container
from dataclasses import dataclass

LATENT = 512  # columns of the latent; one e4m3 byte each
GROUP = 128  # of them share a scale
PAYLOAD_BYTES = LATENT + 4 * LATENT // GROUP
ROPE = 64  # bfloat16 columns behind the payload in a row of FlashInfer's 576-wide kernels
ROPED_BYTES = PAYLOAD_BYTES + 2 * ROPE

# Numbers of heads that FlashInfer has long-prompt kernels for. Other numbers are padded up to one of them.
HEADS = (8, 16, 32, 64, 128)

CAPABILITY_MAJOR = 12
KERNEL_MODULE = "flashinfer.mla._sparse_mla_sm120"


class MlaGeometryError(RuntimeError):
    """The geometry that was asked for cannot be had here."""


@dataclass(frozen=True)
class Geometry:
    name: str
    row_bytes: int  # of one token in one layer
    rope: int  # columns that the kernel expects behind the latent, in queries and rows

    @property
    def columns(self) -> int:
        """Of a query."""
        return LATENT + self.rope


NATIVE = Geometry("native", ROPED_BYTES, 0)
PADDED = Geometry("padded", ROPED_BYTES, ROPE)
COMPACT = Geometry("compact", PAYLOAD_BYTES, 0)


@dataclass(frozen=True)
class Kernels:
    """FlashInfer's sparse MLA kernels as (heads, candidates) that they take; None where the kind is missing."""

    version: str
    nope: Container[tuple[int, int]] | None  # 512 columns
    roped: Container[tuple[int, int]] | None  # 576 columns, scales of any value


@dataclass(frozen=True)
class Choice:
    """`heads` and `candidates` are what the kernel is called with."""

    geometry: Geometry
    heads: int
    candidates: int
    reason: str


def is_sm12x(capability: tuple[int, int] | None) -> bool:
    """None, where no GPU can be asked, counts as one: then nothing that an SM12x needs is missing if it is one."""
    return capability is None or capability[0] == CAPABILITY_MAJOR


def applies(setting: str, capability: tuple[int, int] | None) -> bool:
    """Whether this GPU takes one of the geometries. Raises MlaGeometryError where one was asked for and it does not."""
    if is_sm12x(capability):
        return True
    if setting != "auto":
        raise MlaGeometryError(
            f"MLA_GEOMETRY is {setting}, but this GPU has capability {capability[0]}.{capability[1]}: the geometries "
            f"are for {CAPABILITY_MAJOR}.x, other GPUs have attention kernels of their own; set MLA_GEOMETRY=auto"
        )
    return False


def installed_kernels() -> Kernels:
    """Raises MlaGeometryError if FlashInfer is missing or has no sparse MLA for SM12x."""
    try:
        module = importlib.import_module(KERNEL_MODULE)
    except ImportError as error:
        raise MlaGeometryError(
            f"{KERNEL_MODULE}: {error}; sparse MLA on SM12x needs FlashInfer 0.7.2.post1, which vLLM 0.33.0 installs"
        ) from error
    nope, roped = (getattr(module, f"_DECODE_{kind}_DISPATCH", None) for kind in ("GLM53_NOPE", "DSV3_2"))
    return Kernels(_version(), nope, roped)


def _version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def decide(setting: str, kernels: Kernels, heads: int, candidates: int, index_topk: int) -> Choice:
    """The geometry for `heads` heads on this rank and `candidates` columns in the indexer's buffer, of which the first
    `index_topk` are whole pools. Raises MlaGeometryError naming the missing kernel."""
    if setting == "padded":
        return _padded(kernels, heads, candidates, index_topk, "asked for")
    wide = _heads(kernels.nope, heads, candidates)
    if wide is None and setting == "auto":
        reason = f"FlashInfer {kernels.version} has no 512-wide kernel for {heads} heads and {candidates} candidates"
        return _padded(kernels, heads, candidates, index_topk, reason)
    if wide is None:
        raise MlaGeometryError(_missing(setting, kernels, 512, heads, candidates) + "; set MLA_GEOMETRY=auto or padded")
    if setting == "compact":
        return Choice(COMPACT, wide, candidates, "asked for")
    return Choice(NATIVE, wide, candidates, f"FlashInfer {kernels.version} has the 512-wide kernel")


def _padded(kernels: Kernels, heads: int, candidates: int, index_topk: int, reason: str) -> Choice:
    for width in (candidates, index_topk):
        wide = _heads(kernels.roped, heads, width)
        if wide is not None:
            return Choice(PADDED, wide, width, reason)
    raise MlaGeometryError(
        _missing("padded", kernels, 576, heads, candidates) + f" or {index_topk}; install FlashInfer 0.7.2.post1"
    )


def _heads(table: Container[tuple[int, int]] | None, heads: int, candidates: int) -> int | None:
    """The least number of heads from `heads` up that the table has with so many candidates."""
    if table is None:
        return None
    return next((wide for wide in HEADS if wide >= heads and (wide, candidates) in table), None)


def _missing(setting: str, kernels: Kernels, columns: int, heads: int, candidates: int) -> str:
    return (
        f"MLA geometry {setting}: FlashInfer {kernels.version} has no {columns}-wide sparse MLA kernel for SM12x that "
        f"takes {heads} heads and {candidates} candidates"
    )
