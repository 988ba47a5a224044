"""Decode steps as CUDA graphs: one for each number of rows, captured at start, replayed with other rows in them.

A step of the 27B is a thousand launches of a few microseconds. Launched one by one they take a CPU longer than the
card; as one graph they follow each other without a gap. Nor does the card wait between steps: the next one is launched
with tokens that the host has not seen yet, and whoever goes on finds it done. A request that ends has had one step too
many, whose traces nobody reads: they lie in its slot, and in its last page behind its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.contract.step import Row
from kakera.kv.batch import Batch, SingleTokens, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool

MOST_ROWS = 32  # a graph for each number of rows; more rows, which are bound by arithmetic, are launched one by one


class Outputs(NamedTuple):
    """Hidden states [R, H] and logits [R, vocabulary] of some rows, valid until the next replay."""

    hidden_RH: Tensor
    logits_RV: Tensor


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: Outputs


_Key = tuple[str, int, int]  # of a row in a step: request, slot, start


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
        pinned = device.type == "cuda"
        # two are sent between waits; one that is on its way must not be written
        self._hosts = cycle([torch.zeros(3, slots, dtype=torch.int64, pin_memory=pinned) for _ in range(4)])
        self._in_table: list[tuple[str, int]] = [("", 0)] * slots  # request and number of pages
        self._captured: list[_Captured] = []
        self._ahead: dict[_Key, int] = {}  # rows of the step that runs ahead, and which of `_found` each is
        self._found: Outputs | None = None

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture them all, the largest first, so that the others fit into its memory; outputs, which outlive a replay,
        lie in one place for all (a place each: 524 MB for 32 rows of 248,320 logits). Slots and pages are overwritten:
        nothing may run yet."""
        device, most = self._tables_SP.device, min(len(self._tables_SP), MOST_ROWS)
        self._numbers_3R[2] = torch.arange(len(self._tables_SP), device=device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        captured: list[_Captured] = []
        pool = into = None
        for count in range(most, 0, -1):
            with torch.cuda.stream(stream):
                passed = self._pass(count)  # loads what is not loaded yet, which a capture can not
                into = into or Outputs(*(torch.empty_like(tensor) for tensor in passed))
            del passed
            graph, outputs = torch.cuda.CUDAGraph(), Outputs(*(tensor[:count] for tensor in into))
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                for to, tensor in zip(outputs, self._pass(count), strict=True):
                    to.copy_(tensor)
            pool = graph.pool()
            captured.append(_Captured(graph, outputs))
            if progress is not None:
                progress(len(captured), most)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._captured = captured[::-1]

    @property
    def rows(self) -> int:
        """Of the largest step that has a graph."""
        return len(self._captured)

    def outputs(self, rows: Sequence[Row]) -> Outputs | None:
        """Of a step's decode rows, by a replay, or by the one that ran ahead; None if no graph is for such rows. Waits
        for nothing; all replays before must have been waited for. Raises RuntimeError if only some rows ran ahead."""
        ahead, self._ahead = self._ahead, {}
        if not 0 < len(rows) <= self.rows or any(len(row.tokens) != 1 for row in rows):
            return None
        places = [ahead.get((row.request_id, row.slot, row.start)) for row in rows]
        if all(place is None for place in places):
            return self._replay(rows)
        found = self._found
        assert found is not None
        if places == list(range(len(found.hidden_RH))):
            return found
        if None in places:  # their states are ahead: neither can be computed again, and no scheduler asks for it
            raise RuntimeError(f"{places.count(None)} of {len(rows)} decode rows did not run ahead with the others")
        index_R = torch.tensor(places, device=found.hidden_RH.device)
        return Outputs(found.hidden_RH[index_R], found.logits_RV[index_R])

    def run_ahead(self, rows: Sequence[Row], tokens_R: Tensor) -> None:
        """Launch the step behind `rows`, whose outputs were the last taken, with the tokens [R] chosen from them. Does
        nothing if a row needs a page that it does not have yet, or if all of them end by their length now."""
        ends = [len(row.context) + 1 - row.prompt_tokens >= row.sampling.max_tokens for row in rows]
        if all(ends) or any((row.start + 1) // PAGE >= len(row.pages) for row in rows):
            return
        self._send_numbers([(0, row.start + 1, row.slot) for row in rows])
        self._numbers_3R[0, : len(rows)] = tokens_R
        captured = self._captured[len(rows) - 1]
        captured.graph.replay()
        self._found = captured.outputs
        self._ahead = {(row.request_id, row.slot, row.start + 1): i for i, row in enumerate(rows)}

    def _replay(self, rows: Sequence[Row]) -> Outputs:
        for row in rows:
            self._send_table(row)
        self._send_numbers([(row.tokens[0], row.start, row.slot) for row in rows])
        captured = self._captured[len(rows) - 1]
        captured.graph.replay()
        return captured.outputs

    def _send_numbers(self, numbers_R3: list[tuple[int, int, int]]) -> None:
        host_3R = next(self._hosts)
        host_3R[:, : len(numbers_R3)] = torch.tensor(numbers_R3).t()
        self._numbers_3R.copy_(host_3R, non_blocking=True)

    def _send_table(self, row: Row) -> None:
        known = (row.request_id, len(row.pages))
        if self._in_table[row.slot] != known:
            pages_P = np.array(row.pages, dtype=np.int32)
            self._tables_SP[row.slot, : len(pages_P)] = torch.from_numpy(pages_P).to(self._tables_SP.device)
            self._in_table[row.slot] = known

    def seconds(self, rows: int, repeats: int = 20) -> float:
        """Of the device for one replay with `rows` rows, one after the other: for benchmarks, because it takes every
        row's state out of step with its text."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        for _ in range(repeats):
            self._captured[rows - 1].graph.replay()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3 / repeats

    def forget(self, slot: int) -> None:
        """The slot gets another content: its pages may be others under the same name, and what ran ahead is void."""
        self._in_table[slot] = ("", 0)
        self._ahead = {key: place for key, place in self._ahead.items() if key[1] != slot}

    def _pass(self, count: int) -> Outputs:
        tokens_R, starts_R, slots_R = self._numbers_3R[:, :count]
        singles = SingleTokens(starts_R, slots_R, self._tables_SP.index_select(0, slots_R))
        spans = tuple(Span(i, 1, 0, i, slots_R) for i in range(count))  # read for their number: `Batch.singles`
        batch = Batch(tokens_R, starts_R, decode=spans, prefill=(), logit_rows=slots_R, singles=singles)
        hidden_RH = self._model.hidden(batch, self._kv.backend, self._states)
        return Outputs(hidden_RH, self._model.logits(hidden_RH))
