"""Gated DeltaNet between its projections by kernels: decode rows in one launch a layer, prefill spans one by one.

Reference: the plain operations of `gdn_plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.kv.batch import Batch, Kept, Save, Span
from kakera.model.state import StatePool, save_layer
from kakera.model.weights import GdnWeights
from kakera.ops.gdn_step import StepRows, gdn_step


class _Row(NamedTuple):
    """Some tokens of a decode span. Behind `commits` of them the slot's state is stored, and saved."""

    slot: int
    tokens: slice  # of the batch
    commits: int
    saves: Sequence[Save]


@dataclass(frozen=True)
class _Launch:
    """What one launch computes, and which saves find their state in a slot behind it."""

    tokens: slice  # of the batch
    rows: StepRows
    saves: tuple[tuple[int, Save], ...]  # slot, save


@dataclass(frozen=True)
class KernelCore:
    spec: GdnSpec
    eps: float
    capturable = True

    def plan(self, batch: Batch, states: StatePool) -> KernelPass:
        return KernelPass(self.spec, self.eps, states, _launches(batch, self.spec.k_heads), batch.prefill)

    def commit(self, layer: int, weights: GdnWeights, kept: Sequence[tuple[Kept, Tensor]], states: StatePool) -> None:
        """By the launch of decode rows, whose outputs nobody reads."""
        rows: list[_Row] = []
        for each, _ in kept:
            begin = rows[-1].tokens.stop if rows else 0
            rows.append(_Row(each.slot, slice(begin, begin + each.count), each.count, ()))
        mixed_TX = torch.cat([mixed_NX for _, mixed_NX in kept])
        launch = _launch(rows, self.spec.k_heads, mixed_TX.device)
        live = states.state_LSVKD[layer], states.conv_LSWC[layer]
        gdn_step(mixed_TX, weights, self.spec, self.eps, launch.rows, *live)


@dataclass(frozen=True)
class KernelPass:
    """How the spans of a batch go through every layer. `launches`: of all decode rows, then of parts of those that are
    saved on their way."""

    spec: GdnSpec
    eps: float
    states: StatePool
    launches: tuple[_Launch, ...]
    prefill: tuple[Span, ...]

    def run(self, layer: int, weights: GdnWeights, mixed_TX: Tensor) -> Tensor:
        state_SVKD, conv_SWC = self.states.state_LSVKD[layer], self.states.conv_LSWC[layer]
        outputs: list[Tensor] = []
        for launch in self.launches:
            mixed_RX = mixed_TX[launch.tokens]
            y_RI = gdn_step(mixed_RX, weights, self.spec, self.eps, launch.rows, state_SVKD, conv_SWC)
            if not outputs:  # the first has the outputs of all rows
                outputs.append(y_RI)
            for slot, save in launch.saves:
                save_layer(save.into, layer, state_SVKD[slot], conv_SWC[slot])
        for span in self.prefill:
            outputs.append(self._prefill(weights, mixed_TX[span.rows], layer, span))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _prefill(self, weights: GdnWeights, mixed_NX: Tensor, layer: int, span: Span) -> Tensor:
        from kakera.ops.gdn_prefill import StateSave, gdn_prefill  # Triton comes with CUDA builds of torch only

        saves = [
            StateSave(save.position - span.start, save.into.state_LVKD[layer], save.into.conv_LCW[layer])
            for save in span.saves
            if save.into.state_LVKD is not None and save.into.conv_LCW is not None
        ]
        live = self.states.state_LSVKD[layer, span.slot], self.states.conv_LSWC[layer, span.slot]
        return gdn_prefill(mixed_NX, weights, self.spec, self.eps, *live, saves)


def _launches(batch: Batch, key_heads: int) -> tuple[_Launch, ...]:
    """One of all rows, which stores a row's state behind its first save, or behind its last token if none is on the
    way; then, from there, one for each part of a row up to its next save or its end."""
    if not batch.decode:
        return ()
    tokens = slice(0, batch.decode_tokens)
    if batch.singles is not None:  # in operations of the device alone, so that a graph can capture them
        slots_R, count = batch.singles.slots_R.int(), len(batch.decode)
        offsets = torch.arange(count + 1, dtype=torch.int32, device=batch.device)
        ones_R = torch.ones(count, dtype=torch.int32, device=batch.device)
        arrived = torch.zeros(count, key_heads, dtype=torch.int32, device=batch.device)
        return (_Launch(tokens, StepRows(offsets, slots_R, ones_R, arrived), ()),)
    first: list[_Row] = []
    later: list[_Row] = []
    for span in batch.decode:
        for part, saves in span.parts():
            stop = part.stop if part.start else span.count
            tokens = slice(span.offset + part.start, span.offset + stop)
            row = _Row(span.slot, tokens, 0 if span.held is not None else part.stop - part.start, saves)
            (later if part.start else first).append(row)
    return tuple(_launch(rows, key_heads, batch.device) for rows in (first, *([row] for row in later)))


def _launch(rows: Sequence[_Row], key_heads: int, device: torch.device) -> _Launch:
    """Rows whose tokens lie behind each other."""
    slots_R, commits_R = torch.tensor(
        [[row.slot for row in rows], [row.commits for row in rows]], dtype=torch.int32, device=device
    )
    ends = accumulate(row.tokens.stop - row.tokens.start for row in rows)
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    arrived = torch.zeros(len(rows), key_heads, dtype=torch.int32, device=device)
    saves = tuple((row.slot, save) for row in rows for save in row.saves)
    return _Launch(
        slice(rows[0].tokens.start, rows[-1].tokens.stop), StepRows(offsets, slots_R, commits_R, arrived), saves
    )
