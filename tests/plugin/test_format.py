"""The decoder against exllamav3's own kernels, against hashes, and against itself."""

import hashlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from vllm_exl3.format import (
    Codebook,
    Exl3FormatError,
    Exl3Tensors,
    codebook_values,
    is_legal_rate,
    pack_states,
    shape_from_headers,
    unpack_states,
)  # fmt: skip
from vllm_exl3.reference import decode_inner, decode_weight, moe_forward, transform_blocks

VECTORS = load_file(Path(__file__).parent.parent / "data" / "exl3_vectors.safetensors")
INTEGER_RATES = range(1, 9)
RATES = [(codebook, bits) for codebook in Codebook for bits in INTEGER_RATES]

CODEBOOK_HASHES = {
    Codebook.THREE_INST: "ad88de2dcff5bb05",
    Codebook.MCG: "95383563929baa9d",
    Codebook.MUL1: "bc48d02cb1c14939",
}
# A tile with 16-bit word i = (40503 * i + 12345) mod 65536: hashes of its states and of its MUL1 values.
TILE_HASHES = {
    1: ("2a096bdf9ed4", "1f53d45fc89f"), 2: ("3e992d72fbc6", "1aed401fc574"), 3: ("f73d703bd04f", "978c70dbcfba"),
    4: ("d0a98d083a9a", "fe3af5cd34a6"), 5: ("b6d1b8488f76", "88d06cc6816b"), 6: ("0813abdb1858", "b7a16dfe22cf"),
    7: ("a65192a7ba57", "94e4001ed572"), 8: ("d83a8c1c59ae", "890469f3dfc1"), 1.5: ("ec27a3d4a2d0", "94bbe836cee6"),
    2.5: ("41fab0fe0226", "d1b72645fe78"), 3.5: ("050c65d2fea7", "1cdca31a9c04"),
}  # fmt: skip


def vector(codebook, bits) -> Exl3Tensors:
    prefix = f"{codebook.value}.k{bits}."
    return Exl3Tensors(*(VECTORS[prefix + name] for name in ("trellis", "suh", "svh")), codebook)


def digest(array, length) -> str:
    return hashlib.sha256(array.numpy().tobytes()).hexdigest()[:length]


@pytest.mark.parametrize("codebook", Codebook)
def test_codebook_values_are_exact(codebook):
    assert digest(codebook_values(codebook), 16) == CODEBOOK_HASHES[codebook]


@pytest.mark.parametrize(("codebook", "bits"), RATES)
def test_inner_weight_is_bit_equal_to_exllamav3(codebook, bits):
    assert torch.equal(decode_inner(vector(codebook, bits)), VECTORS[f"{codebook.value}.k{bits}.inner"])


@pytest.mark.parametrize(("codebook", "bits"), RATES)
def test_full_weight_agrees_with_exllamav3(codebook, bits):
    # Their weight is rounded to fp16 between the transforms.
    want = VECTORS[f"{codebook.value}.k{bits}.weight"].double()
    got = decode_weight(vector(codebook, bits), torch.float64)
    assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.parametrize("bits", TILE_HASHES)
def test_states_and_tile_of_a_counted_pattern(bits):
    words = (40503 * torch.arange(round(16 * bits)) + 12345) % 65536
    trellis = torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)
    states = unpack_states(trellis)
    assert digest(states.to(torch.uint16), 12) == TILE_HASHES[bits][0]
    tile = decode_inner(Exl3Tensors(trellis.view(1, 1, -1), None, None, Codebook.MUL1))
    assert digest(tile.contiguous(), 12) == TILE_HASHES[bits][1]


@pytest.mark.parametrize("codebook", Codebook)
def test_packing_equals_the_encoder_of_exllamav3(codebook):
    for bits in INTEGER_RATES:
        states = VECTORS[f"{codebook.value}.k{bits}.enc_index"].to(torch.int64) & 0xFFFF
        packed = VECTORS[f"{codebook.value}.k{bits}.enc_packed"]
        assert torch.equal(unpack_states(packed)[0].long(), states)
        assert torch.equal(pack_states(states, bits), packed[0])


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from(list(TILE_HASHES)), seed=st.integers(0, 2**31))
def test_pack_is_the_inverse_of_unpack(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    trellis = torch.randint(-(2**15), 2**15, (2, round(16 * bits)), generator=generator).to(torch.int16)
    assert torch.equal(pack_states(unpack_states(trellis), bits), trellis)


def test_pack_refuses_an_open_ring():
    states = unpack_states(vector(Codebook.MCG, 4).trellis[0, 0]).clone()
    states[7] ^= 0x100
    with pytest.raises(Exl3FormatError, match="around the ring"):
        pack_states(states, 4)


def test_hadamard_equals_exllamav3():
    assert torch.equal(transform_blocks(VECTORS["had.input"].float()).half(), VECTORS["had.output"])


# Slices


@pytest.mark.parametrize("bits", [3, 4])
def test_slices_decode_to_slices_of_the_weight(bits):
    tensors = vector(Codebook.MCG, bits)
    whole = decode_weight(tensors)
    assert torch.equal(decode_weight(tensors.slice_out(128, 256)), whole[:, 128:])
    wide = Exl3Tensors(
        torch.cat([tensors.trellis] * 2), torch.cat([tensors.suh, -tensors.suh]), tensors.svh, tensors.codebook
    )
    assert torch.allclose(decode_weight(wide.slice_in(128, 256)), decode_weight(wide)[128:], atol=1e-6)


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 128), (16, 144), (0, 384), (128, 128)])
def test_a_cut_hadamard_block_is_refused(start, stop):
    with pytest.raises(Exl3FormatError, match="cuts a Hadamard block"):
        vector(Codebook.MCG, 4).slice_out(start, stop)


# Planted bugs: the bars above must reject each


def flip_ring_bit(tensors):
    trellis = tensors.trellis.clone()
    trellis[3, 5, 7] ^= 1
    return decode_weight(Exl3Tensors(trellis, tensors.suh, tensors.svh, tensors.codebook), torch.float64)


def swap_scales(tensors):
    square = tensors.slice_out(0, 128)
    return decode_weight(Exl3Tensors(square.trellis, square.svh, square.suh, square.codebook), torch.float64)


def skip_a_hadamard_block(tensors):
    inner = decode_inner(tensors).double()
    left = transform_blocks(inner.T).T * tensors.suh.double()[:, None]
    right = torch.cat([left[:, :128], transform_blocks(left[:, 128:])], dim=1)
    return right * tensors.svh.double()


@pytest.mark.parametrize("bug", [flip_ring_bit, swap_scales, skip_a_hadamard_block])
def test_the_comparison_rejects_a_planted_bug(bug):
    tensors = vector(Codebook.MCG, 4)
    got = bug(tensors)
    want = VECTORS["mcg.k4.weight"].double()[:, : got.shape[1]]
    assert (got - want).norm() > 1e-3 * want.norm()


# Headers


def headers(**changed):
    tensors = {
        "trellis": ("I16", (8, 16, 64)), "suh": ("F16", (128,)), "svh": ("F16", (256,)), "mcg": ("I32", ()),
    } | changed  # fmt: skip
    return {name: value for name, value in tensors.items() if value is not None}


def test_shape_is_read_from_the_headers():
    shape = shape_from_headers("m", headers())
    assert (shape.in_features, shape.out_features, shape.bits, shape.codebook) == (128, 256, 4, Codebook.MCG)
    assert shape_from_headers("m", headers(mcg=None)).codebook is Codebook.THREE_INST


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"trellis": ("I16", (16, 8, 64))}, r"m.suh: is F16 \[128\], expected F16 \[256\]"),
        ({"trellis": ("I32", (8, 16, 64))}, "m.trellis: is I32"),
        ({"trellis": ("I16", (8, 16, 60))}, "last dimension 60 means 3.75 bits"),
        ({"trellis": ("I16", (8, 16, 24))}, "1.5 bits, which mcg does not have"),
        ({"suh": None}, "m.suh: missing"),
        ({"svh": ("BF16", (256,))}, "m.svh: is BF16"),
        ({"mul1": ("I32", ())}, "both codebook markers"),
        ({"mcg": ("I64", ())}, "m.mcg: is I64"),
        ({"su": ("I16", (8,))}, "m.su: sign-only"),
        ({"trellis": ("I16", (9, 16, 64)), "suh": ("F16", (144,))}, "no multiple of 128"),
        ({"bias": ("F16", (256,))}, "m.bias"),
    ],
)
def test_wrong_headers_are_refused_by_name(changed, said):
    with pytest.raises(Exl3FormatError, match=said):
        shape_from_headers("m", headers(**changed))


def test_half_rates_belong_to_mul1():
    assert is_legal_rate(2.5, Codebook.MUL1) and not is_legal_rate(2.5, Codebook.MCG)
    assert not is_legal_rate(9, Codebook.MUL1) and not is_legal_rate(0, Codebook.MCG)


# MoE


def test_moe_places_experts_and_leaves_others_out():
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randn(4, 8, 12, generator=generator)
    w2 = torch.randn(4, 6, 8, generator=generator)
    x = torch.randn(5, 8, generator=generator)
    ids = torch.tensor([[0, 3], [1, 2], [3, 3], [2, 0], [1, 0]])
    weights = torch.rand(5, 2, generator=generator)
    whole = moe_forward(x, w13, w2, weights, ids, 1.0)

    expected = torch.zeros(5, 8)
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row.tolist()):
            gate, up = (x[token] @ w13[expert]).chunk(2)
            gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
            expected[token] += weights[token, slot] * ((gate * gate.sigmoid() * up) @ w2[expert])
    assert torch.allclose(whole, expected, atol=1e-5)

    halves = [
        moe_forward(x, w13[a:b], w2[a:b], weights, ids, 1.0, torch.tensor(placed))
        for a, b, placed in ((0, 2, [0, 1, -1, -1]), (2, 4, [-1, -1, 0, 1]))
    ]
    assert torch.allclose(sum(halves), whole, atol=1e-5)
