"""Decode steps as CUDA graphs: one for each number of rows, captured at start, replayed with other rows in them.

A step of the 27B is some eight hundred launches of a few microseconds. Launched one by one they take a CPU longer than
the card; as one graph they follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kakera.kv.cache import KVCache
from kakera.model.batch import Batch, SingleTokens, Span
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.schedule.step import Row, StepPlan

MOST_ROWS = 32  # a graph for each number of rows; more rows, which are bound by arithmetic, are launched one by one


@dataclass(frozen=True)
class _Captured:
    """A graph and what it leaves: hidden states [R, H] and logits [R, vocabulary], overwritten by the next replay."""

    graph: torch.cuda.CUDAGraph
    hidden_RH: Tensor
    logits_RV: Tensor


class DecodeGraphs:
    """The graphs of one model on one device, and their inputs, which lie where they were captured.

    The page table of a slot stays on the device; it is sent again when a page is added to it.
    """

    def __init__(
        self, model: HybridModel, kv: KVCache, states: StatePool, slots: int, pages: int, device: torch.device
    ):
        """`pages`: of the longest request."""
        self._model, self._kv, self._states = model, kv, states
        self._tables_SP = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self._numbers_3R = torch.zeros(3, slots, dtype=torch.int64, device=device)  # tokens, starts, slots
        self._host_3R = torch.zeros(3, slots, dtype=torch.int64, pin_memory=True)
        self._in_table: list[tuple[str, int]] = [("", 0)] * slots  # request and number of pages
        self._captured: list[_Captured] = []

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture them all, the largest first, so that the others fit into its memory. Slots and pages are overwritten:
        nothing may run yet."""
        device, most = self._tables_SP.device, min(len(self._tables_SP), MOST_ROWS)
        self._numbers_3R[2] = torch.arange(len(self._tables_SP), device=device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        captured: list[_Captured] = []
        pool = None
        for count in range(most, 0, -1):
            with torch.cuda.stream(stream):
                self._pass(count)  # loads what is not loaded yet, which a capture can not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden_RH, logits_RV = self._pass(count)
            pool = graph.pool()
            captured.append(_Captured(graph, hidden_RH, logits_RV))
            if progress is not None:
                progress(len(captured), most)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._captured = captured[::-1]

    def takes(self, plan: StepPlan) -> bool:
        single = all(len(row.tokens) == 1 for row in plan.decode)
        return not plan.prefill and single and 0 < len(plan.decode) <= len(self._captured)

    def replay(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of the rows' tokens, valid until the next replay. Waits for nothing; the replay
        before must have been waited for."""
        for row in rows:
            self._send_table(row)
        count = len(rows)
        self._host_3R[:, :count] = torch.tensor([(row.tokens[0], row.start, row.slot) for row in rows]).t()
        self._numbers_3R.copy_(self._host_3R, non_blocking=True)
        captured = self._captured[count - 1]
        captured.graph.replay()
        return captured.hidden_RH, captured.logits_RV

    def _send_table(self, row: Row) -> None:
        known = (row.request_id, len(row.pages))
        if self._in_table[row.slot] != known:
            pages_P = np.array(row.pages, dtype=np.int32)
            self._tables_SP[row.slot, : len(pages_P)] = torch.from_numpy(pages_P).to(self._tables_SP.device)
            self._in_table[row.slot] = known

    def forget(self, slot: int) -> None:
        """The slot gets another content: its pages may be others under the same name."""
        self._in_table[slot] = ("", 0)

    def _pass(self, count: int) -> tuple[Tensor, Tensor]:
        tokens_R, starts_R, slots_R = self._numbers_3R[:, :count]
        singles = SingleTokens(starts_R, slots_R, self._tables_SP.index_select(0, slots_R))
        spans = tuple(Span(i, 1, 0, i, slots_R) for i in range(count))  # read for their number: `Batch.singles`
        batch = Batch(tokens_R, starts_R, decode=spans, prefill=(), logit_rows=slots_R, singles=singles)
        hidden_RH = self._model.hidden(batch, self._kv, self._states)
        return hidden_RH, self._model.logits(hidden_RH)
