"""How states are read out of caches: made-up ones with vLLM 0.33.0's layouts. test_cpu_soak.py has real ones."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import states
from states import CONV, LATENT, POOLS, RECURRENT, TAIL, Place, Unreadable, pages

BLOCKS, BLOCK = 6, 32  # blocks of the engine, tokens of one
OWN = [4, 2, 5]  # of the request
LENGTH = 2 * BLOCK + 7


def place(length=LENGTH, planned=None, blocks=OWN, **spec):
    return Place(SimpleNamespace(**{"block_size": BLOCK} | spec), blocks, BLOCKS, length, planned or length)


def of_token(position: int) -> int:
    """Where in all blocks a token lies."""
    return OWN[position // BLOCK] * BLOCK + position % BLOCK


def rows(width, seed=0):
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(seed))


# Pages


@pytest.mark.parametrize(("parts", "apart"), [(1, 1), (4, 4), (4, 9)])
def test_a_block_is_its_pages_in_order_whatever_lies_between(parts, apart):
    states_ = BLOCK // parts
    cache = torch.full(((BLOCKS - 1) * apart + parts, states_, 3), -1.0)
    for block in range(BLOCKS):
        cache[block * apart : block * apart + parts] = torch.arange(BLOCK).view(parts, -1, 1) + 1000.0 * block
    found = pages(cache, place(), BLOCK).flatten(0, 1)[:LENGTH, 0]
    assert found.tolist() == [1000 * OWN[i // BLOCK] + i % BLOCK for i in range(LENGTH)]


def test_what_does_not_fit_is_refused():
    with pytest.raises(Unreadable, match="does not hold 6 blocks of 32 states"):
        pages(torch.zeros(BLOCKS + 1, BLOCK, 3), place(), BLOCK)
    with pytest.raises(Unreadable, match=r"has the blocks \[4, 2\] of 32"):
        pages(torch.zeros(BLOCKS, BLOCK, 3), place(blocks=[4, 2]), BLOCK)
    with pytest.raises(Unreadable, match="has the blocks"):
        pages(torch.zeros(BLOCKS, BLOCK, 3), place(blocks=[4, 0, 5]), BLOCK)  # 0 is nobody's


# KDA


def kda(conv_is_wide=True, room=0):
    conv = torch.randn(BLOCKS, 3 + room, 24)
    recurrent = torch.randn(BLOCKS, 2, 8, 8)
    layer = SimpleNamespace(kv_cache=(conv if conv_is_wide else conv.mT, recurrent), conv_size=4)
    return layer, conv, recurrent


@pytest.mark.parametrize(("mode", "planned", "block"), [
    ("align", LENGTH, 5), ("align", 2 * BLOCK, 2), ("none", LENGTH, 4), ("align", 2 * BLOCK + 1, 5),
])  # fmt: skip
@pytest.mark.parametrize("conv_is_wide", [True, False])
@pytest.mark.parametrize("room", [0, 7])
def test_the_state_that_counts_is_in_the_last_steps_block(mode, planned, block, conv_is_wide, room):
    """Also where drafts were planned behind the last token, beyond the block's end."""
    layer, conv, recurrent = kda(conv_is_wide, room)
    found = states.recurrent_and_conv(layer, place(min(planned, LENGTH), planned, mamba_cache_mode=mode))
    assert found[RECURRENT].equal(recurrent[block]) and found[CONV].equal(conv[block, :3])


def test_a_request_without_a_state_is_refused():
    for blocks in ([0, 2], [0, 2, 0]):
        with pytest.raises(Unreadable, match="has no KDA state in column 2"):
            states.recurrent_and_conv(kda()[0], place(blocks=blocks, mamba_cache_mode="align"))
    with pytest.raises(Unreadable, match="in mode 'all'"):
        states.recurrent_and_conv(kda()[0], place(mamba_cache_mode="all"))


# Latents and the indexer


@pytest.mark.parametrize("width", [512, 576])
def test_latents_are_the_first_columns_of_a_row(width):
    right, cache = rows(width).bfloat16(), torch.full((BLOCKS, BLOCK, width), float("nan"), dtype=torch.bfloat16)
    for i in range(LENGTH):
        cache.view(-1, width)[of_token(i)] = right[i]
    layer = SimpleNamespace(kv_cache=cache, kv_lora_rank=512)
    assert states.latents(layer, place())[LATENT].equal(right[:, :512])


def quantised(right):
    """fp8 values and their scales, one for 128 values."""
    groups = right.unflatten(1, (-1, 128))
    scales = 2 ** (groups.abs().amax(2) / 448).log2().ceil()
    return (groups / scales.unsqueeze(2)).to(states.FP8).flatten(1), scales


@pytest.mark.parametrize("row_bytes", [528, 656])
def test_fp8_latents_are_read_with_their_scales(row_bytes):
    values, scales = quantised(rows(512))
    cache = torch.full((BLOCKS, BLOCK, row_bytes), 255, dtype=torch.uint8)  # NaN wherever nothing is written
    for i in range(LENGTH):
        row = cache.view(-1, row_bytes)[of_token(i)]
        row[:512], row[512:528] = values[i].view(torch.uint8), scales[i].view(torch.uint8)
    layer = SimpleNamespace(kv_cache=cache, kv_lora_rank=512)
    found = states.latents(layer, place())[LATENT]
    assert found.equal((values.float().unflatten(1, (4, 128)) * scales.unsqueeze(2)).flatten(1))
    layer.kv_cache = cache[:, :, :520]
    with pytest.raises(Unreadable, match="latents are rows of 520"):
        states.latents(layer, place())


@pytest.mark.parametrize("parts", [1, 2])
def test_a_page_of_pools_has_all_values_before_all_scales(parts):
    pool, count = 4, LENGTH // 4
    values, scales = quantised(rows(128)[:count])
    states_ = BLOCK // pool // parts
    cache = torch.full((BLOCKS * parts, states_, 132), 255, dtype=torch.uint8)
    flat = cache.view(BLOCKS * parts, -1)
    for i in range(count):
        page, place_ = divmod(OWN[i * pool // BLOCK] * parts * states_ + i % (BLOCK // pool), states_)
        flat[page, place_ * 128 : place_ * 128 + 128] = values[i].view(torch.uint8)
        at = states_ * 128 + place_ * 4
        flat[page, at : at + 4] = scales[i].view(torch.uint8)
    found = states.pooled_keys(SimpleNamespace(kv_cache=cache), place(tokens_per_state=pool))[POOLS]
    assert found.equal(values.float() * scales)
    with pytest.raises(Unreadable, match="known are bytes"):
        states.pooled_keys(SimpleNamespace(kv_cache=cache[:, :, :128]), place(tokens_per_state=pool))


@pytest.mark.parametrize("ring", [4, 16])
@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_the_tail_is_the_tokens_of_the_pool_that_is_not_whole(ring, length):
    """Two rings of other sizes, as with and without drafts, hold the same."""
    keys, gates = rows(8, seed=1), rows(8, seed=2)
    cache = torch.full((BLOCKS, 2, ring, 8), float("nan"))
    for i in range(LENGTH - ring, LENGTH):
        cache[4, 0, i % ring], cache[4, 1, i % ring] = keys[i], gates[i]
    found = states.tail(SimpleNamespace(kv_cache=cache, _index_kpool=4), place(length))
    if length % 4 == 0:
        assert found == {}
    else:
        assert found[TAIL].equal(torch.cat((keys, gates), 1)[length - length % 4 : length])
