"""Log-probabilities under the model itself: before penalties, masks and temperature. One transfer for many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kakera.contract.events import TokenLogprob
from kakera.run.choose.ranking import in_pieces, top_ids
from kakera.run.transfer import Download

LOGPROB_FLOOR = -9999.0  # JSON has no -inf; clients expect a finite number


class Logprobs:
    """The log-probabilities of one token a row and of the most likely ones, on their way to the host."""

    def __init__(self, logits_RV: Tensor, rows_A: Tensor, tokens_A: Tensor, alternatives: Sequence[int]):
        """logits_RV: float32; rows_A, tokens_A: int64 on its device; alternatives: how many tokens beside each.

        Beside the logits at most 4 copies of `ranking.PIECE_ROWS` rows are alive.
        """
        self._alternatives = alternatives
        most = min(max(alternatives, default=0), logits_RV.shape[-1])
        pieces = []
        for rows_P, tokens_P in zip(in_pieces(rows_A), in_pieces(tokens_A), strict=True):
            logits_PV = logits_RV.index_select(0, rows_P)
            ids_PK = torch.cat([tokens_P[:, None], top_ids(logits_PV, most)], -1)
            values_PK = torch.log_softmax(logits_PV, -1).gather(-1, ids_PK)
            pieces.append(torch.stack([ids_PK.double(), values_PK.double()]))  # float64 holds both exactly
        self._download = Download(torch.cat(pieces, 1)) if pieces else None

    def wait(self) -> list[TokenLogprob]:
        if self._download is None:
            return []
        ids, values = self._download.wait().tolist()
        rows = zip(ids, values, self._alternatives, strict=True)
        return [_logprob([int(t) for t in row_ids], row_values, count) for row_ids, row_values, count in rows]


def _logprob(ids: list[int], values: list[float], alternatives: int) -> TokenLogprob:
    chosen, *top = [(token, max(value, LOGPROB_FLOOR)) for token, value in zip(ids, values, strict=True)]
    return TokenLogprob(*chosen, top=tuple(top[:alternatives]))


def logprobs_of(logits_RV: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Row i's log-probability of tokens[i], and of the `alternatives` most likely tokens. float32 [R, vocabulary]."""
    device = logits_RV.device
    rows_A = torch.arange(len(tokens), device=device)
    return Logprobs(logits_RV, rows_A, torch.tensor(tokens, device=device), [alternatives] * len(tokens)).wait()
