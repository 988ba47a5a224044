"""Routing of rows to experts: which, with what shares, in what order the slots are computed, and their sum.

A slot is a row with one of its experts; a row's slots stand in descending order of their logits. Everything here gives
a row the same bits in any company.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits_TE: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Experts int64 [T, top] of each row and their shares float32 [T, top], largest first.

    Of equal logits the lower expert wins, and stands in front: a library's top-k promises no order. The shares are the
    softmax over the chosen ones, which is that over all, scaled to add up to 1. No logit is too small to be chosen.
    """
    ordered_TE, expert_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    return expert_TE[:, :top], ordered_TE[:, :top].softmax(dim=-1)


def group(expert_TK: Tensor, experts: int) -> list[Tensor]:
    """For every expert the slots (row x top + place) that chose it, int64, ascending: so its rows keep their order."""
    slot_S = expert_TK.flatten().sort(stable=True).indices
    counts = torch.bincount(expert_TK.flatten(), minlength=experts).tolist()
    return list(torch.split(slot_S, counts))


def combine(slot_SH: Tensor, share_TK: Tensor) -> Tensor:
    """float32 [T, H]: the sum over a row's slots of share x what the expert gave, in the order of the slots."""
    slot_TKH = slot_SH.view(*share_TK.shape, -1)
    total_TH = share_TK[:, 0, None] * slot_TKH[:, 0].float()
    for place in range(1, share_TK.shape[1]):
        total_TH += share_TK[:, place, None] * slot_TKH[:, place].float()
    return total_TH
