"""The messages between the scheduler, which decides, and the runner, which executes. Frozen; no torch.

A StepPlan is carried out in this order: `before` actions one by one, then one forward pass over the decode rows
and the prefill segments together, then `after` actions one by one. The runner decides nothing.

Pages hold 64 tokens (PAGE). A page table lists device page ids; entry i holds positions 64 i .. 64 i + 63.
A slot is a running request's fixed share of the device: its live GDN state, convolution columns, 16-bit window ring
and 16-bit sink page. Checkpoints, sinks and demoted pages live in the host store under ids that the cache chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakera.contract.events import ENGINE_ERROR, TokenLogprob
from kakera.contract.request import Sampling


@dataclass(frozen=True)
class ResetSlot:
    """Zero the slot's recurrent state: a request starts cold."""

    slot: int


@dataclass(frozen=True)
class RestoreCheckpoint:
    """Load a checkpoint (GDN states, conv columns, window pages, last hidden) and the tree root's sink into a slot."""

    slot: int
    checkpoint: int
    position: int  # tokens before the checkpoint; a multiple of PAGE
    sink: int | None  # None only if position == 0 or the KV codec needs no sink


@dataclass(frozen=True)
class SaveSink:
    """Copy a slot's 16-bit sink page (complete by now) to the host store."""

    slot: int
    sink: int


@dataclass(frozen=True)
class DemotePages:
    """Copy device pages to host pages, all layers; (device page, host page) pairs. The device pages are free then."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PromotePages:
    """Copy host pages to device pages; pairs of (host page, device page). The host pages stay valid until dropped."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Drop:
    """Forget records of the host store."""

    checkpoints: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    host_pages: tuple[int, ...] = ()


Action = ResetSlot | RestoreCheckpoint | SaveSink | DemotePages | PromotePages | Drop


@dataclass(frozen=True)
class SavePoint:
    """Save a checkpoint of the state after `position` tokens (a multiple of PAGE) under this id."""

    position: int
    checkpoint: int


@dataclass(frozen=True)
class Row:
    """One sequence's share of a step: `tokens` at positions start .. start + len(tokens) - 1.

    A decode row usually has one token; with speculation it has several. A prefill segment starts on a multiple of
    PAGE and ends on one, the prompt's tail excepted. `saves` lie in (start, start + len(tokens)]. `context` is the
    request's whole token list so far, this row's tokens included (read only; for penalties); `prompt_tokens` of it
    are the prompt. A row with `sample` yields the next token. `pages` and `context` are arrays of 32-bit integers:
    numpy and torch can take their buffers as they are, but only for a moment, since `context` grows in place.
    """

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    pages: Sequence[int]
    sampling: Sampling
    context: Sequence[int]
    prompt_tokens: int
    sample: bool
    saves: tuple[SavePoint, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepPlan:
    step: int
    before: tuple[Action, ...] = ()
    decode: tuple[Row, ...] = ()
    prefill: tuple[Row, ...] = ()
    after: tuple[Action, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.decode + self.prefill

    @property
    def token_count(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True)
class RowResult:
    """What one row yielded. `tokens` is empty unless the row samples. `error` fails this request only; `code` says
    whose fault it is: the engine's, or that of the request's own grammar.

    `complete`: the request's constraint lets nothing follow behind `tokens`, all of which are shown.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    code: str = ENGINE_ERROR
    complete: bool = False


@dataclass(frozen=True)
class StepResult:
    step: int
    rows: tuple[RowResult, ...]
    seconds: float
