"""Where tokens of decode rows go, and what the rows read: int32 tensors of the device, the same for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kakera.contract.grid import PAGE
from kakera.kv.batch import SingleTokens, Span
from kakera.kv.gpu.decode import COLUMNS, DecodeRows
from kakera.kv.gpu.write import Places

ROW_TOKENS = COLUMNS  # a longer decode span goes as several rows, which read the same pages


@dataclass(frozen=True)
class DecodeLayout:
    """The decode spans of a batch: places of their tokens, and rows in launches, each with the token it begins at."""

    places: Places
    rows: Sequence[tuple[int, DecodeRows]]

    @staticmethod
    def of_singles(singles: SingleTokens, window_pages: int) -> DecodeLayout:
        """In operations of the device alone, so that a graph can capture them."""
        page_R, slot_R = singles.starts_R // PAGE, singles.slots_R
        id_R = singles.tables_RP.gather(1, page_R[:, None])[:, 0]
        ring = window_pages + 2
        half_R = slot_R * ring + page_R % ring if window_pages else id_R
        places = Places.of(id_R, half_R, torch.where(page_R == 0, slot_R, -1), singles.starts_R % PAGE)
        count = len(slot_R)
        offsets = torch.arange(count + 1, dtype=torch.int32, device=slot_R.device)
        rows = DecodeRows(singles.starts_R.int(), offsets, slot_R.int(), singles.tables_RP, 1, count)
        return DecodeLayout(places, [(0, rows)])

    @staticmethod
    def of_spans(spans: Sequence[Span], window_pages: int, most: int) -> DecodeLayout:
        """At most `most` rows in a launch."""
        device = spans[0].pages.device
        positions = [(span, position) for span in spans for position in range(span.start, span.end)]
        id_T = torch.stack([span.pages[position // PAGE] for span, position in positions])
        ring = window_pages + 2
        halves = [span.slot * ring + position // PAGE % ring for span, position in positions]
        sinks = [span.slot if position < PAGE else -1 for span, position in positions]
        offsets = [position % PAGE for _, position in positions]
        half_T, sink_T, offset_T = torch.tensor([halves, sinks, offsets], device=device)
        places = Places.of(id_T, half_T if window_pages else id_T, sink_T, offset_T)
        rows = [
            (span, start, min(ROW_TOKENS, span.end - start))
            for span in spans
            for start in range(span.start, span.end, ROW_TOKENS)
        ]
        launches: list[tuple[int, DecodeRows]] = []
        token = 0
        for begin in range(0, len(rows), most):
            part = rows[begin : begin + most]
            launches.append((token, _rows(part, device)))
            token += sum(count for _, _, count in part)
        return DecodeLayout(places, launches)


def _rows(rows: Sequence[tuple[Span, int, int]], device: torch.device) -> DecodeRows:
    counts = [count for _, _, count in rows]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    tables_RP = torch.nn.utils.rnn.pad_sequence([span.pages for span, _, _ in rows], batch_first=True)
    starts_R, slots_R = torch.tensor([[start for _, start, _ in rows], [span.slot for span, _, _ in rows]]).int()
    return DecodeRows(
        starts_R.to(device), offsets.int().to(device), slots_R.to(device), tables_RP.int(), max(counts), sum(counts)
    )
