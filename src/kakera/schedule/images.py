"""Embeddings of images: which the runner keeps, and what a step has to compute. Decides; the runner carries out.

An image is encoded when a row that is computed lies in it and its embeddings are not kept: never because of where a
hit ends, and never without need. They are kept by digest, the least recently used go first, so a history's pictures
are encoded once while their turns last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kakera.contract.grid import PAGE
from kakera.contract.images import ImageSpan
from kakera.contract.step import Action, EncodeImage, ForgetImages, ImageRows


def image_rows(images: Sequence[ImageSpan], start: int, end: int) -> tuple[ImageRows, ...]:
    """Which of the tokens start .. end - 1 are images."""
    found = []
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            found.append(ImageRows(image.digest, first - start, first - image.start, last - first))
    return tuple(found)


class Embeddings:
    """What the runner keeps, by digest and in tokens; `limit` of them, unless one step needs more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: dict[bytes, int] = {}  # the least recently used first
        self._broken: list[bytes] = []

    @property
    def tokens(self) -> int:
        return sum(self._kept.values())

    def reach(self, images: Sequence[ImageSpan], start: int, end: int, left: int, first: bool) -> tuple[int, int]:
        """Where a row from `start` has to end, at `end` or on a page's border before it, so that its step encodes
        images of at most `left` tokens, or a single one if it is the `first` that does; and the tokens encoded."""
        used = 0
        for image in images:
            if image.end <= start or image.start >= end or image.digest in self._kept:
                continue
            if image.tokens > left - used and not (first and used == 0):
                cut = max(start, image.start // PAGE * PAGE)
                if cut > start or not first:
                    return cut, used
            used += image.tokens
        return end, used

    def take(self, images: Iterable[ImageSpan]) -> tuple[Action, ...]:
        """What makes the embeddings of these ready, before the rows that need them."""
        needed = {image.digest: image for image in images}
        gone, self._broken = self._broken, []
        for digest in needed.keys() & self._kept.keys():
            self._kept[digest] = self._kept.pop(digest)
        new = [image for digest, image in needed.items() if digest not in self._kept]
        held = self.tokens + sum(image.tokens for image in new)
        for digest in [kept for kept in self._kept if kept not in needed]:
            if held <= self.limit:
                break
            held -= self._kept.pop(digest)
            gone.append(digest)
        self._kept.update((image.digest, image.tokens) for image in new)
        forget: tuple[Action, ...] = (ForgetImages(tuple(gone)),) if gone else ()
        return (*forget, *(EncodeImage(image.digest, image.rows, image.columns, image.pixels) for image in new))

    def distrust(self, rows: Iterable[ImageRows]) -> None:
        """A row failed whose embeddings these were: whoever needs them next computes them anew."""
        self._broken += [part.digest for part in rows if self._kept.pop(part.digest, None) is not None]

    def flush(self) -> tuple[Action, ...]:
        """Forget all of them."""
        gone, self._broken = (*self._broken, *self._kept), []
        self._kept.clear()
        return (ForgetImages(gone),) if gone else ()
