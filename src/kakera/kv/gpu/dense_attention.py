"""Unmasked attention by a library that also returns the log-sum-exp, which merging over parts of the keys needs.

All functions: scaled queries q_BMD, keys and values kv_BND, fp16; o_BMD fp16 and lse_BM fp32 (natural logarithm).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kakera.target.as_torch import target_of
from kakera.target.kernels import has_large_tiles

Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


FEW_QUERIES = 2048  # rows of a call below which flash is taken: a plan of cuDNN, 50 to 75 ms, is not worth its making


def choose(device: torch.device) -> Attention:
    """cuDNN where it has kernels of the newer tensor cores (Hopper, data-centre Blackwell), else flash attention 2.

    H200, 8,192 x 6 queries over 32,768 keys of 256: cuDNN 713, flash 328 TFLOP/s; of 128: 659, 339 (2026-11-30).
    """
    target = target_of(device)
    if not target.has_cards:
        return plain
    return cudnn_or_flash if has_large_tiles(target.capability) else flash


def makes_plans(device: torch.device) -> bool:
    """Whether the first call of each shape is slow there."""
    return choose(device) is cudnn_or_flash


def cudnn_or_flash(q_BMD: Tensor, k_BND: Tensor, v_BND: Tensor) -> tuple[Tensor, Tensor]:
    return (flash if q_BMD.shape[1] < FEW_QUERIES else cudnn)(q_BMD, k_BND, v_BND)


def cudnn(q_BMD: Tensor, k_BND: Tensor, v_BND: Tensor) -> tuple[Tensor, Tensor]:
    """cuDNN makes a plan for each new shape: callers keep to few."""
    inputs = (x.unsqueeze(1) for x in (q_BMD, k_BND, v_BND))
    # no bias, with log-sum-exp, no dropout, not causal, no debug mask
    o_B1MD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *inputs, None, True, 0.0, False, False, scale=1.0
    )
    return o_B1MD.squeeze(1), lse.reshape(q_BMD.shape[:2])


def flash(q_BMD: Tensor, k_BND: Tensor, v_BND: Tensor) -> tuple[Tensor, Tensor]:
    inputs = (x.unsqueeze(1) for x in (q_BMD, k_BND, v_BND))
    # no dropout, not causal, no debug mask
    o_B1MD, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, False, False, scale=1.0)
    return o_B1MD.squeeze(1), lse.reshape(q_BMD.shape[:2])


def plain(q_BMD: Tensor, k_BND: Tensor, v_BND: Tensor) -> tuple[Tensor, Tensor]:
    """The reference."""
    scores_BMN = torch.bmm(q_BMD.float(), k_BND.float().transpose(1, 2))
    lse_BM = scores_BMN.logsumexp(-1)
    p_BMN = scores_BMN.sub_(lse_BM.unsqueeze(-1)).exp_()
    return torch.bmm(p_BMN, v_BND.float()).to(q_BMD.dtype), lse_BM
