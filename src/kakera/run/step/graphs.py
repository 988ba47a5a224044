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

import torch
from torch import Tensor

from kakera.contract.step import Segment
from kakera.kv.batch import Batch, SingleTokens, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.run.step.page_tables import PageTables
from kakera.target.as_torch import target_of

MOST_ROWS = 32  # a graph for each number of rows; more rows, which are bound by arithmetic, are launched one by one


class ForwardOutput(NamedTuple):
    """Hidden states [R, H] and logits [R, vocabulary] of some rows, valid until the next replay."""

    hidden_RH: Tensor
    logits_RV: Tensor


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: ForwardOutput


_Key = tuple[str, int, int]  # of a row in a step: request, slot, start


class DecodeGraphs:
    """The graphs of one model on one device, and their inputs, which lie where they were captured."""

    def __init__(self, kv: KVCache, states: StatePool, tables: PageTables):
        self._kv, self._states, self._tables_SP = kv, states, tables.ids_SP
        slots, device = len(tables.ids_SP), tables.ids_SP.device
        self._numbers_4R = torch.zeros(4, slots, dtype=torch.int64, device=device)  # tokens, rope, starts, slots
        pinned = target_of(device).has_cards
        # two are sent between waits; one that is on its way must not be written
        self._hosts = cycle([torch.zeros(4, slots, dtype=torch.int64, pin_memory=pinned) for _ in range(4)])
        self._stream: torch.cuda.Stream | None = None  # of captures
        self._captured: list[_Captured] = []
        self._ahead: dict[_Key, int] = {}  # rows of the step that runs ahead, and which of `_found` each is
        self._found: ForwardOutput | None = None

    @torch.inference_mode()
    def capture(self, model: HybridModel, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture them all, the largest first, so that the others fit into its memory; outputs, which outlive a replay,
        lie in one place for all (a place each: 524 MB for 32 rows of 248,320 logits). Slots and pages are overwritten:
        nothing may run yet."""
        device, most = self._tables_SP.device, min(len(self._tables_SP), MOST_ROWS)
        self._numbers_4R[3] = torch.arange(len(self._tables_SP), device=device)
        if self._stream is None:  # one for ever: libraries keep a workspace for each stream
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        captured: list[_Captured] = []
        pool = into = None
        for count in range(most, 0, -1):
            with torch.cuda.stream(stream):
                passed = self._pass(model, count)  # loads what is not loaded yet, which a capture can not
                into = into or ForwardOutput(*(torch.empty_like(tensor) for tensor in passed))
            del passed
            graph, outputs = torch.cuda.CUDAGraph(), ForwardOutput(*(tensor[:count] for tensor in into))
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                for to, tensor in zip(outputs, self._pass(model, count), strict=True):
                    to.copy_(tensor)
            pool = graph.pool()
            captured.append(_Captured(graph, outputs))
            if progress is not None:
                progress(len(captured), most)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._captured = captured[::-1]

    def release(self) -> None:
        """Have no graphs, until the next capture; none may be running."""
        self._captured, self._ahead, self._found = [], {}, None

    @property
    def rows(self) -> int:
        """Of the largest step that has a graph."""
        return len(self._captured)

    def outputs(self, rows: Sequence[Segment]) -> tuple[Sequence[Segment], ForwardOutput | None]:
        """Of a step's decode rows: by the replay that ran ahead, or by one now. Returns for which rows, and their
        outputs in the same order; the others have no graph. Waits for nothing; all replays before must have been
        waited for. What ran ahead of a row that is not here is void."""
        ahead, self._ahead = self._ahead, {}
        followed = [row for row in rows if _key(row) in ahead]
        late = [row for row in rows if _key(row) not in ahead]
        fits = 0 < len(late) <= self.rows and all(len(row.tokens) == 1 for row in late)
        if not followed:
            return (late, self._replay(late)) if fits else ((), None)
        found = self._taken([ahead[_key(row)] for row in followed], fits)
        if not fits:
            return followed, found
        replayed = self._replay(late)
        return [*followed, *late], ForwardOutput(*(torch.cat(pair) for pair in zip(found, replayed, strict=True)))

    def _taken(self, places: list[int], copied: bool) -> ForwardOutput:
        """These of the outputs that ran ahead; `copied`: they outlive the next replay."""
        found = self._found
        assert found is not None
        if places == list(range(len(found.hidden_RH))) and not copied:
            return found
        index_R = torch.tensor(places, device=found.hidden_RH.device)
        return ForwardOutput(found.hidden_RH[index_R], found.logits_RV[index_R])

    def run_ahead(self, rows: Sequence[Segment], places: list[int], tokens_R: Tensor) -> None:
        """Launch the step behind `rows`, which are among those whose outputs were the last taken; the token chosen from
        row i's is tokens_R[places[i]]. Does nothing without a graph of so many."""
        if len(rows) > self.rows:
            return
        numbers = zip(places, rows, strict=True)
        self._send_numbers([(i, row.rope_axes[0][0] + 1, row.start + 1, row.slot) for i, row in numbers])
        into_R = self._numbers_4R[0, : len(rows)]
        into_R.copy_(tokens_R if places == list(range(len(tokens_R))) else tokens_R[into_R])
        captured = self._captured[len(rows) - 1]
        captured.graph.replay()
        self._found = captured.outputs
        self._ahead = {(row.request_id, row.slot, row.start + 1): i for i, row in enumerate(rows)}

    def _replay(self, rows: Sequence[Segment]) -> ForwardOutput:
        self._send_numbers([(row.tokens[0], row.rope_axes[0][0], row.start, row.slot) for row in rows])
        captured = self._captured[len(rows) - 1]
        captured.graph.replay()
        return captured.outputs

    def _send_numbers(self, numbers_R4: list[tuple[int, int, int, int]]) -> None:
        host_4R = next(self._hosts)
        host_4R[:, : len(numbers_R4)] = torch.tensor(numbers_R4).t()
        self._numbers_4R.copy_(host_4R, non_blocking=True)

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
        """The slot gets another content: what ran ahead is void."""
        self._ahead = {key: place for key, place in self._ahead.items() if key[1] != slot}

    def _pass(self, model: HybridModel, count: int) -> ForwardOutput:
        tokens_R, rope_R, starts_R, slots_R = self._numbers_4R[:, :count]
        singles = SingleTokens(starts_R, slots_R, self._tables_SP.index_select(0, slots_R))
        spans = tuple(Span(i, 1, 0, i, slots_R) for i in range(count))  # read for their number: `Batch.singles`
        batch = Batch(tokens_R, rope_R, decode=spans, prefill=(), logit_rows=slots_R, singles=singles)
        hidden_RH = model.hidden(batch, self._kv.backend, self._states)
        return ForwardOutput(hidden_RH, model.logits(hidden_RH))


def _key(row: Segment) -> _Key:
    return row.request_id, row.slot, row.start
