"""RMS norms and the manifold hyper-connections (mHC) of GLM-5.3 in PyTorch.

mHC keeps `streams` residual streams per token. Before a sublayer, `mhc_pre` derives three mixes from
them and collapses them into the sublayer's input; after it, `mhc_post` spreads the output over the
streams and mixes those with each other. Arithmetic is fp32, rounded once at the end.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, eps):
    return rms_norm(qr, q_weight, eps), rms_norm(kv, kv_weight, eps)


def sinkhorn(comb: torch.Tensor, eps: float, rounds: int) -> torch.Tensor:
    """Make rows and columns of positive matrices [..., n, n] sum to one, ending with the columns."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mhc_pre(
    self, residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
    sinkhorn_repeat, n_splits=1, norm_weight=None, norm_eps=0.0,
):  # fmt: skip
    """residual [..., streams, hidden], fn [(2 + streams) * streams, streams * hidden]. Returns the mix of
    the output [..., streams, 1], the mix of the streams [..., streams, streams] and the sublayer's
    input [..., hidden], RMS-normalised if a weight is given. `n_splits` only tiles a GPU kernel."""
    n = residual.shape[-2]
    wide = residual.float()
    flat = wide.flatten(-2)
    mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    pre, post, comb = mixes.split((n, n, n * n), -1)
    pre_base, post_base, comb_base = hc_base.split((n, n, n * n))

    pre = torch.sigmoid(pre * hc_scale[0] + pre_base) + hc_pre_eps
    post = torch.sigmoid(post * hc_scale[1] + post_base) * hc_post_mult_value
    comb = torch.softmax((comb * hc_scale[2] + comb_base).unflatten(-1, (n, n)), -1) + hc_sinkhorn_eps
    comb = sinkhorn(comb, hc_sinkhorn_eps, sinkhorn_repeat)

    layer_input = (pre.unsqueeze(-2) @ wide).squeeze(-2)
    if norm_weight is not None:
        layer_input = rms_norm(layer_input, norm_weight, norm_eps)
    return post.unsqueeze(-1), comb, layer_input.to(residual.dtype)


def mhc_post(self, x, residual, post_layer_mix, comb_res_mix):
    """x [..., hidden], residual [..., streams, hidden] -> the new streams."""
    mixed = comb_res_mix.float().mT @ residual.float()
    return (mixed + post_layer_mix.float() * x.float().unsqueeze(-2)).to(residual.dtype)


def mhc_fused_post_pre(
    self, x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps,
    hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, n_splits=1, tile_n=1, norm_weight=None, norm_eps=0.0,
):  # fmt: skip
    """`mhc_post` of one sublayer, then `mhc_pre` of the next; also returns the streams between them."""
    residual = mhc_post(self, x, residual, post_layer_mix, comb_res_mix)
    return residual, *mhc_pre(
        self, residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
        sinkhorn_repeat, n_splits, norm_weight, norm_eps,
    )  # fmt: skip
