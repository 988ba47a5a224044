"""A record of the disk cache: a page, a checkpoint or a sink, behind a head that says what it is and what it weighs.

On disk a record is its head in a block of 4 KiB, then the payload, padded to whole blocks (so that direct I/O is
possible). Head and payload have checksums of their own (XXH3-64): a head tells at once whether it is one, a payload is
verified when it is first used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import xxhash

BLOCK = 4096
VERSION = 2
_MAGIC = b"kakerec\n"
# magic, version, kind, position, key, parent, tokens' bytes, payload's bytes, payload's sum; then the head's own sum
_HEAD = struct.Struct("<8sHHI16s16s256sQQ")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size


class Kind(IntEnum):
    """`key` of a page is its chain hash; of a checkpoint that of the last page before it; of a sink that of the first
    page of all that it serves."""

    PAGE = 1
    CHECKPOINT = 2
    SINK = 3


@dataclass(frozen=True)
class Head:
    """What a record says of itself. `key` and `parent`: chain hashes (cache/keys.py); `tokens`: the 64 ids of the page
    that `key` names, 32-bit little-endian; `position`: tokens up to the end of that page. `length`: bytes of
    the payload."""

    kind: Kind
    key: bytes
    parent: bytes
    tokens: bytes
    position: int
    length: int
    sum: int

    @property
    def size(self) -> int:
        """Bytes of the whole record on disk."""
        return BLOCK + padded(self.length)

    def pack(self) -> bytes:
        """HEAD_BYTES bytes."""
        head = _HEAD.pack(
            *(_MAGIC, VERSION, self.kind, self.position, self.key, self.parent, self.tokens, self.length, self.sum)
        )
        return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def unpack(data: bytes) -> Head | None:
    """The head at the beginning of `data`, or None if there is none that is whole."""
    if len(data) < HEAD_BYTES or not data.startswith(_MAGIC):
        return None
    if xxhash.xxh3_64_intdigest(data[: _HEAD.size]) != _SUM.unpack_from(data, _HEAD.size)[0]:
        return None
    _, version, kind, position, key, parent, tokens, size, total = _HEAD.unpack_from(data)
    if version != VERSION or kind not in tuple(Kind):
        return None
    return Head(Kind(kind), key, parent, tokens, position, size, total)


def sum_of(parts: Iterable[memoryview], name: str) -> int:
    """XXH3-64 of the parts, one behind the other, under the name of their directory: a file that was moved there from
    another model's has the wrong sums."""
    state = xxhash.xxh3_64(name.encode())
    for part in parts:
        state.update(part)
    return state.intdigest()


def padded(count: int) -> int:
    """`count` bytes in whole blocks."""
    return -(-count // BLOCK) * BLOCK
