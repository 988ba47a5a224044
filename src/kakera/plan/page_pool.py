"""PoolShape: how much of a card's memory the pages behind a number hold that nobody else's bytes share. No torch.

A tensor of pages is [layers, pages, bytes of a page], mapped in chunks of memory under addresses that stay. Pages from
`kept` on lie at the end of each layer, so what can be given back are the chunks that lie in there as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

GRANULE = 2 * 2**20  # bytes: the smallest piece of memory that NVIDIA's drivers map
MOST_CHUNKS = 1024  # of a tensor: each is a call of the driver at the start


def chunk_bytes(size: int) -> int:
    """Of the memory behind a tensor of `size` bytes: 2 MiB up to 2 GiB, more where that would be too many."""
    return GRANULE * max(1, -(-size // (MOST_CHUNKS * GRANULE)))


@dataclass(frozen=True)
class PoolPart:
    """One tensor, [layers, pages, page_bytes]."""

    layers: int
    pages: int
    page_bytes: int

    @property
    def bytes(self) -> int:
        return self.layers * self.pages * self.page_bytes

    @property
    def chunk(self) -> int:
        return chunk_bytes(self.bytes)

    @property
    def chunks(self) -> int:
        return -(-self.bytes // self.chunk)

    def behind(self, kept: int) -> list[tuple[int, int]]:
        """Runs of chunks, (first, behind the last), that hold nothing of any layer's first `kept` pages."""
        if kept == 0:
            return [(0, self.chunks)]
        layer = self.pages * self.page_bytes
        found = []
        for begin in range(0, self.bytes, layer):
            first = -(-(begin + kept * self.page_bytes) // self.chunk)
            end = begin + layer
            last = self.chunks if end == self.bytes else end // self.chunk  # behind the last layer lies nothing
            if first < last:
                found.append((first, last))
        return found


@dataclass(frozen=True)
class PoolShape:
    """`pages` of a pool and its tensors whose memory can be given back; no parts: none of it can."""

    pages: int
    parts: tuple[PoolPart, ...] = ()

    def freed(self, kept: int) -> int:
        """Bytes that go back if only the first `kept` pages stay; the fewer stay, the more."""
        return sum((last - first) * part.chunk for part in self.parts for first, last in part.behind(kept))

    def most_kept(self, freed: int, least: int, most: int) -> int:
        """The most pages, from `least` to `most`, that free so many bytes; `least` if even these free less."""
        low, high = least, most + 1  # `low` frees enough, or is all that can be done; `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.freed(middle) >= freed else (low, middle)
        return low
