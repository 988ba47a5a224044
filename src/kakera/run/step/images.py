"""ImageEmbeddings: what a vision tower made of images, kept in host memory by digest, as plans say."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from kakera.contract.step import EncodeImage, ForgetImages, RowResult, Segment, StepPlan
from kakera.model.tower import Tower

log = logging.getLogger(__name__)


class ImageEmbeddings:
    """An image that can not be encoded (its scratch does not fit, say) fails the rows that name it."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self._kept: dict[bytes, Tensor] = {}  # by digest, [tokens, H] on the host
        self._failed: dict[bytes, str] = {}

    @property
    def bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def carry_out(self, action: EncodeImage | ForgetImages) -> None:
        match action:
            case ForgetImages(digests):
                for digest in digests:
                    self._kept.pop(digest, None)
                    self._failed.pop(digest, None)
            case EncodeImage(digest, rows, columns, pixels):
                try:
                    black = bytes(3 * rows * columns * self.tower.spec.factor**2)
                    self._kept[digest] = self.tower.encode(pixels or black, rows, columns).cpu()
                except Exception as error:  # whatever it is: the engine outlives it, and says so
                    log.exception("an image of %d x %d tokens could not be encoded", rows, columns)
                    torch.zeros(1, device=self.tower.device).add_(1).item()  # raises if the device is lost
                    self._failed[digest] = f"the engine could not encode an image of {rows} x {columns} tokens: {error}"

    def without_failed(self, plan: StepPlan) -> tuple[StepPlan, tuple[RowResult, ...]]:
        """The plan without rows whose images could not be encoded, and what these yield."""
        if not self._failed:
            return plan, ()
        failed = {
            row.request_id: self._failed[part.digest]
            for row in plan.prefill
            for part in row.images
            if part.digest in self._failed
        }
        rows = tuple(row for row in plan.prefill if row.request_id not in failed)
        return msgspec.structs.replace(plan, prefill=rows), tuple(RowResult(i, error=e) for i, e in failed.items())

    def of(self, rows: Sequence[Segment]) -> tuple[tuple[int, Tensor], ...]:
        """For a batch of these rows, one behind the other: where embeddings stand, and which."""
        found, offset = [], 0
        for row in rows:
            for part in row.images:
                embeds_NH = self._kept[part.digest][part.first : part.first + part.count]
                found.append((offset + part.row, embeds_NH))
            offset += len(row.tokens)
        return tuple(found)
