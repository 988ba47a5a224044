"""Images in a prompt: where they lie, and the positions by which attention turns. Frozen; no torch.

A token of text has one position, said three times: time, row, column. The tokens of an image that begins at position p
have (p, p + row, p + column), and what follows it goes on at p + max(rows, columns). So rope positions never exceed
those of the cache, which are the tokens' numbers: everything but rope counts by these.
Source: transformers' `get_rope_index`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kakera.contract.grid import PAGE

Axes = tuple[tuple[int, ...], ...]  # one position a token, or three: time, row, column


@dataclass(frozen=True)
class ImageSpan:
    """`rows` x `columns` tokens of a prompt from token `start` on stand for an image, row by row.

    digest: of what the model sees (SHA-256, 32 bytes); equal ones have equal embeddings.
    pixels: RGB bytes, row by row, of `factor` x `factor` pixels a token (`arch/vision.py`).
    """

    start: int
    rows: int
    columns: int
    digest: bytes
    pixels: bytes = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def shift(self) -> int:
        """By how much it moves the positions behind it; never more than 0."""
        return max(self.rows, self.columns) - self.tokens


def rope_positions(images: Sequence[ImageSpan], start: int, end: int) -> Axes:
    """Of the tokens start .. end - 1 of a prompt with these images, which are in order, and of what was generated
    behind it: () if they are those of the cache, one axis if all three are equal."""
    if not any(image.start < end for image in images):
        return ()
    found = list(_positions(images, start, end))
    axes = tuple(zip(*found, strict=True))
    return axes[:1] if axes[0] == axes[1] == axes[2] else axes


def _positions(images: Sequence[ImageSpan], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    at, shift = start, 0
    for image in images:
        while at < min(image.start, end):
            yield (at + shift,) * 3
            at += 1
        first = image.start + shift
        while image.start <= at < min(image.end, end):
            row, column = divmod(at - image.start, image.columns)
            yield first, first + row, first + column
            at += 1
        shift += image.shift
    while at < end:
        yield (at + shift,) * 3
        at += 1


def page_extras(images: Sequence[ImageSpan]) -> dict[int, bytes]:
    """By page number, for pages in which tokens of images lie: each one's digest, and which of its tokens is the first
    there. What a page's key says beside its token ids, which are the same for every image."""
    found: dict[int, bytes] = {}
    for image in images:
        for page in range(image.start // PAGE, (image.end - 1) // PAGE + 1):
            first = max(0, page * PAGE - image.start)
            found[page] = found.get(page, b"") + image.digest + first.to_bytes(4, "big")
    return found
