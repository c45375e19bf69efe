"""Few rows without a GPU: tables, limits and refusals, and the calls against a stand-in for exllamav3's extension.

The stand-in does what 1.6.5's functions were seen to do, their silence included.
"""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from packed_experts import inputs, make_experts, oracle, route_uniform, weights_of
from vllm_exl3 import few_rows
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.format import Codebook, Exl3Tensors
from vllm_exl3.reference import decode_weight, swiglu

HIDDEN, WIDTH, EXPERTS, TOP_K, CAP = 128, 128, 12, 8, 40


def addresses(packed, expert):
    """Of gate, up and down: trellis, suh and svh each."""
    w13 = packed.w13_trellis, packed.w13_suh, packed.w13_svh
    w2 = packed.w2_trellis, packed.w2_suh, packed.w2_svh
    parts = [stack[expert, side] for side in (0, 1) for stack in w13] + [stack[expert] for stack in w2]
    return tuple(part.data_ptr() for part in parts)


class Extension:
    """exllamav3_ext as this plugin sees it. `packed` are the experts whose addresses it may be given."""

    __name__ = "exllamav3_ext"
    INSTANCES = "moe:4:1 coop:4:1 gemm:4:1"

    def __init__(self, packed=None, dense=()) -> None:
        self.packed, self.dense, self.calls = packed, {t.trellis.data_ptr(): t for t in dense}, []
        self.weights = [weights_of(packed, expert) for expert in range(packed.count)] if packed else []
        self.addresses = {addresses(packed, expert): expert for expert in range(len(self.weights))}
        # A plain function has no signature in its docstring, as a bound one has.
        self.exl3_moe = lambda *args: self._moe(*args)
        self.exl3_moe.__doc__ = " ".join(f"arg{i}: object" for i in range(35))

    def exl3_moe_max_concurrency(self, device):
        return 2

    def g_get_num_sms(self, device):
        return 132

    def _expert(self, tables, place):
        """Which expert the nine addresses at `place` are; they must belong together."""
        return self.addresses[tuple(int(table[place]) for table in tables)]

    def _rows(self, x, tables, place, limit):
        gate, up, down = self.weights[self._expert(tables, place)]
        return swiglu(x.double() @ gate, x.double() @ up, limit or None) @ down

    def _moe(self, x, out, count, token, weight, *rest):
        self.calls.append("moe")
        states, (act, *bits), tables, flags = rest[:4], rest[4:8], rest[8:17], rest[17:23]
        limit, active, scratch, base, low, high, tile = rest[23:]
        assert (act, bits, list(flags), tile) == (0, [4, 4, 4], [True, False] * 3, 16)
        assert count.shape == (self.packed.count + 1,) and active >= int((count[:-1] > 0).sum())
        start = 0
        for expert, rows in enumerate(count[:-1].tolist()):
            segment = slice(start, start + rows)
            start += rows
            if rows == 0 or rows > states[0].shape[1] or not low <= rows <= high:
                continue  # in silence
            result = self._rows(x[token[segment]], tables, expert, limit) * weight[segment, None].double()
            first = int(base[expert])
            assert scratch[first : first + rows].isnan().all(), "two experts share rows of the scratch"
            scratch[first : first + rows] = result.float()

    def exl3_moe_gather(self, out, scratch, expert_of_slot, place, start, base, kind, weight):
        tokens = out.shape[0]
        for slot, expert in enumerate(expert_of_slot.tolist()):
            if 0 <= expert < len(kind) and kind[expert]:
                out[slot * tokens // len(place)] += scratch[base[expert] + place[slot] - start[expert]]

    def exl3_moe_coop(self, x, chosen, weights, low, high, hidden, *rest):
        self.calls.append("coop")
        tables, (act, limit, gated), out = rest[:9], rest[17:20], rest[27]
        assert (low, high, hidden, act, gated) == (0, self.packed.count, x.shape[1], 0, True)
        assert chosen.dtype == torch.int64 and weights.dtype == torch.float16 and chosen.numel() <= 256
        out.zero_()
        for token, row in enumerate(chosen.tolist()):
            for place, expert in enumerate(row):
                if low <= expert < high:
                    result = self._rows(x[token], tables, expert, limit)
                    out[token] += (result * weights[token, place].double()).float()

    def exl3_gemm_shape_compat(self, shape, rows, in_features, out_features, bits, half_rate):
        return rows > {5: 16, 6: 24, 7: 32}[shape] and in_features % 32 == 0

    def _product(self, rows, trellis, out):
        out.copy_(rows.double() @ decode_weight(self.dense[trellis.data_ptr()], torch.float64))

    def exl3_gemv(self, rows, trellis, out, suh, rotated, svh, mcg, mul1):
        self.calls.append("gemv")
        self._product(rows, trellis, out)

    def exl3_gemm(self, rows, trellis, out, suh, rotated, svh, shape, mcg, mul1, multiprocessors):
        assert shape > 0 or multiprocessors > 0, "exl3_gemm would time kernels"
        self.calls.append(("gemm", shape))
        self._product(rows, trellis, out)
        return shape or 3

    def reconstruct_had_slice(self, weight, trellis, suh, svh, bits, mcg, mul1, first):
        tensors = self.dense[trellis.data_ptr()]
        assert svh.data_ptr() == tensors.svh[first:].data_ptr()
        weight.copy_(decode_weight(tensors)[:, first : first + weight.shape[1]])

    def hgemm(self, a, b, c):
        self.calls.append(("hgemm", b.shape[1]))
        c.copy_(a.double() @ b.double())


@pytest.fixture(autouse=True)
def fresh():
    for function in (few_rows.extension, few_rows.shared_scratch, few_rows.dense_scratch):
        function.cache_clear()


@pytest.fixture(scope="module")
def packed():
    return make_experts(EXPERTS, HIDDEN, WIDTH)


@pytest.fixture(scope="module")
def module(packed):
    return Extension(packed)


@pytest.fixture
def experts(packed, module, monkeypatch):
    module.calls.clear()
    monkeypatch.setitem(sys.modules, "exllamav3_ext", module)
    return few_rows.FusedExperts(packed, limit=10.0, top_k=TOP_K, cap=CAP, partition_tokens=200)


def call(method, experts, x, routing):
    """The method's result on poisoned memory."""
    out = torch.full(x.shape, float("nan"))
    experts.scratch.rows.fill_(float("nan"))
    method(x.half(), routing.ids, routing.weights, out)
    return out


def close(got, want):
    torch.testing.assert_close(got.double(), want, atol=2e-3 * want.std().item(), rtol=2e-3)


def routed(tokens, seed=0):
    """A routing with slots of other ranks and ids that nobody has."""
    routing = route_uniform(tokens, TOP_K, EXPERTS, seed=seed)
    routing.ids[torch.rand(routing.ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = -1
    routing.ids[0, 0], routing.ids[-1, 1] = EXPERTS, 2**31 - 1
    return routing


# Tables


@pytest.mark.parametrize("tokens, cap", [(1, 1), (7, 2), (33, 12), (33, 40), (200, 90)])
def test_tables_place_every_slot_once(tokens, cap):
    routing = routed(tokens)
    t = few_rows.routing_tables(routing.ids, routing.weights, EXPERTS, cap, torch.arange(5000))
    flat = routing.ids.flatten()
    counts = [int((flat == expert).sum()) for expert in range(EXPERTS)]
    assert t.count[:-1].tolist() == counts and int(t.count.sum()) == flat.numel()
    assert sorted(t.place.tolist()) == list(range(flat.numel()))
    assert t.fused.tolist() == [int(count <= cap) for count in counts]
    for slot, expert in enumerate(flat.tolist()):
        local = 0 <= expert < EXPERTS
        assert t.expert_of_slot[slot] == (expert if local else EXPERTS)
        place = t.place[slot]
        assert t.token[place] == slot // TOP_K and t.weight[place] == routing.weights.flatten()[slot].half()
        if local:
            assert t.start[expert] <= place < t.start[expert] + counts[expert]


@pytest.mark.parametrize("cap", [1, 12, 40])
def test_rows_of_the_fused_kernel_fit_its_scratch(cap):
    for tokens in (1, 33, 200):
        routing = routed(tokens)
        t = few_rows.routing_tables(routing.ids, routing.weights, EXPERTS, cap, torch.arange(5000))
        used = [
            int(t.scratch_row[expert]) + row
            for expert in range(EXPERTS)
            if t.fused[expert]
            for row in range(int(t.count[expert]))
        ]
        assert used == list(range(len(used)))
        assert len(used) <= few_rows.scratch_rows(tokens, TOP_K, EXPERTS, cap)


def test_rows_of_an_expert_keep_the_tokens_order():
    routing = routed(200)
    t = few_rows.routing_tables(routing.ids, routing.weights, EXPERTS, CAP, torch.arange(5000))
    for expert in range(EXPERTS):
        rows = t.token[t.start[expert] : t.start[expert] + t.count[expert]].tolist()
        assert rows == sorted(rows)


def test_repeats_are_merged_into_their_first_place():
    ids = torch.tensor([[3, 1, 3, 3], [-1, -1, 2, -1], [0, 1, 2, 3]])
    weights = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 5.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    ids, weights = few_rows.merge_repeats(ids, weights)
    assert ids.tolist() == [[3, 1, -1, -1], [-1, -1, 2, -1], [0, 1, 2, 3]]
    assert weights[0, :2].tolist() == [13.0, 2.0] and weights[1, 2] == 5 and weights[2].tolist() == [1, 2, 3, 4]


# Experts


@pytest.mark.parametrize("tokens, kernel", [(1, "coop"), (2, "coop"), (32, "coop"), (33, "moe"), (CAP, "moe")])
def test_run_is_the_whole_sum(experts, packed, tokens, kernel):
    routing, x = routed(tokens), inputs(tokens, HIDDEN, torch.float16)
    close(call(experts.run, experts, x, routing), oracle(x, routing, packed))
    assert experts.ext.calls == [kernel]


@pytest.mark.parametrize("tokens", [32, CAP])
def test_no_expert_is_left_out_when_all_tokens_choose_the_same(experts, packed, tokens):
    routing, x = route_uniform(tokens, TOP_K, TOP_K), inputs(tokens, HIDDEN, torch.float16)
    close(call(experts.run, experts, x, routing), oracle(x, routing, packed))


@pytest.mark.parametrize("tokens", [32, CAP])
def test_no_expert_is_left_out_when_padding_rows_name_it_often(experts, packed, tokens):
    """Eight slots of every padding row on expert 3: 8 * CAP rows, far above what the kernel's scratch holds."""
    routing, x = routed(tokens), inputs(tokens, HIDDEN, torch.float16)
    routing.ids[3:] = 3
    close(call(experts.run, experts, x, routing), oracle(x, routing, packed))


@pytest.mark.parametrize("cap_edge", [False, True])
def test_partition_and_grouped_kernel_are_disjoint_and_complete(experts, packed, cap_edge):
    routing, x = routed(200), inputs(200, HIDDEN, torch.float16)
    flat = routing.ids.view(-1)
    for expert, rows in ((2, CAP), (5, CAP + 1), (7, 1), (8, 0)) if cap_edge else ():
        places = (flat == expert).nonzero().flatten()
        flat[places[rows:]] = -1
    addend = call(experts.run_partition, experts, x, routing)
    grouped = oracle(x, routing, packed, min_rows=CAP + 1)
    whole = oracle(x, routing, packed)
    assert not torch.equal(grouped, whole) or not cap_edge
    close(addend + grouped.float(), whole)
    assert experts.ext.calls == ["moe"]


def test_nothing_routed_here_gives_zeros(experts):
    routing, x = routed(CAP), inputs(CAP, HIDDEN, torch.float16)
    routing.ids.fill_(-1)
    for tokens in (4, CAP):
        part = type(routing)(routing.ids[:tokens], routing.weights[:tokens])
        assert not call(experts.run, experts, x[:tokens], part).any()


def test_more_rows_than_the_scratch_holds_are_refused(experts):
    routing, x = routed(201), inputs(201, HIDDEN, torch.float16)
    with pytest.raises(ValueError, match=f"201 tokens are more than the {CAP} rows"):
        call(experts.run, experts, x, routing)
    with pytest.raises(ValueError, match="201 tokens are more than the 200"):
        call(experts.run_partition, experts, x, routing)


def test_layers_of_equal_sizes_share_scratch(experts, packed):
    other = few_rows.FusedExperts(packed, limit=None, top_k=TOP_K, cap=CAP, partition_tokens=200)
    assert other.scratch is experts.scratch
    assert experts.scratch.nbytes == sum(
        t.nbytes for value in vars(experts.scratch).values() for t in (value if isinstance(value, list) else [value])
    )


def test_scratch_of_the_fused_kernel_only_where_it_can_be_called(experts, packed):
    small = few_rows.FusedExperts(packed, limit=None, top_k=TOP_K, cap=32)
    assert small.scratch.rows.numel() == small.scratch.states[0].numel() == 0
    assert small.scratch.nbytes < experts.scratch.nbytes


# Refusals


def test_missing_extension_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "exllamav3_ext", None)
    with pytest.raises(Exl3LoadError, match=r"exllamav3_ext: .*; install exllamav3 1\.6\.5"):
        few_rows.extension()


def test_int8_gemv_is_off_before_the_extension_can_read_it(monkeypatch):
    monkeypatch.setenv("EXL3_INT8_GEMV", "2")
    monkeypatch.setitem(sys.modules, "exllamav3_ext", Extension())
    few_rows.extension()
    assert os.environ["EXL3_INT8_GEMV"] == "0"


def test_older_extension_is_refused():
    module = Extension()
    module.exl3_moe.__doc__ = " ".join(f"arg{i}: object" for i in range(29))
    with pytest.raises(Exl3LoadError, match=r"exl3_moe takes 29 arguments, 1\.6\.5's takes 35"):
        few_rows.check_extension(module)
    del module.exl3_moe
    with pytest.raises(Exl3LoadError, match="lacks exl3_moe;"):
        few_rows.check_extension(module)


@pytest.mark.parametrize(
    "codebook, bits, cap, message",
    [
        (Codebook.MCG, 3, CAP, "no coop kernel for 3 bits and mcg"),
        (Codebook.MUL1, 4, CAP, "no coop kernel for 4 bits and mul1"),
        (Codebook.THREE_INST, 4, CAP, r"no kernel for the codebook 3inst; use a cap of 32 rows"),
    ],
)
def test_kernels_that_are_not_there_are_refused_at_load(monkeypatch, codebook, bits, cap, message):
    packed = make_experts(2, 128, 128, bits=bits, codebook=codebook)
    module = Extension(packed)
    if codebook is Codebook.THREE_INST:
        module.INSTANCES = "coop:4:0"
    monkeypatch.setitem(sys.modules, "exllamav3_ext", module)
    with pytest.raises(Exl3LoadError, match=message):
        few_rows.FusedExperts(packed, limit=None, top_k=TOP_K, cap=cap)


def test_shared_experts_stay_on_the_main_stream(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.delenv(few_rows.STREAM_SWITCH, raising=False)
    with pytest.raises(Exl3LoadError, match="layer 3: VLLM_DISABLE_SHARED_EXPERTS_STREAM is 0"):
        few_rows.require_one_stream("layer 3")
    few_rows.keep_one_stream()
    few_rows.require_one_stream("layer 3")
    with pytest.raises(Exl3LoadError, match="layer 3: 2 micro-batches"):
        few_rows.require_one_stream("layer 3", micro_batches=2)
    monkeypatch.setenv(few_rows.STREAM_SWITCH, "0")
    few_rows.keep_one_stream()
    with pytest.raises(Exl3LoadError, match="is 0"):
        few_rows.require_one_stream("layer 3")


# Dense layers


@pytest.fixture
def dense(packed, monkeypatch):
    """Expert 0's gate as a dense layer."""
    parts = packed.w13_trellis[0, 0], packed.w13_suh[0, 0], packed.w13_svh[0, 0]
    tensors = Exl3Tensors(*parts, Codebook.MCG)
    monkeypatch.setitem(sys.modules, "exllamav3_ext", Extension(dense=[tensors]))
    monkeypatch.setattr(few_rows, "DENSE_SCRATCH_BYTES", 512 * 2**10)
    return few_rows.DenseExl3(*parts, Codebook.MCG), decode_weight(tensors, torch.float64)


@pytest.mark.parametrize(
    "rows, calls",
    [
        (0, []),
        (1, ["gemv"]),
        (8, ["gemv"]),
        (9, [("gemm", 0)]),
        (16, [("gemm", 0)]),
        (17, [("gemm", 5)]),
        (33, [("gemm", 6)]),
        (49, [("gemm", 7)]),
        (144, [("gemm", 7)]),
        (145, [("hgemm", 128)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dense_kernel_follows_from_the_number_of_rows(dense, rows, calls, dtype):
    layer, weight = dense
    x = inputs(rows, HIDDEN, dtype)
    got = layer.apply(x)
    assert layer.ext.calls == calls and got.dtype == dtype
    torch.testing.assert_close(got, (x.double() @ weight).to(dtype), atol=2e-2, rtol=1e-2)


def test_dense_slices_cover_all_columns(monkeypatch):
    packed = make_experts(1, HIDDEN, 640)
    parts = packed.w13_trellis[0, 1], packed.w13_suh[0, 1], packed.w13_svh[0, 1]
    tensors = Exl3Tensors(*parts, Codebook.MCG)
    monkeypatch.setitem(sys.modules, "exllamav3_ext", Extension(dense=[tensors]))
    monkeypatch.setattr(few_rows, "DENSE_SCRATCH_BYTES", 256 * (2 * HIDDEN + 4 * 200))
    layer, x = few_rows.DenseExl3(*parts, Codebook.MCG), inputs(200, HIDDEN, torch.float16)
    got = layer.apply(x)
    assert layer.ext.calls == [("hgemm", 256), ("hgemm", 256), ("hgemm", 128)]
    want = (x.double() @ decode_weight(tensors, torch.float64)).half()
    torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)


def test_dense_scratch_that_cannot_hold_a_block_is_refused():
    with pytest.raises(ValueError, match="128 columns need"):
        few_rows.slice_columns(100_000, 65_536, 128)


def test_dense_kernel_that_does_not_run_is_an_error(dense, monkeypatch):
    layer, _ = dense
    monkeypatch.setattr(layer.ext, "exl3_gemm", lambda *args: 0)
    with pytest.raises(RuntimeError, match="exl3_gemm has no kernel for 4 bits, 20 rows"):
        layer.apply(inputs(20, HIDDEN))
