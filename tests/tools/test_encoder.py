"""The EXL3 encoder against exllamav3's own results and against the format's rules."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from vllm_exl3.format import Codebook, Exl3FormatError, codebook_values, pack_states, unpack_states
from vllm_exl3.reference import decode_weight, transform_blocks

from tools.local_model import encoder

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "data" / "exl3_vectors.safetensors"
TILES = 4


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8])
def test_nearest_states_are_as_near_as_exllamav3s(codebook, bits):
    with safe_open(VECTORS, "pt") as vectors:
        key = f"{codebook.value}.k{bits}."
        source = vectors.get_tensor(key + "enc_input")[:TILES]
        theirs = vectors.get_tensor(key + "enc_output")[:TILES]
    states = encoder.nearest_states(source, bits, codebook)
    ours = codebook_values(codebook).float()[states.long()]
    # Both find the best path through a node that the first pass proposes; theirs adds costs in fp16. At
    # low rates the two may propose different nodes, which moves a tile's error a little either way.
    tolerance = 1.01 if bits < 3 else 1.001
    assert (ours - source).square().mean() <= (theirs - source).square().mean() * tolerance


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_states_form_a_closed_ring(bits):
    source = torch.randn(TILES, 256, generator=torch.Generator().manual_seed(bits))
    states = encoder.nearest_states(source, bits, Codebook.MCG)
    assert torch.equal(unpack_states(pack_states(states, bits)), states)


def test_an_open_ring_is_refused():
    states = encoder.nearest_states(torch.randn(1, 256), 4, Codebook.MCG)
    states[0, 0] ^= 1 << 10
    with pytest.raises(Exl3FormatError, match="around the ring"):
        pack_states(states, 4)


@pytest.mark.parametrize("bits", [0, 9, 2.5])
def test_rates_that_are_not_produced_are_refused(bits):
    with pytest.raises(Exl3FormatError, match="whole bits"):
        encoder.nearest_states(torch.zeros(1, 256), bits, Codebook.MUL1)


def test_regularise_keeps_the_weight_and_makes_it_gaussian():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 128, generator=generator) * torch.rand(256, 1, generator=generator)
    weight[7, 9] = 30.0
    signs = [encoder.random_sign(n, generator) for n in weight.shape]
    regular = encoder.regularise(weight, *signs)
    back = transform_blocks(transform_blocks(regular.inner.T).T * regular.suh.float()[:, None]) * regular.svh.float()
    # Rows first, then columns: the same order in which decode_weight applies the transforms.
    assert (back - weight).norm() / weight.norm() < 1e-5
    assert abs(regular.inner.std() - encoder.TARGET_STD) < 0.05
    assert regular.inner.abs().max() < 7


def test_feedback_lowers_the_error_that_the_hessian_measures():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(128, 128, generator=generator) * 0.05
    mixing = torch.randn(128, 128, generator=generator) * torch.linspace(0.05, 2, 128)[:, None]
    inputs = torch.randn(2000, 128, generator=generator) @ mixing
    hessian = inputs.T @ inputs / len(inputs)

    # MUL1's values have a standard deviation of 1, so its gain is well below that of the others.
    gain = encoder.best_gain(8, Codebook.MUL1, tiles=4)
    assert gain < 0.9

    def error(hessians):
        seeded = torch.Generator().manual_seed(2)
        stored = encoder.quantise(weight[None], 8, Codebook.MUL1, seeded, hessians, gain=gain)[0]
        return encoder.relative_error(stored, weight, hessian), stored

    alone, stored = error(None)
    with_feedback, _ = error(hessian[None])
    assert alone < 6e-5  # the format's table says 4e-5 for MUL1 at 8 bits
    assert with_feedback < 0.7 * alone
    assert (decode_weight(stored) - weight).norm() / weight.norm() < 0.01
