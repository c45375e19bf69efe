"""How the CUDA classes load, cut, pad and join, on the CPU: their kernels are replaced by the PyTorch decoder."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines import VOCAB, Engine, Reference, compare, in_process_vllm, prompts
from vllm_exl3 import few_rows, gpu_experts, linear, moe, ops
from vllm_exl3.format import Codebook, Exl3Tensors
from vllm_exl3.gpu_experts import GpuExperts, Many, Plan, has_shared_suh, local_slots
from vllm_exl3.ops import PackedExperts
from vllm_exl3.reference import decode_weight, moe_forward
from vllm_exl3.switches import Few

from tools.local_model.make_random import write_random_model

# Layers


class DecodedMatrix:
    """few_rows.DenseExl3 without kernels."""

    def __init__(self, trellis, suh, svh, codebook) -> None:
        self.suh, self.svh = suh, svh
        self.weight = decode_weight(Exl3Tensors(trellis, suh, svh, codebook))

    def apply(self, x):
        assert x.is_contiguous() and x.shape[-1] == self.suh.shape[0]
        return (x.float() @ self.weight).to(x.dtype)


def decoded(experts: PackedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [experts, hidden, 2*width] and w2 [experts, width, hidden]."""
    weight = lambda *parts: decode_weight(Exl3Tensors(*parts, experts.codebook))
    w13 = [
        torch.cat([weight(*(t[expert, side] for t in (experts.w13_trellis, experts.w13_suh, experts.w13_svh)))
                   for side in (0, 1)], dim=1)
        for expert in range(experts.count)
    ]  # fmt: skip
    w2 = [
        weight(*(t[expert] for t in (experts.w2_trellis, experts.w2_suh, experts.w2_svh)))
        for expert in range(experts.count)
    ]
    return torch.stack(w13), torch.stack(w2)


class DecodedExperts:
    """gpu_experts.GpuExperts without kernels."""

    scratch_bytes = 0

    def __init__(self, experts: PackedExperts, *, limit, top_k, max_tokens, plan) -> None:
        assert all(tensor.is_contiguous() for tensor in (experts.w13_trellis, experts.w2_trellis, experts.w13_suh))
        assert plan == Plan(Few(32, 512), Many.GROUPED) and top_k == 2 and max_tokens >= 1
        self.weights, self.limit = decoded(experts), limit

    def run(self, x, topk_ids, topk_weights, expert_map=None):
        return moe_forward(x, *self.weights, topk_weights, topk_ids, self.limit, expert_map).to(x.dtype)


@pytest.fixture
def cuda_classes(monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    monkeypatch.setattr(linear, "Exl3CpuLinearMethod", linear.Exl3CudaLinearMethod)
    monkeypatch.setattr(moe, "Exl3CpuMoEMethod", moe.Exl3CudaMoEMethod)
    monkeypatch.setattr(linear, "extension", lambda: None)
    monkeypatch.setattr(linear, "DenseExl3", DecodedMatrix)
    monkeypatch.setattr(moe, "GpuExperts", DecodedExperts)
    monkeypatch.setattr(ops, "load", lambda: None)
    spark = SimpleNamespace(is_cpu=lambda: True, get_device_capability=lambda: SimpleNamespace(major=12))
    monkeypatch.setattr(moe, "current_platform", spark)


MODELS = {
    "experts only": {"experts": "mcg4"},
    "everything": {"experts": "mul14", "all_exl3": True},
    # Native and EXL3 matrices side by side in one layer of vLLM.
    "mixed layers": {
        "experts": "mcg3",
        "vocab_size": 384,
        "dense": {"layers.*.mlp.up_proj": "mcg4", "layers.*.self_attn.q_a_proj": "mcg5", "lm_head": "mul16"},
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_transformers(tmp_path, cuda_classes, name):
    options = {"vocab_size": VOCAB} | MODELS[name]
    write_random_model(tmp_path, hidden_size=256, swiglu_limit=1.0, seed=12, **options)
    reference, asked = Reference(tmp_path), prompts(40, 3, 130)
    with in_process_vllm():
        engine = Engine(tmp_path, vocab=options["vocab_size"])
        for prompt, (tokens, table) in zip(asked, engine.run(asked), strict=True):
            compare(reference, "bfloat16", prompt, tokens, table)


@pytest.mark.parametrize("rank, first, used, zeros", [(0, 0, 192, 0), (1, 64, 172, 20)])
def test_heads_part_may_begin_and_end_inside_a_block(monkeypatch, rank, first, used, zeros):
    """364 tokens, padded to 384, on two ranks of 192: the second starts 64 columns into its first block."""
    monkeypatch.setattr(linear, "ParallelLMHead", SimpleNamespace)
    layer = SimpleNamespace(tp_rank=rank, num_embeddings_per_partition=192, org_vocab_size=364)
    part = linear.Part("lm_head", (0,), None)
    slices = [(0, 256)] if rank == 0 else [(128, 384)]
    layer.exl3_parts = [linear.LoadedPart(part, (0, 128), slices, torch.device("cpu"))]
    method = linear.Exl3CudaLinearMethod([part])
    method.output_sizes = [192]
    assert method._output_columns(layer) == {0: (first, first + used, zeros)}


def test_native_rows_are_cut_for_the_rank():
    layer = SimpleNamespace(tp_rank=1, tp_size=2, input_size_per_partition=4)
    whole = torch.arange(24.0).view(6, 4)
    assert torch.equal(linear._rank_rows("m.weight", whole, 3, layer), whole[3:])
    assert torch.equal(linear._rank_rows("m.weight", whole[:3], 3, layer), whole[:3])
    with pytest.raises(linear.Exl3LoadError, match=r"m\.weight: is \[6, 4\], expected 4 rows for each of 2 ranks"):
        linear._rank_rows("m.weight", whole, 4, layer)


# Who takes which rows

CAP, EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 4, 6, 256, 128, 2, 40
SPLIT, SHORT, ALONE = (
    Plan(Few(most, until), Many.GROUPED) for most, until in ((CAP, 30), (CAP, 0), (0, 0))
)  # fmt: skip


class FewRows:
    """few_rows.FusedExperts without kernels: experts with 1 .. cap rows, and nothing of the others."""

    def __init__(self, experts, *, limit, top_k, cap, partition_tokens) -> None:
        self.weights, self.limit, self.cap, self.partition_tokens = decoded(experts), limit, cap, partition_tokens
        self.scratch = SimpleNamespace(nbytes=0)

    def run(self, x, ids, weights, out):
        assert x.dtype == torch.float16 and len(x) <= self.cap
        out.copy_(moe_forward(x, *self.weights, weights, ids, self.limit))

    def run_partition(self, x, ids, weights, out):
        assert x.dtype == torch.float16 and self.cap < len(x) <= self.partition_tokens
        rows = torch.bincount(ids[ids >= 0], minlength=EXPERTS)
        few = torch.where((ids >= 0) & (rows[ids.clamp_min(0)] <= self.cap), ids, -1)
        out.copy_(moe_forward(x, *self.weights, weights, few, self.limit))


def fat_moe(x, ids, weights, experts, *, out, workspace, limit, expert_map, min_rows, addend):
    workspace.fill_(0xFF)
    local = local_slots(ids, expert_map)
    rows = torch.bincount(local[local >= 0], minlength=EXPERTS)
    many = torch.where((local >= 0) & (rows[local.clamp_min(0)] >= min_rows), local, -1)
    result = moe_forward(x, *decoded(experts), weights, many, limit)
    out.copy_(result if addend is None else result + addend)


@pytest.fixture
def gpu_layer(monkeypatch):
    monkeypatch.setattr(ops, "load", lambda: None)
    monkeypatch.setattr(ops, "workspace_bytes", lambda *sizes: 1024)
    monkeypatch.setattr(ops, "fat_moe", fat_moe)
    monkeypatch.setattr(gpu_experts, "FusedExperts", FewRows)
    gpu_experts.shared_scratch.cache_clear()
    yield lambda plan: GpuExperts(random_experts(), limit=1.0, top_k=TOP_K, max_tokens=TOKENS, plan=plan)
    gpu_experts.shared_scratch.cache_clear()


def random_experts() -> PackedExperts:
    generator = torch.Generator().manual_seed(3)
    trellis = lambda *shape: torch.randint(-(2**15), 2**15, (EXPERTS, *shape, 64), generator=generator).short()
    scales = lambda *shape: (torch.rand(EXPERTS, *shape, generator=generator) * 0.1).half()
    return PackedExperts(
        trellis(2, HIDDEN // 16, WIDTH // 16), scales(2, HIDDEN), scales(2, WIDTH) * 10,
        trellis(WIDTH // 16, HIDDEN // 16), scales(WIDTH), scales(HIDDEN) * 10, Codebook.MCG, False,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, CAP, CAP + 1, 30, 31, TOKENS])
@pytest.mark.parametrize("plan", [SPLIT, SHORT, ALONE], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_every_row_is_taken_once(gpu_layer, plan, tokens, mapped):
    generator = torch.Generator().manual_seed(tokens)
    # Skewed, so that some experts have few rows and some many; some ids belong to nobody here.
    ids = (torch.rand(tokens, TOP_K, generator=generator) ** 3 * EXPERTS).int()
    ids[0, 0] = -1
    expert_map = torch.tensor([3, -1, 0, 5, 1, -1], dtype=torch.int32) if mapped else None
    weights = torch.rand(tokens, TOP_K, generator=generator)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    layer = gpu_layer(plan)
    got = layer.run(x, ids, weights, expert_map)
    want = moe_forward(x, *decoded(layer.experts), weights, local_slots(ids, expert_map), 1.0)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("plan", [SPLIT, SHORT, ALONE], ids=str)
def test_a_step_without_tokens_gives_nothing(gpu_layer, plan):
    empty = torch.zeros(0, HIDDEN).bfloat16()
    got = gpu_layer(plan).run(empty, torch.zeros(0, TOP_K, dtype=torch.int32), torch.zeros(0, TOP_K))
    assert got.shape == empty.shape and got.dtype == empty.dtype


def test_longer_steps_than_scratch_was_made_for_are_refused(gpu_layer):
    layer = gpu_layer(SPLIT)
    x, ids = torch.zeros(TOKENS + 1, HIDDEN).bfloat16(), torch.zeros(TOKENS + 1, TOP_K, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="41 tokens in a step: scratch was made for 40 at most"):
        layer.run(x, ids, torch.zeros(TOKENS + 1, TOP_K))


def test_layers_of_equal_sizes_share_scratch(gpu_layer):
    one, other = gpu_layer(SPLIT), gpu_layer(SPLIT)
    assert one.scratch is other.scratch and one.scratch_bytes == one.scratch.nbytes > 0
    assert gpu_layer(ALONE).scratch is not one.scratch


def test_shared_input_scales_are_seen():
    suh = torch.ones(4, 2, 128).half()
    assert has_shared_suh(suh)
    suh[3, 1, 127] = 2
    assert not has_shared_suh(suh)


def test_stand_ins_have_the_real_arguments():
    import inspect

    for real, stand_in in ((few_rows.FusedExperts, FewRows), (few_rows.DenseExl3, DecodedMatrix)):
        for name in ("__init__", "run", "run_partition", "apply"):
            if hasattr(stand_in, name):
                parameters = [inspect.signature(getattr(kind, name)).parameters for kind in (real, stand_in)]
                assert len(parameters[0]) == len(parameters[1]), (real, name)
