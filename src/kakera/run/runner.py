"""TorchRunner: carries out step plans with a model, a KV cache, live states and the host store. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kakera.constrain.compiler import GrammarFailed
from kakera.constrain.output import Outputs, grammar_failure
from kakera.contract.events import TokenLogprob
from kakera.contract.step import (
    Action,
    DemotePages,
    Drop,
    PromotePages,
    ResetSlot,
    RestoreCheckpoint,
    Row,
    RowResult,
    SaveSink,
    StepPlan,
    StepResult,
)
from kakera.kv.batch import Batch, CheckpointTensors, Save, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.plan.sizes import HEAD_PIECE_ROWS
from kakera.run.graphs import DecodeGraphs
from kakera.run.logprobs import logprobs_of
from kakera.run.sampler import Launched, Sampled, collect, launch
from kakera.run.sampling_wishes import NO_WISH, Wish, wish_of
from kakera.run.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Staged:
    """A checkpoint that the layers fill during this step."""

    checkpoint: int
    tensors: CheckpointTensors


@dataclass(frozen=True)
class _Drawn:
    """Tokens on their way; a result in place of a wish stands for a row that gets none."""

    rows: tuple[Row, ...]
    wishes: tuple[Wish | RowResult, ...]
    launched: Launched


class TorchRunner:
    def __init__(
        self,
        model: HybridModel,
        kv: KVCache,
        states: StatePool,
        store: Store,
        outputs: Outputs,
        graphs: DecodeGraphs | None = None,
    ):
        """`graphs`: for decode steps."""
        self.model = model
        self.kv = kv
        self.states = states
        self.store = store
        self.outputs = outputs
        self.graphs = graphs
        self.device = states.state_LSVKD.device

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A forward pass that raises fails every row of the step, because their live states may have been
        updated in some layers and not in others; requests without a row in it go on. A row that fails behind the
        layers (values that are not finite, sampling, echo) fails alone. Raises if the device does not compute any more.
        """
        began = time.perf_counter()
        for action in plan.before:
            self._apply(action)
        results: tuple[RowResult, ...] = ()
        if plan.rows:
            try:
                results = self._forward(plan)
            except Exception as error:  # whatever it is: the engine outlives it, and says so
                log.exception("step %d failed", plan.step)
                touch(self.device)
                text = f"the engine could not compute this step: {error}"
                results = tuple(RowResult(row.request_id, error=text) for row in plan.rows)
        self.store.arrive()
        for action in plan.after:
            self._apply(action)
        return StepResult(plan.step, results, time.perf_counter() - began)

    def _forward(self, plan: StepPlan) -> tuple[RowResult, ...]:
        loaded = {action.slot for action in plan.before if isinstance(action, RestoreCheckpoint)}
        if any(row.slot in loaded for row in plan.decode):  # else decode need not wait for what others go on from
            self.store.arrive()
        replayed = self.graphs.outputs(plan.decode) if self.graphs is not None else None
        if self.graphs is None or replayed is None:
            return self._compute(plan)
        self._save_behind(plan.decode, replayed.hidden_RH)
        drawn = self._draw(plan.decode, replayed.logits_RV)
        if plan.prefill:
            beside = self._compute(replace(plan, decode=()))
        else:
            beside = ()
            self.graphs.run_ahead(plan.decode, drawn.launched.tokens_R)
        chosen = self._collect(drawn)  # what is not finite in hidden states is not in logits
        return (*(chosen[row.request_id] for row in plan.decode), *beside)

    def _compute(self, plan: StepPlan) -> tuple[RowResult, ...]:
        """All rows of the plan, launch by launch."""
        self.store.arrive()
        batch, staged = self._batch(plan)
        hidden_TH = self.model.hidden(batch, self.kv.backend, self.states)
        sampling = [row for row in plan.rows if row.sample]
        drawn = self._draw(sampling, self.model.logits(hidden_TH[batch.logit_rows])) if sampling else None
        for item in staged:
            self.store.keep_checkpoint(item.checkpoint, item.tensors)
        self._save_behind(plan.decode, [hidden_TH[span.offset + span.count - 1] for span in batch.decode])
        chosen = self._collect(drawn) if drawn else {}
        finite = _finite_spans(hidden_TH, batch.spans)
        rows = zip(plan.rows, batch.spans, finite, strict=True)
        return tuple(
            self._result(row, hidden_TH[span.rows], chosen.get(row.request_id))
            if sound
            else RowResult(row.request_id, error="the model produced values that are not finite")
            for row, span, sound in rows
        )

    def _save_behind(self, rows: Sequence[Row], hidden_RH: Iterable[Tensor]) -> None:
        """Checkpoints at the end of decode rows are what their slots hold now."""
        for row, hidden_H in zip(rows, hidden_RH, strict=True):
            for save in row.saves:
                if save.position == row.end:
                    checkpoint = self.store.new_checkpoint(save.position)
                    self.states.save(row.slot, checkpoint)
                    self.kv.store.save_window(row.slot, checkpoint)
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
            inside = [save for save in row.saves if i >= len(plan.decode) or save.position < row.end]
            saves = [_Staged(save.checkpoint, self.store.new_checkpoint(save.position)) for save in inside]
            staged += saves
            pages = torch.from_numpy(np.array(row.pages, dtype=np.int64)).to(device)
            spans.append(
                Span(offset, len(row.tokens), row.start, row.slot, pages, tuple(Save(s.tensors) for s in saves))
            )
            offset += len(row.tokens)
            if row.sample:
                logit_rows.append(offset - 1)
        tokens = [token for row in plan.rows for token in row.tokens]
        positions = [p for row in plan.rows for p in range(row.start, row.start + len(row.tokens))]
        batch = Batch(
            tokens_T=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
            decode=tuple(spans[: len(plan.decode)]),
            prefill=tuple(spans[len(plan.decode) :]),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )
        return batch, staged

    def _draw(self, rows: Sequence[Row], logits_RV: Tensor) -> _Drawn:
        """Queue the choice of tokens; waits for nothing."""
        wishes = tuple(self._wish(row, logits_RV.shape[-1]) for row in rows)
        known = [NO_WISH if isinstance(wish, RowResult) else wish for wish in wishes]
        return _Drawn(tuple(rows), wishes, launch(known, logits_RV))

    def _collect(self, drawn: _Drawn) -> dict[str, RowResult]:
        """Request id -> its token, or the error text if this row alone can not be sampled."""
        found = zip(drawn.rows, drawn.wishes, collect(drawn.launched), strict=True)
        return {
            row.request_id: wish if isinstance(wish, RowResult) else self._took(row, sampled)
            for row, wish, sampled in found
        }

    def _wish(self, row: Row, vocabulary: int) -> Wish | RowResult:
        """A row whose grammar can not say what it allows fails; nothing is ever sampled without its mask."""
        try:
            allowed = self.outputs.allowed(row)
            return RowResult(row.request_id, complete=True) if allowed is None else wish_of(row, allowed, vocabulary)
        except GrammarFailed as error:
            return grammar_failure(row, error)
        except Exception as error:  # one request's wishes must not end the others
            return RowResult(row.request_id, error=f"sampling failed: {error}")

    def _took(self, row: Row, sampled: Sampled) -> RowResult:
        if sampled.error:
            return RowResult(row.request_id, error=f"sampling failed: {sampled.error}")
        try:
            complete = self.outputs.took(row, sampled.token)
        except GrammarFailed as error:
            return grammar_failure(row, error)
        except Exception as error:
            return RowResult(row.request_id, error=f"sampling failed: {error}")
        logprobs = (sampled.logprob,) if sampled.logprob else ()
        return RowResult(row.request_id, (sampled.token,), logprobs, complete=complete)

    def _result(self, row: Row, hidden_NH: Tensor, chosen: RowResult | None) -> RowResult:
        if chosen is not None and chosen.error:
            return chosen
        try:
            prompt = self._prompt_logprobs(row, hidden_NH)
        except Exception as error:
            return RowResult(row.request_id, error=f"the prompt's log-probabilities failed: {error}")
        return replace(chosen or RowResult(row.request_id), prompt_logprobs=prompt)

    def _prompt_logprobs(self, row: Row, hidden_NH: Tensor) -> tuple[TokenLogprob, ...]:
        """Row i of the segment predicts prompt token start + i + 1."""
        wanted = row.sampling.prompt_logprobs
        if wanted is None:
            return ()
        targets = row.context[row.start + 1 : min(row.start + len(row.tokens) + 1, row.prompt_tokens)]
        found: list[TokenLogprob] = []
        for piece in range(0, len(targets), HEAD_PIECE_ROWS):
            logits_RV = self.model.logits(hidden_NH[piece : min(piece + HEAD_PIECE_ROWS, len(targets))])
            found += logprobs_of(logits_RV, targets[piece : piece + HEAD_PIECE_ROWS], wanted)
        return tuple(found)

    def _apply(self, action: Action) -> None:
        if self.graphs is not None and isinstance(action, ResetSlot | RestoreCheckpoint):
            self.graphs.forget(action.slot)
        match action:
            case ResetSlot(slot):
                self.store.arrive()  # a slot may be given again before what was loaded for it has come
                self.states.reset(slot)
            case RestoreCheckpoint(slot, checkpoint, _, sink):
                self.store.load(slot, checkpoint, sink)
            case SaveSink(slot, sink):
                self.store.keep_sink(sink, slot)
            case DemotePages(pairs):
                self.store.keep_pages(pairs)
            case PromotePages(pairs):
                self.store.load_pages(pairs)
            case Drop():
                self.store.drop(action)


def _finite_spans(hidden_TH: Tensor, spans: Sequence[Span]) -> list[bool]:
    """Whether each span's hidden states are finite: what is not must not become a page that others hit."""
    finite_T = hidden_TH.sum(-1).isfinite()
    return torch.stack([finite_T[span.rows].all() for span in spans]).tolist()


def touch(device: torch.device) -> None:
    """Compute something. Raises RuntimeError on a GPU that is lost (after an illegal access every call fails): then the
    engine has to end and be started again, instead of failing every request for ever."""
    if torch.zeros(1, device=device).add_(1).item() != 1:
        raise RuntimeError(f"{device} computes nonsense")
