"""The three geometries byte by byte: what each writes, maps and attends to, against float64 and against each other."""

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from mla_rows import (
    CHUNK,
    PAYLOAD,
    POOL,
    ROPE,
    ROPED,
    Kernel,
    Pool,
    causal_candidates,
    global_rows,
    oracle,
    pooled_candidates,
    quantise,
    quantise_query,
    relative_error,
)  # fmt: skip
from vllm_exl3.nope_mla import geometry, rows
from vllm_exl3.nope_mla.geometry import COMPACT, NATIVE, PADDED

SCALE = 256**-0.5
TOP_K, WIDE = 2048, 2176
ARITHMETIC, STORED = 1e-3, 4e-3  # relative L2; the latter with bfloat16's own rounding, twice


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Sequence:
    """One sequence in recycled blocks, and queries at its last tokens."""

    length: int
    heads: int = 8
    tokens: int = 2
    gap: int = 0  # rows of another layer behind each block
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        blocks = -(-self.length // CHUNK)
        self.table = torch.randperm(blocks + 3, generator=self.generator)[:blocks]
        self.latent = (torch.randn(self.length, 512, generator=self.generator) * 2).bfloat16()
        self.query = (torch.randn(self.tokens, self.heads, 512, generator=self.generator) * 2).bfloat16()
        self.logits = torch.randn(self.tokens, max(self.length // POOL, 1), generator=self.generator)
        positions = torch.arange(self.length)
        self.slots = self.table[positions // CHUNK] * CHUNK + positions % CHUNK

    @property
    def lengths(self) -> list[int]:
        """Of what each query sees."""
        return [self.length - self.tokens + 1 + t for t in range(self.tokens)]

    def top_pools(self) -> torch.Tensor:
        """As vLLM leaves them: the best 512 of each query in any order, -1 behind fewer."""
        pools = torch.full((self.tokens, TOP_K // POOL), -1, dtype=torch.int32)
        for t, length in enumerate(self.lengths):
            known = length // POOL
            best = self.logits[t, :known].topk(min(known, TOP_K // POOL)).indices
            pools[t, : len(best)] = best[torch.randperm(len(best), generator=self.generator)].int()
        return pools

    def candidates(self, width: int = WIDE, pools: torch.Tensor | None = None) -> torch.Tensor:
        """Positions [tokens, width] as the indexer hands them over."""
        if self.length <= TOP_K:
            return torch.stack([causal_candidates(length - 1, width) for length in self.lengths])
        pools = self.top_pools() if pools is None else pools
        return torch.stack([pooled_candidates(p, n, width) for p, n in zip(pools, self.lengths, strict=True)])

    def write(self, form, *, rope: torch.Tensor | None = None) -> Pool:
        pool = Pool(len(self.table) + 3, form.row_bytes, gap=self.gap, seed=self.seed)
        pool.write(self.latent, self.slots, rope)
        return pool

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.length, ROPE, dtype=torch.bfloat16)

    def attend(self, form, pool: Pool, positions: torch.Tensor, heads: int | None = None, **bug):
        found = global_rows(positions, self.table, pool)
        query = rows.widen_query(self.query, heads or self.heads, form.columns)
        stored, exact = Kernel(rope=form.rope > 0, **bug).attend(query, pool, found, SCALE)
        return stored[:, : self.heads], exact[:, : self.heads]

    def oracle(self, pool: Pool, positions: torch.Tensor) -> torch.Tensor:
        return oracle(self.query, pool, global_rows(positions, self.table, pool), SCALE)


def written(sequence: Sequence) -> dict:
    """A pool of each geometry. Native rows keep the garbage behind their payload: their kernel must not see it."""
    return {
        NATIVE: sequence.write(NATIVE),
        PADDED: sequence.write(PADDED, rope=sequence.zeros()),
        COMPACT: sequence.write(COMPACT),
    }


def check(sequence: Sequence, form, pool: Pool, positions, want=None, **how) -> torch.Tensor:
    want = sequence.oracle(pool, positions) if want is None else want
    stored, exact = sequence.attend(form, pool, positions, **how)
    assert relative_error(exact, want) <= ARITHMETIC
    assert relative_error(stored.float(), want) <= STORED
    return stored


# Writing


def test_bytes_of_a_row_are_those_of_the_plan():
    assert (NATIVE.row_bytes, PADDED.row_bytes, COMPACT.row_bytes) == (656, 656, 528)
    assert (NATIVE.columns, PADDED.columns, COMPACT.columns) == (512, 576, 512)
    assert (geometry.PAYLOAD_BYTES, geometry.ROPED_BYTES) == (PAYLOAD, ROPED)


@pytest.mark.parametrize("form", [NATIVE, PADDED, COMPACT], ids=lambda form: form.name)
def test_a_written_row_decodes_to_its_latent(form):
    sequence = Sequence(200, gap=2)
    pool = written(sequence)[form]
    row = pool.view[sequence.slots // CHUNK, sequence.slots % CHUNK]
    scales = row[:, 512:528].contiguous().view(torch.float32)
    values = row[:, :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (4, 128)) * scales[..., None]
    largest = sequence.latent.float().unflatten(1, (4, 128)).abs().amax(2, keepdim=True)
    assert ((values - sequence.latent.float().unflatten(1, (4, 128))).abs() <= largest * 2**-4).all()
    assert form is not PADDED or (row[:, PAYLOAD:] == 0).all()


def test_zero_latents_have_a_scale_that_divides():
    data, scale = quantise(torch.zeros(1, 512).bfloat16())
    assert (data == 0).all() and (scale == 2.0**-13).all()


@pytest.mark.parametrize("form", [NATIVE, PADDED, COMPACT], ids=lambda form: form.name)
def test_a_slot_below_zero_and_other_layers_rows_are_left_alone(form):
    sequence = Sequence(100, gap=5)
    pool = Pool(5, form.row_bytes, gap=5, seed=9)
    before = pool.bytes.clone()
    slots = sequence.slots % (5 * CHUNK)
    slots[::3] = -1
    pool.write(sequence.latent, slots, sequence.zeros() if form is PADDED else None)
    changed = (pool.bytes != before).view(5, CHUNK + 5, form.row_bytes)
    assert not changed[:, CHUNK:].any()
    rows_changed = changed.any(2)[:, :CHUNK].flatten().nonzero().flatten()
    assert set(rows_changed.tolist()) == set(slots[slots >= 0].tolist())


# Attending


@pytest.mark.parametrize("length", [1, 3, 64, 2047, 2048, 2049, 2051, 2052, 5003])
def test_all_geometries_give_the_same_bits_and_the_oracles_values(length):
    sequence = Sequence(length, tokens=min(length, 3), gap=length % 4, seed=length)
    positions, pools = sequence.candidates(), written(sequence)
    got = {form: check(sequence, form, pool, positions) for form, pool in pools.items()}
    assert torch.equal(got[NATIVE], got[PADDED]) and torch.equal(got[NATIVE], got[COMPACT])


@pytest.mark.parametrize("chunks", [1, 7, 34])
def test_bits_are_equal_however_the_work_is_split(chunks):
    sequence = Sequence(3001, tokens=1)
    positions, pools = sequence.candidates(), written(sequence)
    got = []
    for form, pool in pools.items():
        query = rows.widen_query(sequence.query, 8, form.columns)
        found = global_rows(positions, sequence.table, pool)
        got.append(Kernel(rope=form.rope > 0).attend(query, pool, found, SCALE, chunks)[0])
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_22_heads_are_padded_to_32_and_cut():
    sequence = Sequence(2500, heads=22, tokens=1)
    positions, pools = sequence.candidates(), written(sequence)
    want = sequence.attend(NATIVE, pools[NATIVE], positions)[0]
    for form, pool in pools.items():
        assert torch.equal(sequence.attend(form, pool, positions, heads=32)[0], want)


def test_a_query_that_needs_nothing_is_not_copied():
    query = torch.randn(3, 16, 512)
    assert rows.widen_query(query, 16, 512) is query
    wide = rows.widen_query(query, 32, 576)
    assert torch.equal(wide[:, :16, :512], query) and not wide[:, 16:].any() and not wide[..., 512:].any()


@pytest.mark.parametrize("form", [NATIVE, PADDED, COMPACT], ids=lambda form: form.name)
def test_rows_without_candidates_give_zeros(form):
    sequence = Sequence(300)
    positions = sequence.candidates()
    positions[0] = -1
    stored, _ = sequence.attend(form, written(sequence)[form], positions)
    assert (stored[0] == 0).all() and stored[1].abs().max() > 0


def test_zero_empty_makes_zeros_of_whatever_a_kernel_left():
    candidates = torch.tensor([[-1, -1], [-1, 5], [0, -1]])
    result = torch.full((3, 2, 4), float("nan"))
    rows.zero_empty(result, candidates)
    assert (result[0] == 0).all() and result[1:].isnan().all()


# 2,048 candidates


def positions_of(row: torch.Tensor) -> set[int]:
    found = row[row >= 0].tolist()
    assert len(set(found)) == len(found)
    return set(found)


def narrow(sequence: Sequence) -> torch.Tensor:
    """The indexer's row for a kernel of 2,048 candidates."""
    pools = sequence.top_pools()
    if sequence.length > TOP_K:
        rows.put_lowest_last(sequence.logits, pools)
    return rows.fit_candidates(sequence.candidates(pools=pools), TOP_K, POOL)


def expected_positions(sequence: Sequence, t: int) -> set[int]:
    length = sequence.lengths[t]
    if sequence.length <= TOP_K:
        return set(range(length))
    tail = set(range(length // POOL * POOL, length))
    known = length // POOL
    keep = min(known, TOP_K // POOL - bool(tail))
    best = sequence.logits[t, :known].topk(keep).indices.tolist()
    return tail | {pool * POOL + i for pool in best for i in range(POOL)}


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 2050, 2051, 2052, 2055, 4096, 4099, 9001])
def test_the_lowest_ranked_pool_gives_way_and_the_tail_stays(length):
    sequence = Sequence(length, tokens=min(length, 4), seed=length)
    row = narrow(sequence)
    assert row.shape[1] == TOP_K
    for t in range(sequence.tokens):
        assert positions_of(row[t]) == expected_positions(sequence, t)


@given(length=st.integers(2049, 9000), seed=st.integers(0, 2**31), heads=st.sampled_from([1, 5, 8]))
@settings(max_examples=10, deadline=None)
def test_any_length_attends_to_the_same_tokens_in_every_geometry(length, seed, heads):
    sequence = Sequence(length, heads=heads, tokens=1, gap=seed % 5, seed=seed)
    pools = written(sequence)
    for positions in (sequence.candidates(), narrow(sequence)):
        got = [check(sequence, form, pool, positions) for form, pool in pools.items()]
        assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@given(length=st.integers(1, 2048), seed=st.integers(0, 2**31), width=st.sampled_from([TOP_K, WIDE]))
@settings(max_examples=12, deadline=None)
def test_a_short_sequence_attends_to_all_of_itself(length, seed, width):
    sequence = Sequence(length, heads=4, tokens=1, seed=seed)
    row = sequence.candidates() if width == WIDE else narrow(sequence)
    assert positions_of(row[0]) == set(range(length))
    pools = written(sequence)
    got = [check(sequence, form, pool, row) for form, pool in pools.items()]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@given(
    known=st.integers(1, 3000), k=st.integers(1, 600), rows_=st.integers(1, 4), seed=st.integers(0, 2**31),
    holes=st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_put_lowest_last_keeps_the_pools_and_finds_the_lowest(known, k, rows_, seed, holes):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows_, known, generator=generator)
    pools = torch.full((rows_, k), -1, dtype=torch.int32)
    for row in pools:
        chosen = torch.randperm(known, generator=generator)[: max(0, min(known, k) - holes)]
        row[torch.randperm(k, generator=generator)[: len(chosen)]] = chosen.int()
    before = pools.clone()
    rows.put_lowest_last(logits, pools)
    assert torch.equal(pools.sort(1).values, before.sort(1).values)
    for row, scores in zip(pools, logits, strict=True):
        last = float("-inf") if row[-1] < 0 else scores[row[-1]]
        assert all(last <= scores[pool] for pool in row[row >= 0])


def test_put_lowest_last_reads_nothing_outside_for_entries_that_were_never_written():
    pools = torch.tensor([[2**31 - 1, 1, 0]], dtype=torch.int32)
    rows.put_lowest_last(torch.tensor([[3.0, 2.0]]), pools)
    assert sorted(pools[0].tolist()) == [0, 1, 2**31 - 1]
    rows.put_lowest_last(torch.empty(1, 0), pools)


# Planted bugs: each must be seen


def test_rope_bytes_that_were_not_zeroed_are_seen():
    sequence = Sequence(700)
    pool = sequence.write(PADDED)  # recycled blocks keep what another layer left behind the payload
    positions = sequence.candidates()
    assert relative_error(sequence.attend(PADDED, pool, positions)[1], sequence.oracle(pool, positions)) > 0.1


def test_a_query_that_was_not_padded_with_zeros_is_seen():
    sequence = Sequence(700)
    rope = torch.randn(sequence.length, ROPE, generator=sequence.generator).bfloat16()
    pool, positions = sequence.write(PADDED, rope=rope), sequence.candidates()
    query = torch.cat([sequence.query, torch.ones(2, 8, ROPE).bfloat16()], dim=2)
    _, exact = Kernel(rope=True).attend(query, pool, global_rows(positions, sequence.table, pool), SCALE)
    assert relative_error(exact, sequence.oracle(pool, positions)) > 0.01


@pytest.mark.parametrize("bug", [{"scale_order": (1, 0, 2, 3)}, {"stride": 576}], ids=["scale group", "row stride 576"])
@pytest.mark.parametrize("form", [NATIVE, PADDED, COMPACT], ids=lambda form: form.name)
def test_a_wrong_scale_group_or_stride_is_seen(form, bug):
    sequence = Sequence(2500)
    pool, positions = written(sequence)[form], sequence.candidates()
    want = sequence.oracle(pool, positions)
    assert relative_error(sequence.attend(form, pool, positions, **bug)[1], want) > 0.01


def test_a_dropped_tail_is_seen():
    """What `[:2048]` does: the newest tokens are gone. Their keys are made to matter, as they do in a real model."""
    sequence = Sequence(4099, tokens=1)
    sequence.latent[4096:] = sequence.query[0, 0] * 0.5
    pools = sequence.top_pools()
    rows.put_lowest_last(sequence.logits, pools)
    pool, wide = sequence.write(NATIVE), sequence.candidates(pools=pools)
    kept, dropped = rows.fit_candidates(wide, TOP_K, POOL), wide[:, :TOP_K]
    want = sequence.oracle(pool, kept)
    assert relative_error(sequence.attend(NATIVE, pool, kept)[1], want) <= ARITHMETIC
    assert relative_error(sequence.attend(NATIVE, pool, dropped)[1], want) > 0.05
    assert {4096, 4097, 4098} <= positions_of(kept[0]) and not {4096, 4097, 4098} & positions_of(dropped[0])


def test_another_pool_than_the_lowest_is_seen():
    sequence = Sequence(4099, tokens=1)
    unranked = rows.fit_candidates(sequence.candidates(), TOP_K, POOL)
    assert positions_of(unranked[0]) != expected_positions(sequence, 0)


def test_one_token_more_or_less_is_seen():
    sequence = Sequence(64, tokens=1)
    pool, positions = sequence.write(NATIVE), sequence.candidates()
    fewer = positions.clone()
    fewer[0, 20] = -1
    assert relative_error(sequence.attend(NATIVE, pool, fewer)[1], sequence.oracle(pool, positions)) > ARITHMETIC


def test_quantised_queries_are_within_a_step_of_the_query():
    query = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    data, scale = quantise_query(query)
    back = data.unflatten(1, (4, 128)) * scale[..., None]
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert ((back - query.float().unflatten(1, (4, 128))).abs() <= 2**-4 * query.float().abs().max()).all()
