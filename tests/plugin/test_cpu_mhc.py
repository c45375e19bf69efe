"""mHC as vLLM's operators run it after the installation, against transformers in fp32."""

import pytest
import torch

pytest.importorskip("vllm")
STREAMS, HIDDEN, TOKENS = 4, 64, 9
EPS, NORM_EPS = 1e-6, 1e-5


@pytest.fixture(scope="module")
def mhc():
    from vllm_exl3 import cpu

    cpu.install()
    import vllm.model_executor.layers.mhc as module

    return module


@pytest.fixture(scope="module")
def hyper(mhc):
    """transformers' hyper-connection and norm with random weights. Imported after the installation."""
    from transformers import Glm5NextTextConfig
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    torch.manual_seed(0)
    config = Glm5NextTextConfig(hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=EPS, rms_norm_eps=NORM_EPS)
    connection = modeling.Glm5NextTextHyperConnection(config)
    norm = modeling.Glm5NextTextRMSNorm(HIDDEN, eps=NORM_EPS)
    for p in (*connection.parameters(), *norm.parameters()):
        torch.nn.init.normal_(p, 0.3, 0.5)
    return connection.requires_grad_(False), norm.requires_grad_(False)


def arguments(connection, norm):
    return dict(
        fn=connection.fn.data, hc_scale=connection.scale.data, hc_base=connection.base.data, rms_eps=NORM_EPS,
        hc_pre_eps=EPS, hc_sinkhorn_eps=EPS, hc_post_mult_value=2.0, sinkhorn_repeat=connection.hc_sinkhorn_iters,
        norm_weight=norm.weight.data, norm_eps=NORM_EPS,
    )  # fmt: skip


def expected(connection, norm, streams):
    post, comb, collapsed = connection(streams.unsqueeze(0))
    return post[0].unsqueeze(-1), comb[0], norm(collapsed)[0]


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_pre_equals_transformers_with_its_norm(mhc, hyper, dtype, bar):
    streams = torch.randn(TOKENS, STREAMS, HIDDEN).to(dtype)
    got = mhc.MHCPreOp.forward_cpu(None, streams, **arguments(*hyper))
    assert got[2].dtype == dtype
    for part, want in zip(got, expected(*hyper, streams.float()), strict=True):
        torch.testing.assert_close(part.float(), want, rtol=bar, atol=bar)


def test_post_and_the_next_pre_equal_transformers(mhc, hyper):
    connection, norm = hyper
    streams, x = torch.randn(TOKENS, STREAMS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    post, comb, _ = expected(connection, norm, streams)
    want = post * x.unsqueeze(-2) + torch.einsum("tij,tih->tjh", comb, streams)
    got = mhc.MHCFusedPostPreOp.forward_cpu(None, x, streams, post, comb, **arguments(connection, norm))
    torch.testing.assert_close(got[0], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mhc.MHCPostOp.forward_cpu(None, x, streams, post, comb), want, rtol=1e-5, atol=1e-5)
    for part, other in zip(got[1:], expected(connection, norm, want), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-5)


def test_the_norm_is_not_dropped(mhc, hyper):
    """The defect of vLLM's own version: the same result with and without norm_weight."""
    streams = torch.randn(TOKENS, STREAMS, HIDDEN)
    with_norm = arguments(*hyper)
    without = with_norm | {"norm_weight": None}
    a, b = (mhc.MHCPreOp.forward_cpu(None, streams, **kwargs)[2] for kwargs in (with_norm, without))
    assert (a - b).abs().max() > 0.1
    torch.testing.assert_close(a, hyper[1](b), rtol=1e-5, atol=1e-5)
