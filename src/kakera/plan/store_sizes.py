"""The host store of a GPU in numbers: pinned memory in segments, every record in whole blocks of one KV page. No torch.

Blocks of one size make the three kinds of records exchangeable: a store that was full of pages takes checkpoints
without leaving holes. A checkpoint of the 27B wastes 0.2 % of its last block.
"""

from __future__ import annotations

from dataclasses import dataclass

from kakera.plan.kv_format import KvFormat
from kakera.plan.plan import Plan
from kakera.plan.spec import ModelSpec

SEGMENT_BYTES = 256 * 2**20  # the allocator of pinned memory gives powers of two
ALIGNED = 256  # bytes, of blocks and of tensors in them


@dataclass(frozen=True)
class StoreSizes:
    """`block`: bytes; `blocks`: of the whole store; the rest: blocks of a record."""

    block: int
    blocks: int
    checkpoint: int
    sink: int

    @staticmethod
    def of(spec: ModelSpec, kv: KvFormat, checkpoint_bytes: int, host_cache: int) -> StoreSizes:
        """`host_cache`: bytes that records may take together. Less than a checkpoint and its sink is of no use: a store
        of no blocks then, which nobody allocates."""
        block = _up(kv.page_bytes(spec), ALIGNED)
        tensors = 5 * ALIGNED  # each tensor of a checkpoint begins on a round address
        checkpoint, sink = -(-(checkpoint_bytes + tensors) // block), -(-kv.window_page_bytes(spec) // block)
        full, rest = divmod(host_cache, SEGMENT_BYTES)
        blocks = full * (SEGMENT_BYTES // block) + rest // block
        return StoreSizes(block, blocks if blocks >= checkpoint + sink else 0, checkpoint, sink)

    @staticmethod
    def of_plan(plan: Plan) -> StoreSizes:
        return StoreSizes.of(plan.spec, plan.kv, plan.checkpoint_bytes, plan.host_cache)

    @property
    def checkpoints(self) -> int:
        """How many it holds if it holds nothing else."""
        return checkpoints_in(self.blocks, self.checkpoint, self.sink)

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
        return sum(1 << max(0, blocks * self.block - 1).bit_length() for blocks in self.segments)

    @property
    def place_bytes(self) -> int:
        """Of a place on the device that takes any one record."""
        return max(self.checkpoint, self.sink, 1) * self.block


def checkpoints_in(room: int, checkpoint: int, sink: int) -> int:
    """All of one text, whose sink each of them needs to be of use."""
    return max(0, room - sink) // checkpoint


def fitting(limit: int) -> int:
    """The largest `host_cache` that takes no more than `limit` bytes of pinned memory."""
    if limit >= SEGMENT_BYTES:
        return limit // SEGMENT_BYTES * SEGMENT_BYTES
    return 1 << limit.bit_length() - 1 if limit > 0 else 0


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
