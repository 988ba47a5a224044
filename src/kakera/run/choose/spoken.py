"""The tokens of a model that ranks share: rank 0, which has whole logits, chooses them, and the others hear of them.

Their tokens go on by the exchange, on a card without the host: a step that runs ahead needs them there. How many of a
row's drafts stay is known to the host of rank 0 first, and goes behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.contract.step import RowResult, SamplingInput, Segment
from kakera.ops.exchange import Exchange
from kakera.run.choose.chooser import Chooser, Drawing


@dataclass(frozen=True)
class Speaker:
    """Chooses on rank 0. Implements Chooses."""

    chooser: Chooser
    exchange: Exchange

    def draw(self, rows: Sequence[Segment], sampling: Mapping[str, SamplingInput], logits_RV: Tensor) -> Spoken:
        drawn = self.chooser.draw(rows, sampling, logits_RV)
        _tell(self.exchange, drawn.tokens_R)
        return Spoken(drawn, rows, self.exchange)


@dataclass(frozen=True)
class Spoken:
    drawn: Drawing
    rows: Sequence[Segment]
    exchange: Exchange

    @property
    def tokens_R(self) -> Tensor:
        return self.drawn.tokens_R

    def collect(self) -> dict[str, RowResult]:
        results = self.drawn.collect()
        if any(row.drafts for row in self.rows):
            counts = [len(results[row.request_id].tokens) for row in self.rows]
            _tell(self.exchange, torch.tensor(counts, device=self.tokens_R.device))
        return results


@dataclass(frozen=True)
class Listener:
    """Hears on every other rank what rank 0 has chosen. Implements Chooses; knows nobody's wishes."""

    exchange: Exchange

    def draw(self, rows: Sequence[Segment], sampling: Mapping[str, SamplingInput], logits_RV: Tensor) -> Heard:
        tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
        self.exchange.receive(tokens_R, 0)
        return Heard(rows, tokens_R, self.exchange)


@dataclass(frozen=True)
class Heard:
    rows: Sequence[Segment]
    tokens_R: Tensor
    exchange: Exchange

    def collect(self) -> dict[str, RowResult]:
        """Of rows with drafts what they yielded; of the others nothing, which nobody here asks for."""
        if not any(row.drafts for row in self.rows):
            return {row.request_id: RowResult(row.request_id) for row in self.rows}
        counts_R = torch.empty(len(self.rows), dtype=torch.int64, device=self.tokens_R.device)
        self.exchange.receive(counts_R, 0)
        tokens, results, first = self.tokens_R.tolist(), {}, 0
        for row, count in zip(self.rows, counts_R.tolist(), strict=True):
            results[row.request_id] = RowResult(row.request_id, tuple(tokens[first : first + count]))
            first += row.sampled
        return results


def _tell(exchange: Exchange, numbers_N: Tensor) -> None:
    for rank in range(1, exchange.ranks):
        exchange.send(numbers_N, rank)
