"""Where a prompt's checkpoints go: where the text has structure, where others parted from it, and a sparse grid."""

from __future__ import annotations

from collections.abc import Iterable

from kakera.cache.checkpoints import WORTH
from kakera.cache.tree import Kind
from kakera.contract.grid import PAGE
from kakera.contract.images import ImageSpan
from kakera.contract.request import Boundary

_NEWEST = 8  # message ends saved densely; older ones one an octave of their distance from the prompt's end


def choose_saves(
    tokens: int, start: int, boundaries: Iterable[Boundary], branch: int, grid: int
) -> list[tuple[int, Kind]]:
    """Save points in (start, tokens] of a prompt of `tokens` tokens, ascending, multiples of PAGE.

    `branch` is how far the cache knew the prompt's pages; beyond `start` it marks a prefix that others share but
    nobody saved. The prompt's end is saved so that an identical prompt still has one token to compute.
    """
    chosen: dict[int, Kind] = {}

    def want(position: int, kind: Kind) -> None:
        position = position // PAGE * PAGE
        known = chosen.get(position)
        if start < position <= tokens and (known is None or WORTH[kind] > WORTH[known]):
            chosen[position] = kind

    for kinds in (("message", "prompt"), ("image",)):  # another question about the same image goes on at its end
        for position in _thin((min(b.position, tokens) for b in boundaries if b.kind in kinds), tokens):
            want(position, "message")
    for boundary in boundaries:
        if boundary.kind == "system":
            want(boundary.position, "system")
    want(tokens - 1, "message")
    want(branch, "branch")
    if tokens % PAGE == 0:
        want(tokens, "rolling")
    better = list(chosen)
    for position in grid_points(tokens, grid):
        if all(abs(position - other) >= position // 4 for other in better):
            want(position, "grid")
    return sorted(chosen.items())


def image_ends(images: Iterable[ImageSpan]) -> Iterable[Boundary]:
    return (Boundary(image.end, "image") for image in images)


def grid_points(tokens: int, grid: int) -> list[int]:
    """64, 128, 256, ... up to the grid, then its multiples: half of a shared prefix, or more, lies before one."""
    points: list[int] = []
    position = PAGE
    while position <= tokens:
        points.append(position)
        position += min(position, grid)
    return points


def _thin(positions: Iterable[int], end: int) -> list[int]:
    """The newest few, then the newest in each octave of the distance from `end`."""
    kept: list[int] = []
    octaves: set[int] = set()
    for position in sorted(set(positions), reverse=True):
        octave = ((end - position) // PAGE).bit_length()
        if len(kept) < _NEWEST or octave not in octaves:
            kept.append(position)
        octaves.add(octave)
    return kept
