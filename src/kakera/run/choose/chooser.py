"""Chooser: the tokens of a step's rows, each under its own request's wishes and grammar, along their drafts.

A row with drafts d1 .. dk has logits behind its last known token and behind each draft. Each of these places is sampled
as if the drafts before it had been chosen: with its own noise, penalties and mask. The row yields the drafts that were
chosen, too, and the first token that differs or comes behind them all: what it would have yielded one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from kakera.constrain.compiler import GrammarFailed
from kakera.constrain.output import Outputs, grammar_failure
from kakera.contract.step import RowResult, SamplingInput, Segment, follow_drafts
from kakera.run.choose.picks import NO_PICK, Pick, pick_of
from kakera.run.choose.sampler import Launched, Sampled, collect, launch


@dataclass(frozen=True)
class _Row:
    """`places`: how the token behind each draft is to be chosen, as far as the request's grammar permits the drafts
    before; a result in place of a pick stands for a row that gets no token there."""

    given: SamplingInput
    drafts: tuple[int, ...]
    places: tuple[Pick | RowResult, ...]


class Drawing(Protocol):
    """Tokens on their way. tokens_R: int64 on the device, one for each row of logits, before the host has seen them."""

    @property
    def tokens_R(self) -> Tensor: ...

    def collect(self) -> dict[str, RowResult]:
        """Request id -> its tokens, or the error text if this row alone can not be sampled."""
        ...


class Chooses(Protocol):
    def draw(self, rows: Sequence[Segment], sampling: Mapping[str, SamplingInput], logits_RV: Tensor) -> Drawing:
        """Queue the choice of tokens; waits for nothing. Of each row's logits one more than it has drafts."""
        ...


@dataclass(frozen=True)
class Drawn:
    chooser: Chooser
    rows: tuple[_Row, ...]
    launched: Launched

    @property
    def tokens_R(self) -> Tensor:
        return self.launched.tokens_R

    def collect(self) -> dict[str, RowResult]:
        return self.chooser.collected(self)


class Chooser:
    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def draw(self, rows: Sequence[Segment], sampling: Mapping[str, SamplingInput], logits_RV: Tensor) -> Drawn:
        """See Chooses."""
        wanted = tuple(self._row(sampling[row.request_id], row.drafts, logits_RV.shape[-1]) for row in rows)
        picks: list[Pick] = []
        for row in wanted:
            known = [NO_PICK if isinstance(place, RowResult) else place for place in row.places]
            picks += known + [NO_PICK] * (1 + len(row.drafts) - len(known))
        return Drawn(self, wanted, launch(picks, logits_RV))

    def collected(self, drawn: Drawn) -> dict[str, RowResult]:
        """See Drawing.collect."""
        sampled = iter(collect(drawn.launched))
        results: dict[str, RowResult] = {}
        for row in drawn.rows:
            own = [next(sampled) for _ in range(1 + len(row.drafts))]
            permitted = row.drafts[: len(row.places) - 1]
            results[row.given.request_id] = follow_drafts(permitted, partial(self._chosen, row, own))
        return results

    def _row(self, given: SamplingInput, drafts: tuple[int, ...], vocabulary: int) -> _Row:
        return _Row(given, drafts, tuple(self._places(given, drafts, vocabulary)))

    def _places(self, given: SamplingInput, drafts: tuple[int, ...], vocabulary: int) -> list[Pick | RowResult]:
        """A place whose grammar can not say what it allows fails; nothing is ever sampled without its mask."""
        places: list[Pick | RowResult] = []
        for i in range(len(drafts) + 1):
            here = given.behind(drafts[:i])
            try:
                allowed = self._outputs.allowed(here)
                if allowed is None:
                    return [*places, RowResult(given.request_id, complete=True)]
                places.append(pick_of(here, allowed, vocabulary))
                if i == len(drafts) or not allowed.permits(drafts[i]) or self._outputs.took(here, drafts[i]):
                    return places
            except GrammarFailed as error:
                return [*places, grammar_failure(here, error)]
            except Exception as error:  # one request's wishes must not end the others
                return [*places, RowResult(given.request_id, error=f"sampling failed: {error}")]
        return places

    def _chosen(self, row: _Row, tokens: Sequence[Sampled], place: int) -> RowResult:
        pick, sampled = row.places[place], tokens[place]
        if isinstance(pick, RowResult):
            return pick
        request_id, here = row.given.request_id, row.given.behind(row.drafts[:place])
        if sampled.error:
            return RowResult(request_id, error=f"sampling failed: {sampled.error}")
        is_draft = place + 1 < len(row.places) and sampled.token == row.drafts[place]  # there are places behind it
        try:
            complete = not is_draft and self._outputs.took(here, sampled.token)
        except GrammarFailed as error:
            return grammar_failure(here, error)
        except Exception as error:
            return RowResult(request_id, error=f"sampling failed: {error}")
        logprobs = (sampled.logprob,) if sampled.logprob else ()
        return RowResult(request_id, (sampled.token,), logprobs, complete=complete)
