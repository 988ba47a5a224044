"""A segment: one append-only file of records. What is full is sealed with a footer, and never written again.

A sealed segment is known by its footer (all heads, 330 bytes each), an open one by walking from head to head up to the
first that is not whole. So a process that dies at any byte leaves what was whole before, or less, never other bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kakera.disk.record import BLOCK, HEAD_BYTES, Head, padded, unpack

_OFFSET = struct.Struct("<Q")
# magic, records, where the footer begins, its sum; then the trailer's own sum. It is the end of the file.
_TRAILER = struct.Struct("<8sQQQ")
_SEALED = b"kakeseal"
_ENTRY = _OFFSET.size + HEAD_BYTES
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last, of what is no file, such as a pipe


class Segment:
    """A file being written. One thread. `end`: bytes that records take so far."""

    def __init__(self, path: Path, size: int) -> None:
        """A new file of `size` bytes, allocated. Raises OSError (ENOSPC before anything is written)."""
        self.path, self.size, self.end = path, size, 0
        self._heads: list[tuple[int, Head]] = []
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o600)
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError:
            os.close(self._file)
            path.unlink()
            raise

    def fits(self, head: Head) -> bool:
        """Whether the record and the footer behind it stay within the size."""
        footer = (len(self._heads) + 1) * _ENTRY + BLOCK
        return self.end + head.size + footer <= self.size

    def append(self, head: Head, parts: Sequence[memoryview]) -> int:
        """Write a record; returns where. Raises OSError, and what was there stays as it was."""
        offset = self.end
        gap = padded(head.length) - head.length
        block = memoryview(head.pack().ljust(BLOCK, b"\0"))
        # the payload first: while its head is not there, nothing is
        _write(self._file, [*parts, memoryview(bytes(gap))], offset + BLOCK)
        _write(self._file, [block], offset)
        self.end = offset + head.size
        self._heads.append((offset, head))
        return offset

    def sync(self) -> None:
        """All that was appended is on the disk, and not in the page cache any more, which counts as memory."""
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, self.end, os.POSIX_FADV_DONTNEED)

    def seal(self) -> int:
        """Write the footer, give back what is left, close; returns the bytes of the file."""
        footer = b"".join(_OFFSET.pack(offset) + head.pack() for offset, head in self._heads)
        trailer = _TRAILER.pack(_SEALED, len(self._heads), self.end, xxhash.xxh3_64_intdigest(footer))
        tail = footer + trailer + _OFFSET.pack(xxhash.xxh3_64_intdigest(trailer))
        try:
            _write(self._file, [memoryview(tail)], self.end)
            os.ftruncate(self._file, self.end + len(tail))
            self.sync()
        finally:
            os.close(self._file)
        return self.end + len(tail)


@dataclass(frozen=True)
class Scan:
    """What a file is known to hold: (offset, head) of all records that are whole, and where the last one ends."""

    heads: list[tuple[int, Head]]
    sealed: bool

    @property
    def end(self) -> int:
        return max((offset + head.size for offset, head in self.heads), default=0)


def scan(path: Path) -> Scan:
    """Raises OSError."""
    file = os.open(path, os.O_RDONLY | FLAGS)
    try:
        size = os.fstat(file).st_size
        sealed = _footer(file, size)
        return Scan(list(_walk(file, size)), False) if sealed is None else Scan(sealed, True)
    finally:
        os.close(file)


def _footer(file: int, size: int) -> list[tuple[int, Head]] | None:
    """None if the file has none that is whole."""
    length = _TRAILER.size + _OFFSET.size
    if size < length:
        return None
    tail = os.pread(file, length, size - length)
    magic, count, begin, total = _TRAILER.unpack_from(tail)
    if magic != _SEALED or _OFFSET.unpack_from(tail, _TRAILER.size)[0] != xxhash.xxh3_64_intdigest(tail[:-8]):
        return None
    footer = _read(file, count * _ENTRY, min(begin, size))
    if xxhash.xxh3_64_intdigest(footer) != total:
        return None
    found = []
    for place in range(0, len(footer), _ENTRY):
        if (head := unpack(footer[place + _OFFSET.size : place + _ENTRY])) is not None:
            found.append((_OFFSET.unpack_from(footer, place)[0], head))
    return found


def _walk(file: int, size: int) -> Iterator[tuple[int, Head]]:
    offset = 0
    while (head := unpack(os.pread(file, HEAD_BYTES, offset))) is not None and offset + head.size <= size:
        yield offset, head
        offset += head.size


class Reader:
    """A file being read, by one thread. It stays readable when it is unlinked meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_RDONLY | FLAGS)
        with suppress(OSError):  # of a file system that has become read-only
            os.utime(self._file)  # used now: access times are often not kept

    def head(self, offset: int) -> Head | None:
        """Raises OSError."""
        return unpack(os.pread(self._file, HEAD_BYTES, offset))

    def payload(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Fill the parts with the payload of the record at `offset`. False if the file ends before. Raises OSError."""
        begin = offset = offset + BLOCK
        for part in parts:
            done = 0
            while done < len(part):
                count = os.preadv(self._file, [part[done:]], offset + done)
                if count == 0:
                    return False
                done += count
            offset += done
        os.posix_fadvise(self._file, begin, offset - begin, os.POSIX_FADV_DONTNEED)
        return True

    def close(self) -> None:
        os.close(self._file)


def _write(file: int, parts: Sequence[memoryview], offset: int) -> None:
    for part in parts:
        done = 0
        while done < len(part):
            done += os.pwrite(file, part[done:], offset + done)
        offset += len(part)


def _read(file: int, count: int, offset: int) -> bytes:
    """As many bytes as there are, up to `count`: a huge count from a broken file asks for no memory."""
    pieces: list[bytes] = []
    while count > 0 and (piece := os.pread(file, min(count, 2**20), offset)):
        pieces.append(piece)
        count, offset = count - len(piece), offset + len(piece)
    return b"".join(pieces)
