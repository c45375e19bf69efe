"""The guards that replace something of vLLM: what they change, and what vLLM does without them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from schedulers import Case, cache_groups, engine_config, start, with_case, with_values
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_exl3 import guards, overrides, switches
from vllm_exl3.guards import block_sizes, decode_rows, topk_ids

POOL = 4


@pytest.fixture(scope="module")
def config():
    return engine_config()


@pytest.mark.parametrize("table", [block_sizes.TABLE, topk_ids.TABLE, decode_rows.TABLE])
def test_targets_are_known(table):
    for override in table:
        module = __import__(override.module, fromlist=["x"])
        holder = module
        *path, last = override.attribute.split(".")
        for name in path:
            holder = getattr(holder, name)
        original = getattr(holder, last)
        # Once replaced by the plugin, a wrapper still leads to the original; what replaces it whole does not.
        if original is not decode_rows.only_single_rows:
            assert overrides.fingerprint(original) in override.known


# Block sizes


def test_equal_blocks_start(config):
    block_sizes.check_block_sizes(cache_groups(Case()), with_case(config, Case()))


def test_a_smaller_block_is_refused(config):
    case = Case(attention_block=256)
    with pytest.raises(ValueError, match=r"recurrent state has 512 tokens, but that of attention has 256; .* FLASH"):
        block_sizes.check_block_sizes(cache_groups(case), with_case(config, case))


def test_what_only_the_workers_know_is_not_asked(config):
    """With several ranks the engine's own configuration keeps its default: workers settle the state's block."""
    config = with_case(config, Case())
    config.cache_config = with_values(config.cache_config, mamba_block_size=16)
    block_sizes.check_block_sizes(cache_groups(Case()), config)
    with pytest.raises(ValueError, match="recurrent state has 512 tokens, but that of attention has 256"):
        block_sizes.check_block_sizes(cache_groups(Case(attention_block=256)), config)


def test_states_that_are_never_reused_may_have_any_block(config):
    case = Case(attention_block=256, align=False)
    block_sizes.check_block_sizes(cache_groups(case), with_case(config, case))


def test_unequal_blocks_end_chunks_inside_a_state(config):
    """What the refusal is for: vLLM goes by the smaller block though the budget holds a whole state."""
    ends = {}
    for attention in (512, 256):
        run = start(Scheduler, config, Case(budget=800, attention_block=attention))
        run.add("one", [1] * 2000, 1)
        ends[attention] = [chunk.start + chunk.count for chunk in run.finish() if chunk.prefill]
    assert ends[512] == [512, 1024, 1536, 2000]
    assert any(end % 512 for end in ends[256][:-1])


def test_the_engine_asks_the_guard(config):
    import vllm.v1.engine.core as core

    case = Case(attention_block=256)
    with pytest.raises(ValueError, match="recurrent state"):
        core.resolve_kv_cache_block_sizes(cache_groups(case), with_case(config, case))
    assert core.resolve_kv_cache_block_sizes(cache_groups(Case()), with_case(config, Case())) == (512, 512)


# Decoding requests with unequal numbers of drafts


def batch(*lengths: int):
    """What the split reads of a batch: requests with so many rows each."""
    return SimpleNamespace(
        max_query_len=max(lengths), num_reqs=len(lengths), num_actual_tokens=sum(lengths),
        query_start_loc_cpu=torch.tensor([0, *lengths]).cumsum(0),
    )  # fmt: skip


def prefills(native, config, drafts: int, monkeypatch) -> int:
    """Requests that vLLM's indexer takes for prefill, of three that decode with all drafts or without."""
    monkeypatch.setattr(indexer, "_supports_native_decode", native)
    flat = indexer._use_flattening(with_case(config, Case(drafts=drafts)))
    return split_decodes_and_prefills(batch(1 + drafts, 1 + drafts, 1), 1 + drafts, require_uniform=not flat)[1]


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_decoding_requests_stay_decoding(config, drafts, monkeypatch):
    assert prefills(decode_rows.only_single_rows, config, drafts, monkeypatch) == 0


def test_without_the_guard_one_of_them_counts_as_prefill(config, monkeypatch):
    several_rows = lambda next_n: next_n in (1, 2)  # as vLLM has it for SM12x
    assert prefills(several_rows, config, 1, monkeypatch) == 1


# Ids of pools


def torch_expand(pool_ids, seq_lens, pool_size):
    """The two functions of vLLM that its kernel joins into one."""
    from vllm.models.glm5next.nvidia.ops import kpool_compress as ops

    tokens = ops.expand_pools_to_tokens(pool_ids, pool_ids >= 0, pool_ids.shape[1] * pool_size, pool_size)
    return ops.append_tail_to_topk(tokens, seq_lens, seq_lens // pool_size, pool_size)


SEQ_LENS = torch.tensor([3, 4, 9, 40], dtype=torch.int32)  # 0, 1, 2 and 10 whole pools
WRITTEN = torch.tensor([[-1, -1, -1], [0, -1, -1], [1, 0, -1], [9, 3, 0]])


def behind(expanded: torch.Tensor) -> int:
    return int((expanded >= SEQ_LENS[:, None]).sum())


def test_ids_behind_a_row_s_pools_are_dropped():
    expand = topk_ids.bounded(torch_expand)
    wrong = WRITTEN.clone()
    wrong[0, 0], wrong[1, 1], wrong[2, 2], wrong[3, 1] = 0, 2**31 - 5, 2, 10
    assert behind(torch_expand(wrong.clone(), SEQ_LENS, POOL)) > 0
    expanded = expand(wrong, SEQ_LENS, POOL)
    assert behind(expanded) == 0
    right = WRITTEN.clone()
    right[3, 1] = -1
    assert torch.equal(expanded, torch_expand(right, SEQ_LENS, POOL))


def test_right_ids_stay_as_they_are():
    expand = topk_ids.bounded(torch_expand)
    assert torch.equal(expand(WRITTEN.clone(), SEQ_LENS, POOL), torch_expand(WRITTEN, SEQ_LENS, POOL))


def test_the_list_of_pools_starts_empty(config):
    """In the module itself: every int32 tensor that it makes by torch.empty is such a list."""
    from vllm.models.glm5next.nvidia import sparse_indexer

    ids = sparse_indexer.torch.empty((5, 7), dtype=sparse_indexer.torch.int32, device="cpu")
    assert ids.shape == (5, 7) and ids.dtype is torch.int32 and (ids == -1).all()
    assert sparse_indexer.torch.empty(3, dtype=torch.uint8).shape == (3,)
    assert sparse_indexer.torch.arange is torch.arange


# The switch


@pytest.mark.parametrize("text", ["", " ", ","])
def test_all_guards_are_on_by_default(text):
    assert switches.parse({"EXL3_GUARDS_OFF": text}).guards_off == ()


def test_guards_go_off_by_name():
    assert switches.parse({"EXL3_GUARDS_OFF": ", ".join(guards.NAMES)}).guards_off == guards.NAMES
    with pytest.raises(switches.SwitchError, match=r"EXL3_GUARDS_OFF: names 'chunks', expected some of chunk-ends, "):
        switches.parse({"EXL3_GUARDS_OFF": "topk-ids,chunks"})


def test_what_is_off_is_not_installed(monkeypatch):
    installed = []
    monkeypatch.setattr(overrides, "install", installed.append)
    guards.install(("topk-ids", "chunk-ends"))
    assert installed == [block_sizes.TABLE, decode_rows.TABLE]


def test_the_launcher_knows_the_same_guards():
    from launcher.kinds import GUARDS

    assert GUARDS == guards.NAMES
