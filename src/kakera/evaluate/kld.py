"""How far the distributions of a tested engine are from a baseline's: KL divergence and top-1 agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kakera.errors import UsageError
from kakera.evaluate.forced import Forced, OnTokens, ignore
from kakera.evaluate.intervals import Estimate, estimate
from kakera.evaluate.windows import Window


@dataclass(frozen=True)
class Divergence:
    """KL(baseline || tested) in nats over `positions` next-token distributions; `top1` is the share of equal argmax."""

    kld: Estimate
    top1: Estimate
    median: float
    p99: float
    max: float
    nll_delta: Estimate  # tested minus baseline, nats a token: the change of log perplexity
    positions: int
    windows: int


@dataclass(frozen=True)
class _Rows:
    kld: np.ndarray
    same: np.ndarray
    nll_delta: np.ndarray


def divergence(base: Forced, tested: Forced, windows: Sequence[Window], on_tokens: OnTokens = ignore) -> Divergence:
    """Compare two engines at every position of every window but each window's last. `on_tokens` hears how far it is.

    Raises UsageError if their vocabularies differ.
    """
    if base.chunk != tested.chunk:
        raise ValueError(f"chunks differ ({base.chunk}, {tested.chunk}): rows would not pair")
    found = [_compare(base, tested, tokens, on_tokens) for tokens in windows]
    kld = np.concatenate([rows.kld for rows in found])
    return Divergence(
        kld=estimate(kld),
        top1=estimate(np.concatenate([rows.same for rows in found])),
        median=float(np.median(kld)),
        p99=float(np.percentile(kld, 99)),
        max=float(kld.max()),
        nll_delta=estimate(np.concatenate([rows.nll_delta for rows in found])),
        positions=kld.size,
        windows=len(windows),
    )


def _compare(base: Forced, tested: Forced, tokens: Window, on_tokens: OnTokens) -> _Rows:
    kld, same, delta = [], [], []
    for (start, p_NV), (_, q_NV) in zip(base.logits(tokens), tested.logits(tokens), strict=True):
        if p_NV.shape != q_NV.shape:
            raise UsageError(f"the baseline has {p_NV.shape[-1]} words, the tested model {q_NV.shape[-1]}")
        rows = min(len(p_NV), len(tokens) - 1 - start)
        log_p, log_q = p_NV[:rows].log_softmax(-1), q_NV[:rows].log_softmax(-1)
        targets = torch.tensor(tokens[start + 1 : start + 1 + rows], device=log_p.device)[:, None]
        # rounding can push the sum of a tiny divergence below 0
        kld.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0))
        same.append(log_p.argmax(-1) == log_q.argmax(-1))
        on_tokens(len(p_NV))
        delta.append((log_p.gather(1, targets) - log_q.gather(1, targets))[:, 0])
    return _Rows(_join(kld), _join(same), _join(delta))


def _join(pieces: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(pieces).float().cpu().numpy()
