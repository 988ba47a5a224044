"""DiskLog: all records under one key of a model, in segments, within a bound.

One writer: the holder of LOCK. What is written goes to the end of the newest segment. When there is no room the oldest
segment goes, with all in it that nobody has read since it was written; what was read is written again, so what is used
stays. Nothing is overwritten and whole files are unlinked, so a drive wears little more than what is written.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kakera.disk.home import LOCK, SUFFIX, bytes_in, directories, remove, write_manifest
from kakera.disk.record import BLOCK, Head, Kind, sum_of
from kakera.disk.segment import FLAGS, Reader, Segment, scan

SEGMENT_BYTES = 256 * 2**20
OLDEST_SECONDS = 30 * 86400.0  # a segment that was neither written nor read for so long goes
COPIED_SHARE = 5  # of a segment that goes, at most 1/5 is written again
FREE_BYTES, FREE_SHARE = 20 * 10**9, 10  # of the file system the smaller of 20 GB and 1/10 always stays free

Key = tuple[Kind, bytes]


class NoRoom(OSError):
    """The bound, or what must stay free of the file system, leaves no room for a record."""


@dataclass(frozen=True)
class Place:
    """Where a record is. `length`: bytes of its payload."""

    segment: int
    offset: int
    length: int


@dataclass
class _Held:
    """A segment. `records`: keys of those in it that the index points to, and whether each was read since."""

    bytes: int
    records: dict[Key, bool] = field(default_factory=dict)


class DiskLog:
    """`append`, `sync`, `purge` and `close` by one thread; the others by any number beside it.

    `limit`: bytes of all files in the home, other keys' too. `segment_bytes` is at most an eighth of it.
    """

    def __init__(
        self, home: Path, name: str, key: Mapping[str, str], limit: int, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Raises BlockingIOError if another process writes here, OSError."""
        self.home, self.path, self.limit = home, home / name, limit
        self.segment_bytes = max(4 * BLOCK, min(segment_bytes, limit // 8) // BLOCK * BLOCK)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._lock_file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | FLAGS, 0o600)
        self._mutex = threading.Lock()
        self._index: dict[Key, Place] = {}
        self._segments: dict[int, _Held] = {}  # the oldest first; the last one may be open
        self._open: Segment | None = None
        self.bytes = 0  # of the home when it was last looked at, and what was written since
        self.written = 0  # bytes of records, also of those that were written again
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_manifest(self.path, key)
            self._recover()
            self._shrink(0)
        except BaseException:
            os.close(self._lock_file)
            raise

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Seal what is open and let another process write. Raises OSError."""
        try:
            self._seal()
        finally:
            os.close(self._lock_file)

    # What is there

    def find(self, kind: Kind, key: bytes) -> Place | None:
        return self._index.get((kind, key))

    def read(self, place: Place, kind: Kind, key: bytes, parts: Sequence[memoryview]) -> Head | None:
        """Fill the parts with a record's payload; None, and the record is forgotten, unless it is what it was when it
        was written. Raises OSError."""
        try:
            head = self._whole_head(place, kind, key, parts)
        except FileNotFoundError:
            if self.find(kind, key) == place:
                raise
            return None  # its segment has just been given up
        if head is None:
            self.forget(kind, key, place)
            return None
        with self._mutex:
            if (held := self._segments.get(place.segment)) is not None and (kind, key) in held.records:
                held.records[kind, key] = True
        return head

    def _whole_head(self, place: Place, kind: Kind, key: bytes, parts: Sequence[memoryview]) -> Head | None:
        with self._reading(place.segment) as reader:
            head = reader.head(place.offset)
            if head is None or (head.kind, head.key) != (kind, key):
                return None
            whole = head.length == place.length == sum(len(part) for part in parts)
            whole = whole and reader.payload(place.offset, parts) and sum_of(parts, self.path.name) == head.sum
        return head if whole else None

    def forget(self, kind: Kind, key: bytes, place: Place | None) -> None:
        """It is not to be found any more, unless it was written elsewhere meanwhile. Its bytes go with its segment."""
        with self._mutex:
            if place is not None and self._index.get((kind, key)) == place:
                del self._index[kind, key]
                self._segments[place.segment].records.pop((kind, key), None)

    def hide(self) -> int:
        """Nothing of what is there is to be found any more. Returns the bytes of its files, for `purge` to remove."""
        with self._mutex:
            self._index.clear()
            for held in self._segments.values():
                held.records.clear()
            return sum(held.bytes for held in self._segments.values())

    @contextmanager
    def _reading(self, segment: int) -> Iterator[Reader]:
        reader = Reader(self._file(segment))
        try:
            yield reader
        finally:
            reader.close()

    def _recover(self) -> None:
        """Index what is there; what can not be read, or was not used for long, goes."""
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            number = int(path.stem) if path.stem.isdecimal() else 0
            with suppress(OSError):
                if path != self._file(number) or not self._take_in(path, number):
                    path.unlink()

    def _take_in(self, path: Path, number: int) -> bool:
        """False if it is of no use. Raises OSError."""
        try:
            found, state = scan(path), path.lstat()
        except OSError:
            return False
        if not found.heads or time.time() - state.st_mtime > OLDEST_SECONDS:
            return False
        if not found.sealed:
            os.truncate(path, found.end)  # what was allocated for more
        self._segments[number] = _Held(path.stat().st_blocks * 512)
        for offset, head in found.heads:
            self._point(head, Place(number, offset, head.length))
        return True

    def _point(self, head: Head, place: Place) -> None:
        key = (head.kind, head.key)
        if (older := self._index.get(key)) is not None and older.segment in self._segments:
            self._segments[older.segment].records.pop(key, None)
        self._index[key] = place
        self._segments[place.segment].records[key] = False

    def _file(self, number: int) -> Path:
        return self.path / f"{number:08d}{SUFFIX}"

    # Writing

    def append(self, head: Head, parts: Sequence[memoryview]) -> bool:
        """Write a record; False if it is there already. Raises NoRoom, OSError; then it is not there."""
        if self.find(head.kind, head.key) is not None:
            return False
        if self._open is None or not self._open.fits(head):
            self._next_segment(head.size)
        if self._open is None or not self._open.fits(head):
            self._begin(head.size)
        self._append(head, parts)
        return True

    def sync(self) -> None:
        """What was appended survives a loss of power. Raises OSError."""
        if self._open is not None:
            self._open.sync()

    def purge(self) -> None:
        """Remove all records under this key, with their files. Raises OSError."""
        self.hide()
        try:
            self._seal()
        finally:
            while self._segments:
                self._give_up(next(iter(self._segments)))

    def _append(self, head: Head, parts: Sequence[memoryview]) -> None:
        assert self._open is not None
        offset = self._open.append(head, parts)
        self.written += head.size
        with self._mutex:
            self._point(head, Place(next(reversed(self._segments)), offset, head.length))

    def _next_segment(self, size: int) -> None:
        self._seal()
        self._shrink(max(self.segment_bytes, size + 2 * BLOCK))

    def _begin(self, size: int) -> None:
        """A new segment with room for a record of so many bytes. Raises NoRoom, OSError."""
        self._seal()
        size = max(self.segment_bytes, size + 2 * BLOCK)
        if self.bytes + size > self.limit:
            raise NoRoom(f"{self.bytes} of {self.limit} bytes are taken, by servers of other models, too")
        free, keep = self._free()
        if free - size < keep:
            raise NoRoom(f"less than {keep + size} bytes of the file system are free")
        number = max(self._segments, default=0) + 1
        self._open = Segment(self._file(number), size)
        with self._mutex:
            self._segments[number] = _Held(size)
        self.bytes += size

    def _seal(self) -> None:
        if self._open is None:
            return
        held, segment, self._open = self._segments[next(reversed(self._segments))], self._open, None
        size = -(-segment.seal() // BLOCK) * BLOCK
        self.bytes += size - held.bytes
        held.bytes = size

    # The bound

    def _free(self) -> tuple[int, int]:
        """Bytes of the file system that are free, and that must stay so."""
        state = os.statvfs(self.path)
        return state.f_bavail * state.f_frsize, min(FREE_BYTES, state.f_blocks * state.f_frsize // FREE_SHARE)

    def _shrink(self, wanted: int) -> None:
        """Give up what is worth least until so many bytes fit: other keys' directories, then the oldest segments."""
        self.bytes = bytes_in(self.home)  # others write there too
        free, keep = self._free()
        most = min(self.limit, self.bytes + free - keep) - wanted
        if self.bytes > most:
            for other in directories(self.home):
                if self.bytes > most and other.path != self.path and remove(other.path):
                    self.bytes -= other.bytes
        used: list[tuple[Head, bytearray]] = []
        while self._segments and self.bytes > most:
            used += self._give_up(self._victim())
        for head, payload in used:
            try:
                if self._open is None or not self._open.fits(head):
                    self._begin(head.size)
                self._append(head, [memoryview(payload)])
            except OSError:
                return  # a cache may lose what it can not hold

    def _victim(self) -> int:
        """The oldest of whose bytes little is used; the oldest of all if there is none."""
        for number, held in self._segments.items():
            if sum(place.length for _, place in self._used(number)) * COPIED_SHARE <= held.bytes:
                return number
        return next(iter(self._segments))

    def _used(self, number: int) -> list[tuple[Key, Place]]:
        """Records of a segment that were read since they were written."""
        with self._mutex:
            return [(key, self._index[key]) for key, read in self._segments[number].records.items() if read]

    def _give_up(self, number: int) -> list[tuple[Head, bytearray]]:
        """Unlink a segment; returns those of its records that were used, up to a share of it."""
        kept, left = [], self._segments[number].bytes // COPIED_SHARE
        for (kind, key), place in self._used(number):
            if place.length <= left and (found := self._whole(place, kind, key)) is not None:
                kept.append(found)
                left -= place.length
        with self._mutex:
            held = self._segments.pop(number)
            for each in held.records:
                self._index.pop(each, None)
        self._file(number).unlink(missing_ok=True)
        self.bytes -= held.bytes
        return kept

    def _whole(self, place: Place, kind: Kind, key: bytes) -> tuple[Head, bytearray] | None:
        payload = bytearray(place.length)
        try:
            head = self.read(place, kind, key, [memoryview(payload)])
        except OSError:
            return None
        return None if head is None else (head, payload)
