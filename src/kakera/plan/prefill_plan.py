"""The scratch of prefill attention, and how a call is cut to fit it. No GPU is needed to know either.

A call takes some KV heads at a time: all of them for short segments, one for long ones, so that rows always fill the
card and scratch does not grow with the number of heads. Nothing here depends on the length of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kakera.contract.grid import PAGE

GRID = 1024  # the library takes keys up to a multiple of this, and in parts of this times a power of two
SUB = 2048  # query tokens of a segment that share where the library's keys end: 3 tiles of 128 rows an SM of an H200
PIECE = 32768  # tokens; longer parts gain nothing (H200: 713 TFLOP/s at 32,768 and 716 at 65,536)
QUERIES = 8192  # tokens of a library call, at most
TAIL = 512  # query tokens below which a call is padded to a power of two
TILE_ROWS = 128  # of the library's kernels
WAVES = 2  # tiles an SM should have at least


@dataclass(frozen=True)
class PrefillPlan:
    """`chunk`: tokens of the longest segment. `key_slots`: tokens x heads of 16-bit history held at a time, at least.

    `window_pages`: R of the int2 codec; 0 if all pages are exact.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window_pages: int
    chunk: int
    multiprocessors: int
    key_slots: int = 65536

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def query_slots(self) -> int:
        """Query tokens x KV heads of a call."""
        padded = padded_tokens(self.chunk)
        return padded * min((h for h in self._divisors() if self._fills(h * padded)), default=self.kv_heads)

    @property
    def history_slots(self) -> int:
        """Tokens x KV heads of unpacked history: a piece, or what lies between the pieces and the diagonal."""
        return max(self.key_slots, self.query_slots + self.kv_heads * GRID)

    @property
    def band_slots(self) -> int:
        return self.query_slots + self.kv_heads * self.window_pages * PAGE

    @property
    def scratch_bytes(self) -> int:
        """What PrefillAttention allocates once: queries, sums with their lse, history and band."""
        rows = self.query_slots * self.group
        return (
            rows * self.head_dim * (2 + 4) + rows * 4 + 2 * (self.history_slots + self.band_slots) * 2 * self.head_dim
        )

    @property
    def transient_bytes(self) -> int:
        """What the library allocates during a call at most: its output and lse, and repeated queries of short ones."""
        rows = self.query_slots * self.group
        return rows * (self.head_dim * (2 + 2) + 4)

    def heads_per_call(self, tokens: int) -> int:
        """KV heads whose queries fit together."""
        return max(h for h in self._divisors() if h * padded_tokens(tokens) <= self.query_slots)

    def piece(self, heads: int) -> int:
        """Tokens of history that are unpacked at a time, a power of two."""
        return min(PIECE, power_below(self.history_slots // heads))

    def splits(self, heads: int, queries: int, keys: int) -> int:
        """Parts that the keys of a library call are cut into, so that few query rows fill the card."""
        splits = 1
        while (
            keys // splits >= 2 * GRID
            and not self._fills(splits * heads * queries)
            and 2 * splits * heads * queries <= self.query_slots
        ):
            splits *= 2
        return splits

    def _fills(self, slots: int) -> bool:
        return slots * self.group >= WAVES * TILE_ROWS * self.multiprocessors

    def _divisors(self) -> list[int]:
        return [h for h in range(1, self.kv_heads + 1) if self.kv_heads % h == 0]


def query_blocks(tokens: int, largest: int = QUERIES) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of library calls, in few sizes; the last is padded, as it costs less than more calls."""
    first = 0
    while first < tokens:
        rest = tokens - first
        size = min(largest, power_below(rest)) if rest >= TAIL else max(PAGE, 1 << (rest - 1).bit_length())
        yield first, size
        first += size


def key_pieces(tokens: int, largest: int) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of a multiple of GRID: the largest piece repeated, then ever smaller powers of two."""
    first = 0
    while first < tokens:
        size = min(largest, power_below(tokens - first))
        yield first, size
        first += size


def library_shapes(plan: PrefillPlan) -> set[tuple[int, int, int]]:
    """(batch, rows, keys) of all library calls that segments of up to `plan.chunk` tokens can make."""
    shapes = set()
    sizes = [1 << i for i in range(6, padded_tokens(plan.chunk).bit_length())]  # from a page on
    for tokens in sizes:
        heads = plan.heads_per_call(tokens)
        keys = [1 << i for i in range(GRID.bit_length() - 1, plan.piece(heads).bit_length())]
        for queries in (size for size in sizes if size <= min(tokens, QUERIES)):
            for count in keys:
                splits = plan.splits(heads, queries, count)
                shapes.add((heads * splits, queries * plan.group, count // splits))
    return shapes


def padded_tokens(tokens: int) -> int:
    *_, (first, size) = query_blocks(tokens)
    return first + size


def power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)
