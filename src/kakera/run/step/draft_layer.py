"""DraftLayer: keeps the keys and values of a model's draft layer as complete as the model's own, and guesses with it.

Its slot j holds token j with the target's hidden state of token j - 1 (`model/mtp.py`). Prompts fill it segment by
segment. Behind decode rows slots wait until somebody wants a guess or a page is full, and are computed together then:
a pass over a page's slots costs little more than one over one slot. What is guessed is drawn with the noise and under
the wishes of the position that it is for, grammars aside, so that it is as likely right as it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.constrain.output import ANYTHING
from kakera.contract.grid import PAGE
from kakera.contract.step import RowResult, SamplingInput, Segment
from kakera.kv.backend import AttentionBackend
from kakera.kv.batch import Batch, Save, Span
from kakera.model.mtp import draft_pass
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.run.choose.picks import pick_of
from kakera.run.choose.sampler import launch
from kakera.run.step.page_tables import PageTables


@dataclass
class _Slot:
    """Slots before `done` are computed; of those behind, `tokens` and the hidden states before them wait, and with them
    the hidden state of the newest token that the model has computed (none if slot `done` is that token's successor)."""

    done: int
    tokens: list[int]
    before: list[Tensor]  # [H] each

    def take(self, start: int, tokens: Sequence[int], hidden_NH: Tensor) -> None:
        """The model has computed these tokens."""
        self.tokens += tokens[max(0, self.done - start) :]
        self.before += hidden_NH.unbind(0)

    def give(self) -> tuple[int, list[int], list[Tensor]]:
        """All that wait: their first slot, tokens, and what stands before them."""
        start, tokens, before = self.done, self.tokens, self.before[: len(self.tokens)]
        rest = [before_H.clone() for before_H in self.before[len(tokens) :]]  # a view would keep the whole step's
        self.done, self.tokens, self.before = start + len(tokens), [], rest
        return start, tokens, before


@dataclass
class _Guess:
    """A row's guesses so far; `row` of the last pass has the hidden state that the next one comes from."""

    of: Segment
    given: SamplingInput  # behind what the row has yielded
    most: int
    row: int
    tokens: list[int]

    @property
    def slot(self) -> int:
        """Where the newest token stands."""
        return len(self.given.context) - 1 + len(self.tokens)


class DraftLayer:
    def __init__(self, model: HybridModel, attention: AttentionBackend, states: StatePool, tables: PageTables):
        self._attention, self._states, self._tables = attention, states, tables
        self.put_model(model)
        self._slots: dict[int, _Slot] = {}

    @property
    def _model(self) -> HybridModel:
        assert self._held is not None, "the weights were dropped: the engine sleeps"
        return self._held

    def put_model(self, model: HybridModel | None) -> None:
        """None: there are no guesses until there is one again."""
        self._held = model

    def forget(self) -> None:
        """All slots; for when nobody runs."""
        self._slots.clear()

    def begin(self, slot: int, position: int) -> None:
        """A slot has been reset, or loaded with the state after `position` tokens."""
        self._slots[slot] = _Slot(position, [], [self._states.before_SH[slot].clone()])

    def follow_prompts(self, rows: Sequence[Segment], spans: Sequence[Span], hidden_TH: Tensor) -> None:
        """Prompt segments have been computed. Fills the windows of the spans' saves."""
        pieces = _Pieces(self._tables)
        for row, span in zip(rows, spans, strict=True):
            slot = self._slots[row.slot]
            slot.take(row.start, row.tokens, hidden_TH[span.rows])
            pieces.add(row, *slot.give(), span.saves)
        if pieces.spans:
            self._run(pieces, prompts=True)

    def follow_rows(
        self,
        rows: Iterable[tuple[Segment, int, Tensor, RowResult | None]],
        sampling: Mapping[str, SamplingInput],
    ) -> dict[str, tuple[int, ...]]:
        """Decode rows: of each the first so many tokens stay, whose hidden states these are, and what it has yielded.
        Returns guesses by request."""
        pieces, guesses = _Pieces(self._tables), []
        for row, count, hidden_NH, result in rows:
            slot, end = self._slots[row.slot], row.start + count
            slot.take(row.start, row.tokens[:count], hidden_NH)
            most = min(row.propose, -(end + 1) % PAGE)
            if end % PAGE and most and result is not None and _goes_on(result, sampling[row.request_id]):
                slot.tokens.append(result.tokens[-1])
                given = sampling[row.request_id].behind(result.tokens)
                guesses.append(_Guess(row, given, most, pieces.count + len(slot.tokens) - 1, []))
            elif end % PAGE or not slot.tokens:
                continue
            pieces.add(row, *slot.give())
        hidden_TH = self._run(pieces) if pieces.spans else None
        while hidden_TH is not None and (guessing := [guess for guess in guesses if len(guess.tokens) < guess.most]):
            hidden_TH = self._guess(guessing, hidden_TH)
        return {guess.of.request_id: tuple(guess.tokens) for guess in guesses}

    def _guess(self, guesses: Sequence[_Guess], hidden_TH: Tensor) -> Tensor | None:
        """One token more for each; then the pass over those that are to have another one."""
        hidden_RH = hidden_TH[[guess.row for guess in guesses]]
        logits_RV = self._model.logits(hidden_RH)
        picks = [pick_of(guess.given.behind(guess.tokens), ANYTHING, logits_RV.shape[-1]) for guess in guesses]
        pieces = _Pieces(self._tables)
        for i, token in enumerate(launch(picks, logits_RV).tokens_R.tolist()):
            guess = guesses[i]
            guess.tokens.append(token)
            if len(guess.tokens) < guess.most:
                guess.row = pieces.count
                pieces.add(guess.of, guess.slot, [token], [hidden_RH[i]])
        return self._run(pieces) if pieces.spans else None

    def _run(self, pieces: _Pieces, prompts: bool = False) -> Tensor:
        before_TH = torch.stack(pieces.before)
        return draft_pass(self._model, pieces.batch(prompts), before_TH, self._attention)


class _Pieces:
    """What one pass computes: tokens at some rows' slots, and what stands before each."""

    def __init__(self, tables: PageTables):
        self._tables = tables
        self.spans: list[Span] = []
        self.tokens: list[int] = []
        self.before: list[Tensor] = []
        self.positions: list[int] = []

    @property
    def count(self) -> int:
        return len(self.tokens)

    def add(
        self, row: Segment, start: int, tokens: Sequence[int], before: Sequence[Tensor], saves: tuple[Save, ...] = ()
    ) -> None:
        self.spans.append(Span(self.count, len(tokens), start, row.slot, self._tables.of(row), saves))
        self.tokens += tokens
        self.before += before
        apart = row.rope_axes[0][0] - row.start
        self.positions += range(start + apart, start + apart + len(tokens))

    def batch(self, prompts: bool) -> Batch:
        device, spans = self.before[0].device, tuple(self.spans)
        tokens_T, positions_T = (
            torch.tensor(x, dtype=torch.int64, device=device) for x in (self.tokens, self.positions)
        )
        return Batch(tokens_T, positions_T, () if prompts else spans, spans if prompts else (), positions_T[:0])


def _goes_on(result: RowResult, given: SamplingInput) -> bool:
    """Whether a row's answer is likely to have another token."""
    tokens = result.tokens
    return bool(tokens) and not result.complete and tokens[-1] not in given.sampling.stop_token_ids
