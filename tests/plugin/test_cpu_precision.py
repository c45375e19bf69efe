"""What GLM-5.3 on the CPU asks of vLLM so that nothing but the attention cache is rounded to bf16."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from vllm_exl3.cpu import precision

LOCAL = Path(__file__).parent.parent.parent / "models" / "local"


def engine_arguments(**arguments):
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(LOCAL), skip_tokenizer_init=True, max_model_len=2048, dtype="bfloat16", **arguments)
    return args, args.create_model_config()


def test_the_head_and_the_states_of_kda_are_fp32():
    args, config = engine_arguments()
    assert config.dtype == torch.bfloat16 and config.head_dtype == torch.float32
    assert args.mamba_cache_dtype == "float32"


def test_what_the_user_asks_for_stays():
    args, config = engine_arguments(mamba_cache_dtype="bfloat16", hf_overrides={"head_dtype": "model"})
    assert args.mamba_cache_dtype == "bfloat16" and config.head_dtype == torch.bfloat16


def test_streams_are_equal_copies_in_fp32():
    x = torch.randn(3, 8).bfloat16()
    streams = precision.expand_streams(x, 4)
    assert streams.dtype == torch.float32 and streams.is_contiguous()
    assert torch.equal(streams, torch.stack([x.float()] * 4, dim=1))


@pytest.mark.parametrize("own, used", [(torch.float32, torch.float32), (torch.bfloat16, torch.float16)])
def test_absorbed_projections_follow_an_fp32_projection_only(own, used):
    class Attention:
        kv_b_proj = torch.nn.Linear(2, 2, dtype=own)

    process = precision.absorb_in_own_dtype(lambda self, act_dtype: act_dtype)
    assert process(Attention(), torch.float16) == used


def test_building_in_fp32_ends_with_the_old_default_even_after_an_error():
    def build(self, fail):
        assert torch.get_default_dtype() == torch.float32
        if fail:
            raise ValueError("unfit")

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        precision.build_in_fp32(build)(None, False)
        with pytest.raises(ValueError, match="unfit"):
            precision.build_in_fp32(build)(None, True)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
