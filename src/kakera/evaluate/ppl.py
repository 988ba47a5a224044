"""Perplexity: the mean negative log-likelihood of held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kakera.evaluate.forced import Forced, OnTokens, ignore
from kakera.evaluate.intervals import Estimate, estimate
from kakera.evaluate.windows import Window


@dataclass(frozen=True)
class Perplexity:
    """`nll` is in nats a token; `positions` is the number of predicted tokens."""

    nll: Estimate
    positions: int
    windows: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll.mean)


def token_nll(forced: Forced, tokens: Sequence[int], on_tokens: OnTokens = ignore) -> np.ndarray:
    """Cost in nats of token i + 1 given tokens 0 .. i, for every i: float32 [len(tokens) - 1]."""
    costs = []
    for start, logits_NV in forced.logits(tokens):
        targets = torch.tensor(tokens[start + 1 : start + 1 + len(logits_NV)], device=logits_NV.device)
        rows = logits_NV[: len(targets)]
        costs.append(torch.nn.functional.cross_entropy(rows, targets, reduction="none").cpu())
        on_tokens(len(logits_NV))
    return torch.cat(costs).numpy()


def perplexity(forced: Forced, windows: Sequence[Window], on_tokens: OnTokens = ignore) -> Perplexity:
    """Perplexity over all windows; every window starts cold. `on_tokens` hears of so many more tokens, as they come."""
    nll = np.concatenate([token_nll(forced, tokens, on_tokens) for tokens in windows])
    return Perplexity(estimate(nll), nll.size, len(windows))
