"""The messages between the scheduler, which decides, and the runner, which executes. Frozen; no torch.

A StepPlan is carried out in this order: `before` actions one by one, then one forward pass over the decode rows
and the prefill segments together, then `after` actions one by one. The runner decides nothing. A plan is a message: it
goes to every rank and into a recording (`encode_plan`), holds nothing that lives on, and its size does not depend on
the context. What tokens are chosen by (`SamplingInput`) stays beside it, with the rank that samples.

Pages hold 64 tokens (PAGE). A page table lists device page ids; entry i holds positions 64 i .. 64 i + 63. Whoever
carries plans out keeps one for each slot: a segment brings only the entries that are new to it.
A slot is a running request's fixed share of the device: its live GDN state, convolution columns, 16-bit window ring
and 16-bit sink page. Checkpoints, sinks and demoted pages live in the host store under ids that the cache chooses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from kakera.contract.events import ENGINE_ERROR, TokenLogprob
from kakera.contract.grid import pages_for
from kakera.contract.request import Sampling


class ResetSlot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Zero the slot's recurrent state: a request starts cold."""

    slot: int


class RestoreCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load a checkpoint (GDN states, conv columns, window pages, last hidden) and the tree root's sink into a slot."""

    slot: int
    checkpoint: int
    position: int  # tokens before the checkpoint; a multiple of PAGE
    sink: int | None  # None only if position == 0 or the KV codec needs no sink


class SaveSlot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Save a checkpoint of what a slot holds: the state after `position` tokens (a multiple of PAGE), where the last
    step left its prompt."""

    slot: int
    checkpoint: int
    position: int


class SaveSink(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy a slot's 16-bit sink page (complete by now) to the host store."""

    slot: int
    sink: int


class DemotePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy device pages to host pages, all layers; (device page, host page) pairs. The device pages are free then."""

    pairs: tuple[tuple[int, int], ...]


class PromotePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy host pages to device pages; pairs of (host page, device page). The host pages stay valid until dropped."""

    pairs: tuple[tuple[int, int], ...]


class MovePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy device pages to other device pages, all layers; pairs of (from, to), no page in two of them. The first are
    free then; slots whose tables name them get the new entries by the next plan that has a row of theirs."""

    pairs: tuple[tuple[int, int], ...]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget records of the host store."""

    checkpoints: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    host_pages: tuple[int, ...] = ()


class DiskRecord(msgspec.Struct, frozen=True, array_like=True):
    """A page, a checkpoint or a sink between the host store, where it has the id `id`, and the disk, where `key` names
    it: the chain hash of the last page before `position`, whose token ids are `tokens` and whose parent is `parent`.
    `on_device`: `id` is a device page."""

    kind: Literal["page", "checkpoint", "sink"]
    id: int
    key: bytes
    parent: bytes
    tokens: bytes
    position: int
    on_device: bool = False


class WriteRecords(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy records and have them written to the disk behind all that was given before. Their places are free then."""

    records: tuple[DiskRecord, ...]


class ReadRecords(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin to read records into new places of the host store. Until the disk tier says that `job` has ended, and has
    brought all of them whole, nothing else may name them but a Drop behind that."""

    job: int
    records: tuple[DiskRecord, ...]


class EncodeImage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the embeddings of an image of `rows` x `columns` tokens, and keep them under its digest. What goes wrong
    fails the rows that name it, and nobody else. `pixels`: RGB bytes; none: all black (a recording without prompts)."""

    digest: bytes
    rows: int
    columns: int
    pixels: bytes


class ForgetImages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget embeddings of images."""

    digests: tuple[bytes, ...]


Action = (
    ResetSlot
    | RestoreCheckpoint
    | SaveSlot
    | SaveSink
    | DemotePages
    | PromotePages
    | MovePages
    | Drop
    | WriteRecords
    | ReadRecords
    | EncodeImage
    | ForgetImages
)


class SavePoint(msgspec.Struct, frozen=True, array_like=True):
    """Save a checkpoint of the state after `position` tokens (a multiple of PAGE) under this id."""

    position: int
    checkpoint: int


class ImageRows(msgspec.Struct, frozen=True, array_like=True):
    """Tokens row .. row + count - 1 of a segment are the tokens first .. of an image: its embeddings stand for them."""

    digest: bytes
    row: int
    first: int
    count: int


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """What a device computes of one sequence in a step: `tokens` at positions start .. start + len(tokens) - 1.

    A decode row usually has one token; with speculation its last known one and drafts behind it, up to a page border.
    A prefill segment starts on a multiple of PAGE and ends on one, the prompt's tail excepted. `saves` lie in
    (start, end], those of a decode row at its end: with drafts they are made, and hold, only if all are chosen.

    The slot's page table becomes its first `known_pages` entries, which are there already, and `new_pages` behind
    them: as many together as `end` needs. A request that gets a slot brings them all, so `known_pages` is 0 then.

    Logits are wanted of the last `sampled` tokens, behind each of which the next one is chosen, and of the first
    `scored`, whose successors are known (echo). `positions`: rope positions of the tokens, one or three of each
    (`contract/images.py`); () = those of the cache. `images`: which of the tokens are images, of embeddings that are
    kept by then. `propose`: the most tokens that the model's draft layer is
    to guess behind what a decode row yields.
    """

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    known_pages: int = 0
    new_pages: tuple[int, ...] = ()
    sampled: int = 0
    scored: int = 0
    saves: tuple[SavePoint, ...] = ()
    positions: tuple[tuple[int, ...], ...] = ()
    images: tuple[ImageRows, ...] = ()
    propose: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The tokens that are only guessed: all that are sampled behind but the first of them."""
        return self.tokens[len(self.tokens) - self.sampled + 1 :]

    @property
    def page_count(self) -> int:
        """Entries of its page table that it reads and writes."""
        return pages_for(self.end)

    @property
    def rope_axes(self) -> Sequence[Sequence[int]]:
        """One position a token, or three."""
        return self.positions or (range(self.start, self.end),)

    def cut(self, tokens: int) -> Segment:
        """Its first tokens, and what they need; of those nothing is wanted."""
        images = tuple(
            msgspec.structs.replace(part, count=min(part.count, tokens - part.row))
            for part in self.images
            if part.row < tokens
        )
        positions = tuple(axis[:tokens] for axis in self.positions)
        return msgspec.structs.replace(
            self, tokens=self.tokens[:tokens], positions=positions, images=images, sampled=0, scored=0, saves=()
        )


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. `may_follow`: indices of `decode` rows whose next step may be launched before this one's tokens are
    known; the next plan has each of them, with the token that it yields, unless its slot has been given up."""

    step: int
    before: tuple[Action, ...] = ()
    decode: tuple[Segment, ...] = ()
    prefill: tuple[Segment, ...] = ()
    after: tuple[Action, ...] = ()
    may_follow: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[Segment, ...]:
        return self.decode + self.prefill

    @property
    def token_count(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


encode_plan = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(StepPlan).decode


@dataclass(frozen=True)
class SamplingInput:
    """What a row's next token is chosen by, beside its logits.

    `context` is the request's whole token list so far, of which `prompt_tokens` are the prompt: the scheduler's own
    array of 32-bit integers, which grows in place; read only, and only while its step is executed.
    """

    request_id: str
    sampling: Sampling
    context: Sequence[int]
    prompt_tokens: int

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.context) - self.prompt_tokens

    @property
    def output(self) -> Sequence[int]:
        """The answer so far, copied."""
        return self.context[self.prompt_tokens :]

    def behind(self, tokens: Sequence[int]) -> SamplingInput:
        """As if these had been chosen too."""
        return replace(self, context=array("i", self.context) + array("i", tokens)) if tokens else self


@dataclass(frozen=True)
class RowResult:
    """What one row yielded. `tokens` is empty unless the row samples. `error` fails this request only; `code` says
    whose fault it is: the engine's, or that of the request's own grammar.

    `complete`: the request's constraint lets nothing follow behind `tokens`, all of which are shown. `proposed`: what
    the draft layer guesses behind them.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    code: str = ENGINE_ERROR
    complete: bool = False
    proposed: tuple[int, ...] = ()


def follow_drafts(drafts: Sequence[int], choose: Callable[[int], RowResult]) -> RowResult:
    """What a row yields whose drafts are these: the tokens chosen behind the last known one and behind each draft, up
    to the first that is not the next draft. `choose(i)` is the result behind i drafts; what fails there, or ends
    without a token, does so in a later step, when no draft lies before it."""
    chosen = [choose(0)]
    for i, draft in enumerate(drafts):
        if chosen[-1].tokens != (draft,) or chosen[-1].complete or not (behind := choose(i + 1)).tokens:
            break
        chosen.append(behind)
    tokens = tuple(token for result in chosen for token in result.tokens)
    return replace(chosen[-1], tokens=tokens, logprobs=tuple(each for result in chosen for each in result.logprobs))


@dataclass(frozen=True)
class StepResult:
    """`guessing`: of the seconds, those that the draft layer took to guess."""

    step: int
    rows: tuple[RowResult, ...]
    seconds: float
    guessing: float = 0.0
