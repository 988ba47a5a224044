"""The gated delta rule, one token at a time: the reference of the chunk form, and the decode path.

Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh 2024). Per token and value head, S in R^{K x D}, float32:

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

Shape letters here: N tokens of one sequence, B sequences, J key heads, V value heads (value head v reads key head
v // (V / J)), K key channels, D value channels. q and k come normalised, q scaled; g is the log of the decay, <= 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gated_delta_recurrent(
    q_NJK: Tensor, k_NJK: Tensor, v_NVD: Tensor, g_NV: Tensor, beta_NV: Tensor, state_VKD: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [N, V, D] and the state after the last token; the state passed in is left alone."""
    repeat = v_NVD.shape[1] // q_NJK.shape[1]
    q_NVK, k_NVK = q_NJK.repeat_interleave(repeat, 1), k_NJK.repeat_interleave(repeat, 1)
    outputs: list[Tensor] = []
    for q, k, v, g, beta in zip(q_NVK, k_NVK, v_NVD, g_NV, beta_NV, strict=True):
        state_VKD = state_VKD * g.exp()[:, None, None]
        predicted = torch.einsum("vkd,vk->vd", state_VKD, k)
        correction = beta[:, None] * (v - predicted)
        state_VKD = state_VKD + torch.einsum("vk,vd->vkd", k, correction)
        outputs.append(torch.einsum("vkd,vk->vd", state_VKD, q))
    return torch.stack(outputs), state_VKD


def gated_delta_step(
    q_BJK: Tensor, k_BJK: Tensor, v_BVD: Tensor, g_BV: Tensor, beta_BV: Tensor, state_SVKD: Tensor, slots: Sequence[int]
) -> Tensor:
    """One token of each of B sequences, [B, V, D]; row b reads and updates state_SVKD[slots[b]] in place.

    k and q meet the old state in one product, S^T [k q], because reading S is what a step costs; with the new state
    S' = exp(g) S + k d^T the output is S'^T q = exp(g) S^T q + (k . q) d. Rows are looped over: gathering and
    scattering the states of 8 rows takes 3.5 times as long on a CPU (2.3 ms against 0.65 ms a layer of 12 heads).
    """
    B, J, K = q_BJK.shape
    V = v_BVD.shape[1]
    kq_BJ2K = torch.stack([k_BJK, q_BJK], dim=2)
    kq_BV2K = kq_BJ2K[:, :, None].expand(B, J, V // J, 2, K).reshape(B, V, 2, K)
    decay_BV = g_BV.exp()
    read_BV2D = torch.stack([torch.bmm(kq_BV2K[b], state_SVKD[slot]) for b, slot in enumerate(slots)])
    read_BV2D.mul_(decay_BV[:, :, None, None])
    correction_BVD = beta_BV[:, :, None] * (v_BVD - read_BV2D[:, :, 0])
    for b, slot in enumerate(slots):
        state_VKD = state_SVKD[slot]
        state_VKD.mul_(decay_BV[b, :, None, None]).addcmul_(kq_BV2K[b, :, 0, :, None], correction_BVD[b, :, None, :])
    overlap_BV = (kq_BV2K[:, :, 0] * kq_BV2K[:, :, 1]).sum(-1)
    return read_BV2D[:, :, 1] + overlap_BV[:, :, None] * correction_BVD
