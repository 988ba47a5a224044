"""The gated delta rule in chunks of 64 tokens: the same result as token by token, as matrix products.

Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh 2024), the WY form. Per value head and chunk, with
G the cumulative sum of g and D_ij = exp(G_i - G_j) for i >= j, else 0:

    A  = strictly lower part of (diag(beta) K K^T) * D
    T  = (I + A)^-1;   U = T diag(beta) V;   W = T diag(beta exp(G)) K
    V' = U - W S;      O = diag(exp(G)) Q S + ((Q K^T) * D) V'
    S <- exp(G_last) S + (diag(exp(G_last - G)) K)^T V'

All but the last two lines is free of S and runs for many chunks and all heads at once. The state between two chunks is
the recurrent state of that token, so on a CPU cutting a sequence at a multiple of 64 changes no bit. A tail is padded
with k = 0, beta = 0, g = 0, which leaves the state alone. Everything is float32. Shape letters as in `gated_delta`;
M chunks, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kakera.contract.grid import PAGE

CHUNK = PAGE
# Tokens whose temporaries exist at once. A GPU takes 1,024, for parallel work (96 MB at 48 value heads of 128). A CPU
# takes one chunk, which is as fast (23 ms for 512 tokens of 12 heads either way): every product then has one shape,
# so that the library's choice of kernel can not depend on the cut.
CPU_RANGE, GPU_RANGE = CHUNK, 1024


def gated_delta_chunk(
    q_NJK: Tensor, k_NJK: Tensor, v_NVD: Tensor, g_NV: Tensor, beta_NV: Tensor, state_VKD: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [N, V, D] and the state after the last token; the state passed in is left alone."""
    outputs: list[Tensor] = []
    size = CPU_RANGE if q_NJK.device.type == "cpu" else GPU_RANGE
    for start in range(0, q_NJK.shape[0], size):
        part = slice(start, start + size)
        output, state_VKD = _range(q_NJK[part], k_NJK[part], v_NVD[part], g_NV[part], beta_NV[part], state_VKD)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state_VKD


@dataclass(frozen=True)
class _Chunks:
    """What does not depend on the state. [M, V, ...]."""

    u_MVCD: Tensor
    wq_MV2CK: Tensor  # W above diag(exp(G)) Q: both meet S in one product
    scores_MVCC: Tensor  # (Q K^T) * D
    k_MVCK: Tensor  # diag(exp(G_last - G)) K
    decay_MV: Tensor  # exp(G_last)


def _range(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_VKD: Tensor) -> tuple[Tensor, Tensor]:
    count, V, D = v.shape
    chunks = _state_free(*(_chunked(x) for x in (q, k, v, g, beta)))
    output_MVCD = torch.empty_like(chunks.u_MVCD)
    for m in range(output_MVCD.shape[0]):
        from_state_V2CD = torch.bmm(chunks.wq_MV2CK[m], state_VKD)
        values_VCD = chunks.u_MVCD[m] - from_state_V2CD[:, :CHUNK]
        output_MVCD[m] = torch.bmm(chunks.scores_MVCC[m], values_VCD).add_(from_state_V2CD[:, CHUNK:])
        state_VKD = torch.bmm(chunks.k_MVCK[m].mT, values_VCD) + chunks.decay_MV[m, :, None, None] * state_VKD
    return output_MVCD.transpose(1, 2).reshape(-1, V, D)[:count], state_VKD


def _chunked(x_N: Tensor) -> Tensor:
    """[N, heads, ...] -> [M, heads, 64, ...], zeros behind the end."""
    missing = -x_N.shape[0] % CHUNK
    if missing:
        x_N = F.pad(x_N, (0, 0) * (x_N.dim() - 1) + (0, missing))
    return x_N.view(-1, CHUNK, *x_N.shape[1:]).transpose(1, 2).contiguous()


def _state_free(q_MJCK: Tensor, k_MJCK: Tensor, v_MVCD: Tensor, g_MVC: Tensor, beta_MVC: Tensor) -> _Chunks:
    M, J, C, K = k_MJCK.shape
    V, D = v_MVCD.shape[1], v_MVCD.shape[-1]
    per_group = (M, J, V // J)
    total_MVC = g_MVC.cumsum(-1)
    grown_MVC = total_MVC.exp()
    decay_MVCC = (total_MVC[..., :, None] - total_MVC[..., None, :]).tril_().exp_().tril_()

    qk_MJ2CC = torch.matmul(torch.cat([k_MJCK, q_MJCK], dim=2), k_MJCK.mT).view(M, J, 1, 2 * C, C)
    by_group = decay_MVCC.view(*per_group, C, C)
    scores_MVCC = (qk_MJ2CC[..., C:, :] * by_group).view(M, V, C, C)
    a_MVCC = (qk_MJ2CC[..., :C, :] * by_group).view(M, V, C, C).mul_(beta_MVC[..., None])

    # Inverting once and multiplying takes half the time of solving for all 256 columns (2.6 against 5.8 ms for 8
    # chunks of 12 heads). Only what lies below the diagonal of A is read.
    eye = torch.eye(C, dtype=a_MVCC.dtype, device=a_MVCC.device).expand_as(a_MVCC)
    inverse_MVCC = torch.linalg.solve_triangular(a_MVCC, eye, upper=False, unitriangular=True)
    k_MJ1CK, q_MJ1CK = k_MJCK[:, :, None], q_MJCK[:, :, None]
    weighted_k = (k_MJ1CK * (beta_MVC * grown_MVC).view(*per_group, C, 1)).view(M, V, C, K)
    uw_MVCX = torch.matmul(inverse_MVCC, torch.cat([v_MVCD * beta_MVC[..., None], weighted_k], dim=-1))
    grown_q = (q_MJ1CK * grown_MVC.view(*per_group, C, 1)).view(M, V, C, K)
    remaining_MVC = (total_MVC[..., -1:] - total_MVC).exp()
    return _Chunks(
        u_MVCD=uw_MVCX[..., :D],
        wq_MV2CK=torch.cat([uw_MVCX[..., D:], grown_q], dim=2),
        scores_MVCC=scores_MVCC,
        k_MVCK=(k_MJ1CK * remaining_MVC.view(*per_group, C, 1)).view(M, V, C, K),
        decay_MV=grown_MVC[..., -1],
    )
