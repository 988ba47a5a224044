"""PageTables: which pages hold a slot's tokens, kept on the device and changed by what plans say is new."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kakera.contract.step import Segment


class PageTables:
    """ids_SP: int32 [slots, pages of the longest request]; never moves, so that captured graphs can read it. Entries
    behind a slot's own are valid ids of whatever page."""

    def __init__(self, slots: int, pages: int, device: torch.device):
        self.ids_SP = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self._filled = [0] * slots

    def update(self, rows: Iterable[Segment]) -> None:
        """Raises RuntimeError, before anything is changed, for a row that builds on entries which its slot lacks."""
        changed = [row for row in rows if row.new_pages or row.known_pages != self._filled[row.slot]]
        for row in changed:
            if row.known_pages > self._filled[row.slot] or row.known_pages + len(row.new_pages) < row.page_count:
                raise RuntimeError(
                    f"step plan: {row.request_id} needs {row.page_count} pages and brings {len(row.new_pages)} behind "
                    f"{row.known_pages}, but slot {row.slot} has {self._filled[row.slot]}"
                )
        for row in changed:
            end = row.known_pages + len(row.new_pages)
            if row.new_pages:
                new_P = torch.tensor(row.new_pages, dtype=torch.int32)
                self.ids_SP[row.slot, row.known_pages : end] = new_P.to(self.ids_SP.device)
            self._filled[row.slot] = end

    def of(self, row: Segment) -> Tensor:
        """int64 [pages]: the row's own table, whose entry i holds positions 64 i and on."""
        return self.ids_SP[row.slot, : row.page_count].long()

    def forget(self, slot: int) -> None:
        """The slot gets another content: whoever comes next brings all its pages."""
        self._filled[slot] = 0
