"""The EXL3 trellis format: codebooks, bit packing, tile order, markers, slices.

Torch only, no vLLM. The format is exllamav3's (MIT, github.com/turboderp-org/exllamav3); this module
was written from a description of it and is checked bit for bit against vectors that exllamav3 1.6.5's
CUDA kernels made (`tests/data/exl3_vectors.safetensors`).

One weight W of shape [in, out] is stored as
    trellis  int16 [in/16, out/16, 16*K]   one ring of 256*K bits for each 16x16 tile
    suh      fp16  [in]                    input-side scale and sign
    svh      fp16  [out]                   output-side scale and sign
    mcg | mul1  int32 []                   codebook marker; neither means 3INST
and decodes to  W = diag(suh) H What H diag(svh)  with What the tiles' codebook values and H the
block-diagonal 128x128 Hadamard matrix over sqrt(128). `in` and `out` are padded to multiples of 128.
"""

import enum
import functools
from dataclasses import dataclass, replace

import torch

TILE = 16
TILE_WEIGHTS = TILE * TILE
HADAMARD_BLOCK = 128
STATE_BITS = 16


class Exl3FormatError(ValueError):
    """A tensor that is not what the EXL3 format asks for; the message names it."""


class Codebook(enum.Enum):
    """The three maps from a 16-bit state to a weight; `marker` is the tensor that selects it."""

    THREE_INST = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"

    @property
    def marker(self) -> str | None:
        return None if self is Codebook.THREE_INST else self.value

    @property
    def marker_value(self) -> int | None:
        """The marker tensor's only legal value, as a signed int32."""
        return {"mcg": 0xCBAC1FED - 2**32, "mul1": 0x83DCD12D - 2**32}.get(self.value)


def is_legal_rate(bits: float, codebook: Codebook) -> bool:
    """Whether `bits` per weight exist: 1..8 for every codebook, also 1.5, 2.5 and 3.5 for MUL1."""
    if bits in (1.5, 2.5, 3.5):
        return codebook is Codebook.MUL1
    return bits in range(1, 9)


@functools.cache
def codebook_values(codebook: Codebook) -> torch.Tensor:
    """The value of every state: fp16 [65536]."""
    state = torch.arange(2**STATE_BITS, dtype=torch.int64)
    if codebook is Codebook.MUL1:
        product = (state * 0x83DCD12D) & 0xFFFFFFFF
        byte_sum = sum((product >> shift) & 0xFF for shift in (0, 8, 16, 24))
        scale, offset = _fp16_from_bits(0x1EEE), _fp16_from_bits(0xC931)
        # One fused multiply-add: exact in float64, rounded once.
        return ((1024 + byte_sum).double() * scale + offset).to(torch.float16)
    if codebook is Codebook.MCG:
        product = (state * 0xCBAC1FED) & 0xFFFFFFFF
    else:
        product = (state * 89226354 + 64248484) & 0xFFFFFFFF
    pair = (product & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = pair & 0xFFFF, pair >> 16
    return _as_int16(low).view(torch.float16) + _as_int16(high).view(torch.float16)


def _fp16_from_bits(bits: int) -> float:
    return _as_int16(torch.tensor([bits])).view(torch.float16).item()


def _as_int16(words: torch.Tensor) -> torch.Tensor:
    """Unsigned 16-bit values held in a wider type, as int16 with the same bits."""
    return torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)


@functools.cache
def ring_to_tile() -> torch.Tensor:
    """int64 [256]: for ring element i, its place in the row-major 16x16 tile.

    Ring order is the B operand order of `mma.m16n8k16`: lane i>>3 holds elements 8*lane .. 8*lane+7.
    """
    i = torch.arange(TILE_WEIGHTS)
    lane, j = i >> 3, i & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * ((j >> 2) & 1)
    return row * TILE + column


@functools.cache
def new_bits(bits: float) -> torch.Tensor:
    """int64 [256]: how many bits each ring element appends; a half rate gives odd elements one more."""
    whole = int(bits)
    extra = torch.arange(TILE_WEIGHTS) & 1 if bits != whole else torch.zeros(TILE_WEIGHTS, dtype=torch.int64)
    return whole + extra


def unpack_states(trellis: torch.Tensor) -> torch.Tensor:
    """The 16-bit state of every element: int16 [..., 16*K] -> int32 [..., 256] in ring order."""
    half_words = trellis.to(torch.int64) & 0xFFFF
    words = (half_words[..., 1::2] << 16) | half_words[..., 0::2]  # ring bit p: word p>>5, bit 31-(p&31)
    ring_bits = words.shape[-1] * 32
    bits = ring_bits / TILE_WEIGHTS
    start = (new_bits(bits).cumsum(0).to(words.device) - STATE_BITS) % ring_bits
    first = start >> 5
    second = (first + 1) % words.shape[-1]
    # The window may cross into the next word: take 16 bits out of the pair (first, second).
    shift = 32 - STATE_BITS - (start & 31)
    across = (words[..., first] << STATE_BITS) | (words[..., second] >> STATE_BITS)
    return ((across >> (shift + STATE_BITS)) & 0xFFFF).to(torch.int32)


def pack_states(states: torch.Tensor, bits: float) -> torch.Tensor:
    """Inverse of `unpack_states`: states [..., 256] -> int16 [..., 16*K].

    Raises Exl3FormatError if the states do not form a closed ring: each one's high bits must be its
    predecessor's low bits.
    """
    states = states.to(torch.int64)
    appended = new_bits(bits).to(states.device)
    carried = ((states.roll(1, -1) << appended) & 0xFFFF) | (states & ((1 << appended) - 1))
    if not torch.equal(carried, states):
        raise Exl3FormatError(f"states at {bits} bits do not continue one another around the ring")
    element = torch.repeat_interleave(torch.arange(TILE_WEIGHTS, device=states.device), appended)
    end = appended.cumsum(0)[element]
    ring = (states[..., element] >> (end - 1 - torch.arange(len(element), device=states.device))) & 1
    weights = 1 << torch.arange(15, -1, -1, device=states.device)
    half_words = (ring.unflatten(-1, (-1, 16)) * weights).sum(-1)
    return _as_int16(half_words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@dataclass(frozen=True)
class TensorShape:
    """What the headers say of one EXL3 weight: padded [in, out], rate and codebook."""

    in_features: int
    out_features: int
    bits: float
    codebook: Codebook

    @property
    def trellis_shape(self) -> tuple[int, int, int]:
        return (self.in_features // TILE, self.out_features // TILE, round(TILE * self.bits))

    def __str__(self) -> str:
        return f"{self.in_features}x{self.out_features} at {self.bits:g} bits, {self.codebook.value}"


def shape_from_headers(
    module: str, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> TensorShape:
    """Check one module's EXL3 tensors, given as {"trellis": (safetensors dtype, shape), ...}.

    Raises Exl3FormatError naming the tensor, what it is and what it should be.
    """
    for name in tensors:
        if name in ("su", "sv"):
            raise Exl3FormatError(
                f"{module}.{name}: sign-only scales of an early exllamav3 are not supported; convert the model again"
            )
        if name not in ("trellis", "suh", "svh", "mcg", "mul1", "bias"):
            raise Exl3FormatError(f"{module}.{name}: no EXL3 weight has a tensor of this name")
    for name in ("trellis", "suh", "svh"):
        if name not in tensors:
            raise Exl3FormatError(f"{module}.{name}: missing, though the checkpoint has {sorted(tensors)} for {module}")
    codebook = _codebook_from_markers(module, tensors)
    dtype, shape = tensors["trellis"]
    if dtype != "I16" or len(shape) != 3:
        raise Exl3FormatError(f"{module}.trellis: is {dtype} {list(shape)}, expected I16 [in/16, out/16, 16*K]")
    bits = shape[2] / TILE
    if not is_legal_rate(bits, codebook):
        raise Exl3FormatError(
            f"{module}.trellis: last dimension {shape[2]} means {bits:g} bits, which {codebook.value} does not have"
        )
    result = TensorShape(shape[0] * TILE, shape[1] * TILE, int(bits) if bits == int(bits) else bits, codebook)
    _check_sides(module, tensors, result)
    return result


def _codebook_from_markers(module: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Codebook:
    markers = [codebook for codebook in (Codebook.MCG, Codebook.MUL1) if codebook.marker in tensors]
    if len(markers) == 2:
        raise Exl3FormatError(f"{module}: has both codebook markers mcg and mul1, expected at most one")
    for codebook in markers:
        dtype, shape = tensors[codebook.marker]
        if dtype != "I32" or tuple(shape) not in ((), (1,)):
            raise Exl3FormatError(f"{module}.{codebook.marker}: is {dtype} {list(shape)}, expected an I32 scalar")
    return markers[0] if markers else Codebook.THREE_INST


def _check_sides(module: str, tensors: dict[str, tuple[str, tuple[int, ...]]], shape: TensorShape) -> None:
    for name, length, side in (("suh", shape.in_features, "in"), ("svh", shape.out_features, "out")):
        dtype, got = tensors[name]
        if dtype != "F16" or tuple(got) != (length,):
            raise Exl3FormatError(
                f"{module}.{name}: is {dtype} {list(got)}, expected F16 [{length}], the {side} size of "
                f"{module}.trellis {list(tensors['trellis'][1])}"
            )
        if length % HADAMARD_BLOCK:
            raise Exl3FormatError(f"{module}.{name}: length {length} is no multiple of {HADAMARD_BLOCK}")
    if "bias" in tensors:
        raise Exl3FormatError(f"{module}.bias: GLM-5.3-Flash has no biased EXL3 layers and this plugin loads none")


def check_marker(tensor: str, marker: torch.Tensor, codebook: Codebook) -> None:
    """Refuse a codebook marker (int32 scalar) with any value but the codebook's own."""
    got = int(marker.item())
    if got != codebook.marker_value:
        raise Exl3FormatError(
            f"{tensor}: marker is {got & 0xFFFFFFFF:#010x}, expected {codebook.marker_value & 0xFFFFFFFF:#010x} "
            f"for the {codebook.value} codebook; the file is damaged or from another format"
        )


@dataclass(frozen=True)
class Exl3Tensors:
    """One EXL3 weight: trellis int16 [in/16, out/16, 16*K], suh fp16 [in], svh fp16 [out]."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: Codebook

    @property
    def bits(self) -> float:
        return self.trellis.shape[-1] / TILE

    def slice_out(self, start: int, stop: int) -> "Exl3Tensors":
        """Columns [start, stop) of the output (column parallel); suh stays whole."""
        check_slice(start, stop, self.svh.shape[0])
        return replace(
            self, trellis=self.trellis[:, start // TILE : stop // TILE], svh=self.svh[start:stop]
        )

    def slice_in(self, start: int, stop: int) -> "Exl3Tensors":
        """Rows [start, stop) of the input (row parallel): a partial sum; svh stays whole."""
        check_slice(start, stop, self.suh.shape[0])
        return replace(self, trellis=self.trellis[start // TILE : stop // TILE], suh=self.suh[start:stop])


def check_slice(start: int, stop: int, size: int) -> None:
    """Refuse a slice that cuts a Hadamard block: such a part has no weights of its own."""
    if start % HADAMARD_BLOCK or stop % HADAMARD_BLOCK or not 0 <= start < stop <= size:
        raise Exl3FormatError(
            f"slice {start}:{stop} of {size} channels cuts a Hadamard block: both ends must be multiples of "
            f"{HADAMARD_BLOCK} inside the tensor"
        )
