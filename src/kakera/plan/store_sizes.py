"""The host store in numbers: beside a GPU every record in whole blocks of one KV page, in segments of pinned memory; on
a CPU to the byte. No torch.

Blocks of one size make the three kinds of records exchangeable: a store that was full of pages takes checkpoints
without leaving holes. A checkpoint of the 27B wastes 0.2 % of its last block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kakera.arch.spec import ModelSpec
from kakera.plan.kv_format import KvFormat
from kakera.plan.plan import Plan
from kakera.plan.share import plan_of_rank
from kakera.plan.sizes import checkpoint_parts
from kakera.target.target import Target

SEGMENT_BYTES = 256 * 2**20  # the allocator of pinned memory gives powers of two
ALIGNED = 256  # bytes, of blocks and of tensors in them


@dataclass(frozen=True)
class StoreSizes:
    """`block`: bytes; `blocks`: of the whole store; the rest: blocks of a record."""

    block: int
    blocks: int
    checkpoint: int
    sink: int
    page: int

    @staticmethod
    def of(spec: ModelSpec, kv: KvFormat, target: Target, checkpoint_bytes: int, host_cache: int) -> StoreSizes:
        """`host_cache`: bytes that records may take together. Beside a GPU, less than a checkpoint and its sink makes a
        store of no blocks, which nobody allocates."""
        sink, page = kv.window_page_bytes(spec), kv.page_bytes(spec)
        if target.one_memory:
            return StoreSizes(1, host_cache, checkpoint_bytes, sink, page)
        block = _up(page, ALIGNED)
        parts = checkpoint_parts(spec, kv, "fp32", target)
        checkpoint = checkpoint_bytes + len(parts) * ALIGNED  # each of them begins on a round address
        full, rest = divmod(host_cache, SEGMENT_BYTES)
        blocks = full * (SEGMENT_BYTES // block) + rest // block
        sizes = StoreSizes(block, blocks, -(-checkpoint // block), -(-sink // block), 1)
        return sizes if sizes.checkpoints else replace(sizes, blocks=0)

    @staticmethod
    def of_plan(plan: Plan) -> StoreSizes:
        """Of several cards: of the rank whose store holds least. All hold the same records, each its share of them."""
        shares = [plan]
        if plan.target.has_cards:
            shares = [plan_of_rank(plan, rank, plan.ranks) for rank in range(plan.ranks)]
        sizes = [StoreSizes.of(p.spec, p.kv, p.target, p.checkpoint_bytes, p.host_cache) for p in shares]
        return min(sizes, key=lambda held: (held.checkpoints, held.blocks))

    @property
    def checkpoints(self) -> int:
        """How many it holds if it holds nothing else: all of one text, whose sink each of them needs to be of use."""
        return max(0, self.blocks - self.sink) // self.checkpoint

    @property
    def per_segment(self) -> int:
        return max(1, SEGMENT_BYTES // self.block)

    @property
    def segments(self) -> tuple[int, ...]:
        """Blocks of each."""
        full, rest = divmod(self.blocks, self.per_segment)
        return (self.per_segment,) * full + ((rest,) if rest else ())

    @property
    def pinned_bytes(self) -> int:
        """What the machine gives for it."""
        full, rest = divmod(self.blocks, self.per_segment)
        return full * _pinned(self.per_segment * self.block) + (_pinned(rest * self.block) if rest else 0)

    @property
    def place_bytes(self) -> int:
        """Of a place on the device that takes any one record."""
        return max(self.checkpoint, self.sink, 1) * self.block


def fitting(limit: int) -> int:
    """The largest `host_cache` that takes no more than `limit` bytes of pinned memory."""
    if limit >= SEGMENT_BYTES:
        return limit // SEGMENT_BYTES * SEGMENT_BYTES
    return 1 << limit.bit_length() - 1 if limit > 0 else 0


def _pinned(size: int) -> int:
    """The power of two that the allocator gives for `size` bytes."""
    return 1 << max(0, size - 1).bit_length()


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
