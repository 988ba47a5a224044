"""TorchRunner: carries out step plans with a model, a KV cache, live states and the host store. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from kakera.contract.events import RegionRead, TokenLogprob
from kakera.contract.step import (
    Action,
    DemotePages,
    Drop,
    EncodeImage,
    ForgetImages,
    MovePages,
    PromotePages,
    ReadRecords,
    ResetSlot,
    RestoreCheckpoint,
    RowResult,
    SamplingInput,
    SavePoint,
    SaveSink,
    SaveSlot,
    Segment,
    StepPlan,
    StepResult,
    WriteRecords,
)
from kakera.kv.batch import Batch, CheckpointTensors, Held, Kept, Save, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.ops.exchange import ALONE
from kakera.plan.sizes import HEAD_PIECE_ROWS
from kakera.run.choose.chooser import Chooses, Drawing
from kakera.run.choose.logprobs import logprobs_of
from kakera.run.interface import NOTHING_SAMPLED
from kakera.run.regions import Region, regions
from kakera.run.step.draft_layer import DraftLayer
from kakera.run.step.graphs import DecodeGraphs
from kakera.run.step.images import ImageEmbeddings
from kakera.run.step.page_tables import PageTables
from kakera.run.store.disk import DiskRecords
from kakera.run.store.host import Store
from kakera.run.sweep import sweep

log = logging.getLogger(__name__)
MOVED = 16  # pages at a time: a move comes when memory is short, and copies 10 MB of the 27B beside themselves


@dataclass(frozen=True)
class _Staged:
    """A checkpoint that the layers fill during this step."""

    checkpoint: int
    tensors: CheckpointTensors


class TorchRunner:
    def __init__(
        self,
        model: HybridModel,
        kv: KVCache,
        states: StatePool,
        store: Store,
        tables: PageTables,
        chooser: Chooses,
        graphs: DecodeGraphs | None = None,
        disk: DiskRecords | None = None,
        drafts: DraftLayer | None = None,
        images: ImageEmbeddings | None = None,
    ):
        """`graphs`: for decode steps. Without `disk` no plan names the disk, without `images` none an image, without
        `drafts` no row wants guesses."""
        self.drafts = drafts
        self.put_model(model)
        self.kv = kv
        self.states = states
        self.store = store
        self.tables = tables
        self.chooser = chooser
        self.graphs = graphs
        self.disk = disk
        self.images = images
        self.device = states.device
        self._guessing = 0.0  # seconds of the step in which the draft layer guessed
        self._stops: dict[int, Tensor] = {}  # by slot, what a step left of a prompt's last hidden state (SaveSlot)
        self._branch: list[int] = []

    @property
    def branch(self) -> tuple[int, ...]:
        """See RankRunner: which slots' rows were replayed or ran ahead, how many tokens of a row stay, what was not
        finite."""
        return tuple(self._branch)

    @property
    def model(self) -> HybridModel:
        if self._model is None:
            raise RuntimeError("the weights were dropped: the engine sleeps")
        return self._model

    def put_model(self, model: HybridModel | None) -> None:
        """None: nothing can be computed until there is one again."""
        self._model = model
        if self.drafts is not None:
            self.drafts.put_model(model)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] = NOTHING_SAMPLED) -> StepResult:
        """Run one step. A forward pass that raises fails every row of the step, because their live states may have been
        updated in some layers and not in others; requests without a row in it go on. A row that fails behind the
        layers (values that are not finite, sampling, echo) fails alone. Raises if the device does not compute any more,
        and for whatever goes wrong on one of several ranks: the others are somewhere else then.
        """
        began, self._branch, self._guessing = time.perf_counter(), [], 0.0
        exchange = ALONE if self._model is None else self._model.exchange  # actions alone need no weights
        for action in plan.before:
            self._apply(action)
        results: tuple[RowResult, ...] = ()
        if plan.rows:
            try:
                results = self._forward(plan, sampling)
                exchange.check()
            except Exception as error:  # whatever it is: the engine outlives it, and says so
                if exchange.ranks > 1:
                    raise
                log.exception("step %d failed", plan.step)
                touch(self.device)
                text = f"the engine could not compute this step: {error}"
                results = tuple(RowResult(row.request_id, error=text) for row in plan.rows)
        self.store.arrive()
        for action in plan.after:
            self._apply(action)
        return StepResult(plan.step, results, time.perf_counter() - began, self._guessing)

    def regions(self) -> dict[str, Region]:
        """The device's memory that is held for good, by purpose."""
        tower = None if self.images is None else self.images.tower
        return regions(self._model, tower, self.kv, self.states, self.store, self)

    def forget_slots(self) -> None:
        """What steps have left of slots beside their states; for when nobody runs."""
        self._stops.clear()
        if self.drafts is not None:
            self.drafts.forget()
        for slot in range(len(self.tables.ids_SP)):
            self.tables.forget(slot)

    def sweep(self) -> list[RegionRead]:
        """See Runner.sweep. Whatever goes wrong with reading alone costs nobody the engine."""
        try:
            return sweep(self.regions(), self.device, holes=self.kv.store.pool.holes())
        except RuntimeError:  # of torch: no memory for a sum, say
            log.exception("the sweep failed")
            touch(self.device)
            return []

    def _forward(self, plan: StepPlan, sampling: Mapping[str, SamplingInput]) -> tuple[RowResult, ...]:
        if self.images is not None:
            plan, failed = self.images.without_failed(plan)
            if failed:
                return (*(self._forward(plan, sampling) if plan.rows else ()), *failed)
        self.tables.update(plan.rows)
        loaded = {action.slot for action in plan.before if isinstance(action, RestoreCheckpoint)}
        if any(row.slot in loaded for row in plan.decode):  # else decode need not wait for what others go on from
            self.store.arrive()
        rows, replayed = self.graphs.outputs(plan.decode) if self.graphs is not None else ((), None)
        if self.graphs is None or replayed is None:
            return self._compute(plan, sampling)
        self._branch += [len(rows), *(row.slot for row in rows)]
        self._save_behind(rows, replayed.hidden_RH)
        drawn = self._draw(rows, sampling, replayed.logits_RV)
        places = {row.request_id: i for i, row in enumerate(rows)}
        others = tuple(row for row in plan.decode if row.request_id not in places)
        if plan.may_follow and not others:
            following = [plan.decode[i] for i in plan.may_follow]
            self._branch += [row.slot for row in following]
            self.graphs.run_ahead(following, [places[row.request_id] for row in following], drawn.tokens_R)
        rest = msgspec.structs.replace(plan, decode=others)
        beside = self._compute(rest, sampling) if rest.rows else ()
        chosen = drawn.collect()  # what is not finite in hidden states is not in logits
        return (*(chosen[row.request_id] for row in rows), *beside)

    def _compute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput]) -> tuple[RowResult, ...]:
        """All rows of the plan, launch by launch."""
        self.store.arrive()
        batch, staged = self._batch(plan)
        hidden_TH = self.model.hidden(batch, self.kv.backend, self.states)
        sampled = [row for row in plan.rows if row.sampled]
        drawn = self._draw(sampled, sampling, self.model.logits(hidden_TH[batch.logit_rows])) if sampled else None
        if self.drafts is not None:
            self.drafts.follow_prompts(plan.prefill, batch.prefill, hidden_TH)
        for item in staged:
            self.store.keep_checkpoint(item.checkpoint, item.tensors)
        chosen = drawn.collect() if drawn else {}
        kept = [_kept(row, chosen.get(row.request_id)) for row in plan.rows]
        held = zip(batch.decode, kept, strict=False)
        stay = [Kept(span.held, span.slot, count) for span, count in held if span.held is not None and count]
        if stay:
            self.model.commit(stay, self.states)
        chosen |= self._follow_rows(plan.decode, batch.decode, kept, hidden_TH, chosen, sampling)
        spans = [slice(span.offset, span.offset + count) for span, count in zip(batch.spans, kept, strict=True)]
        for row, span in zip(plan.prefill, batch.prefill, strict=True):
            self._stops[row.slot] = hidden_TH[span.rows.stop - 1].clone()
        whole = [i for i, row in enumerate(plan.decode) if kept[i] == len(row.tokens)]
        self._save_behind([plan.decode[i] for i in whole], [hidden_TH[spans[i].stop - 1] for i in whole])
        finite = _finite_spans(hidden_TH, spans)
        self._branch += [*kept, *map(int, finite)]
        rows = zip(plan.rows, batch.spans, finite, strict=True)
        return tuple(
            self._result(row, sampling, hidden_TH[span.rows], chosen.get(row.request_id))
            if sound
            else RowResult(row.request_id, error="the model produced values that are not finite")
            for row, span, sound in rows
        )

    def _follow_rows(
        self,
        rows: Sequence[Segment],
        spans: Sequence[Span],
        kept: Sequence[int],
        hidden_TH: Tensor,
        chosen: Mapping[str, RowResult],
        sampling: Mapping[str, SamplingInput],
    ) -> dict[str, RowResult]:
        """The draft layer sees what stays of decode rows. Returns the results of those for which it has guessed."""
        if self.drafts is None or not rows:
            return {}
        began = time.perf_counter()
        whole = zip(rows, spans, kept, strict=False)
        seen = [
            (row, n, hidden_TH[span.offset : span.offset + n], chosen.get(row.request_id)) for row, span, n in whole
        ]
        guesses = self.drafts.follow_rows([each for each in seen if each[1]], sampling)
        self._guessing = time.perf_counter() - began
        return {name: replace(chosen[name], proposed=tokens) for name, tokens in guesses.items()}

    def _save_behind(self, rows: Sequence[Segment], hidden_RH: Iterable[Tensor]) -> None:
        """Checkpoints at the end of decode rows are what their slots hold now."""
        for row, hidden_H in zip(rows, hidden_RH, strict=True):
            for save in row.saves:
                assert save.position == row.end, "a decode row is saved behind its last token"
                self._save_slot(row.slot, save, hidden_H)

    def _save_slot(self, slot: int, save: SavePoint, hidden_H: Tensor) -> None:
        """A checkpoint of what a slot holds now."""
        checkpoint = self.store.new_checkpoint(save.position)
        self.states.save(slot, checkpoint)
        self.kv.store.save_window(slot, checkpoint)
        if checkpoint.hidden_H is not None:
            checkpoint.hidden_H.copy_(hidden_H)
        self.store.keep_checkpoint(save.checkpoint, checkpoint)

    def _batch(self, plan: StepPlan) -> tuple[Batch, list[_Staged]]:
        device = self.device
        staged: list[_Staged] = []
        spans: list[Span] = []
        logit_rows: list[int] = []
        offset = 0
        for i, row in enumerate(plan.rows):
            inside = row.saves if i >= len(plan.decode) else ()
            saves = [_Staged(save.checkpoint, self.store.new_checkpoint(save.position)) for save in inside]
            staged += saves
            into = tuple(Save(each.tensors) for each in saves)
            held = None
            if row.drafts:
                held = Held(ends=None if any(span.held for span in spans) else [])  # the plan has room for one row's
            spans.append(Span(offset, len(row.tokens), row.start, row.slot, self.tables.of(row), into, held))
            offset += len(row.tokens)
            logit_rows += range(offset - row.sampled, offset)
        tokens = [token for row in plan.rows for token in row.tokens]
        batch = Batch(
            tokens_T=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions_T=positions_of(plan.rows).to(device),
            decode=tuple(spans[: len(plan.decode)]),
            prefill=tuple(spans[len(plan.decode) :]),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
            images=() if self.images is None else self.images.of(plan.rows),
        )
        return batch, staged

    def _draw(self, rows: Sequence[Segment], sampling: Mapping[str, SamplingInput], logits_RV: Tensor) -> Drawing:
        return self.chooser.draw(rows, sampling, logits_RV)

    def _result(
        self, row: Segment, sampling: Mapping[str, SamplingInput], hidden_NH: Tensor, chosen: RowResult | None
    ) -> RowResult:
        result = chosen or RowResult(row.request_id)
        if row.scored == 0:
            return result
        try:
            prompt = self._prompt_logprobs(row, sampling.get(row.request_id), hidden_NH[: row.scored])
        except Exception as error:
            failed = RowResult(row.request_id, error=f"the prompt's log-probabilities failed: {error}")
            return result if result.error else failed
        return result if result.error else replace(result, prompt_logprobs=prompt)

    def _prompt_logprobs(
        self, row: Segment, given: SamplingInput | None, hidden_NH: Tensor
    ) -> tuple[TokenLogprob, ...]:
        """Hidden state i of the segment predicts prompt token start + i + 1. Every rank computes all logits, whatever
        becomes of them; one that knows no wishes makes nothing of them."""
        found: list[TokenLogprob] = []
        failed: Exception | None = None
        for start in range(0, row.scored, HEAD_PIECE_ROWS):
            logits_RV = self.model.logits(hidden_NH[start : start + HEAD_PIECE_ROWS])
            if given is None or failed is not None:
                continue
            first = row.start + 1 + start
            try:
                targets = given.context[first : first + len(logits_RV)]
                found += logprobs_of(logits_RV, targets, given.sampling.prompt_logprobs or 0)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
        return tuple(found)

    def _apply(self, action: Action) -> None:
        if isinstance(action, ResetSlot | RestoreCheckpoint):
            self.tables.forget(action.slot)
            if self.graphs is not None:
                self.graphs.forget(action.slot)
        match action:
            case ResetSlot(slot):
                self.store.arrive()  # a slot may be given again before what was loaded for it has come
                self.states.reset(slot)
                self._begin_drafts(slot, 0)
            case RestoreCheckpoint(slot, checkpoint, position, sink):
                self.store.load(slot, checkpoint, sink)
                self._begin_drafts(slot, position)
            case SaveSlot(slot, checkpoint, position):
                self._save_slot(slot, SavePoint(position, checkpoint), self._stops[slot])
            case SaveSink(slot, sink):
                self.store.keep_sink(sink, slot)
            case DemotePages(pairs):
                self.store.keep_pages(pairs)
            case PromotePages(pairs):
                self.store.load_pages(pairs)
            case MovePages(pairs):
                self.store.arrive()
                for first in range(0, len(pairs), MOVED):
                    part = pairs[first : first + MOVED]
                    read = self.kv.store.read_pages([page for page, _ in part])
                    self.kv.store.write_pages([page for _, page in part], read)
            case Drop():
                self.store.drop(action)
            case EncodeImage() | ForgetImages():
                assert self.images is not None, "a plan names an image, and no tower is there"
                self.images.carry_out(action)
            case WriteRecords() | ReadRecords():
                assert self.disk is not None, "a plan names a disk that is not there"
                self.disk.carry_out(action)

    def _begin_drafts(self, slot: int, position: int) -> None:
        if self.drafts is not None:
            self.drafts.begin(slot, position)


def _kept(row: Segment, result: RowResult | None) -> int:
    """Tokens of a row that stay: of one with drafts as many as it has yielded, so none if it has failed or ended."""
    return len(result.tokens) if row.drafts and result is not None else len(row.tokens)


def _finite_spans(hidden_TH: Tensor, spans: Sequence[slice]) -> list[bool]:
    """Whether each span's hidden states are finite: what is not must not become a page that others hit."""
    finite_T = hidden_TH.sum(-1).isfinite()
    return torch.stack([finite_T[span].all() for span in spans]).tolist()


def positions_of(rows: Sequence[Segment]) -> Tensor:
    """Rope positions int64 [T], or [3, T] if a row has three of a token."""
    if all(len(row.rope_axes) == 1 for row in rows):
        return torch.tensor([position for row in rows for position in row.rope_axes[0]], dtype=torch.int64)
    return torch.tensor([[p for row in rows for p in row.rope_axes[axis % len(row.rope_axes)]] for axis in range(3)])


def touch(device: torch.device) -> None:
    """Compute something. Raises RuntimeError on a GPU that is lost (after an illegal access every call fails): then the
    engine has to end and be started again, instead of failing every request for ever."""
    if torch.zeros(1, device=device).add_(1).item() != 1:
        raise RuntimeError(f"{device} computes nonsense")
