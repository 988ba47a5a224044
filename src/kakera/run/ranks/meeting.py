"""Meeting: how the ranks of a model, a process each, show each other bytes: these in shared memory, words by wires.

A rank shows its n-th bytes in slot n % 2 of its own, tells all others, and reads theirs when they have told it. Two
slots are enough: it shows n + 2 only after all have told of n + 1, which each does after it has read n. What is written
to memory before a message is there for who reads behind it. More than a slot holds goes in pieces, each a showing.
No torch.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import NoReturn, TypeVar

import msgspec

from kakera.errors import RanksApart
from kakera.run.ranks.wire import STEP, Terms, Wire

SLOT_BYTES = 2**20  # a chunk of 512 tokens of `mini` is as large
SLOTS = 2
HEAD_BYTES = 4096  # before the slots: why somebody has given up
LENGTH = struct.Struct("<I")


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: this is its showing `count`, of `length` bytes in all pieces, and what for."""

    count: int
    note: str
    length: int


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """For one rank alone; little, so that it travels in the message."""

    note: str
    data: bytes


Message = TypeVar("Message", Shown, Sent)


def memory_bytes(ranks: int) -> int:
    return HEAD_BYTES + ranks * SLOTS * SLOT_BYTES


class Meeting:
    """One rank's side. `wires`: to every other rank, by its number. One thread meets; any may `abort`. `terms`: of its
    waits until the first `meet`, and STEP then. `segment`: descriptor of memory that the cards of all ranks share.

    Whoever waits in vain gives up, and all others with it, for good: RanksApart, which says why the first one did.
    """

    def __init__(
        self,
        rank: int,
        memory: mmap.mmap,
        wires: Mapping[int, Wire],
        terms: Terms = STEP,
        segment: int | None = None,
    ):
        self.rank, self.ranks, self.terms, self.segment = rank, len(wires) + 1, terms, segment
        self._memory, self._wires = memory, wires
        self._count = 0
        self._aborting = threading.Lock()

    def everyones(self, note: str, data: memoryview) -> list[memoryview]:
        """The bytes of all ranks, in their order; those of others stay until the next meeting but one."""
        lengths = self._show(note, data, 0)
        most = max(lengths)
        if most <= SLOT_BYTES:
            return [data if r == self.rank else self._slot(r, length) for r, length in enumerate(lengths)]
        found = [memoryview(bytearray(length)) for length in lengths]
        for start in range(0, most, SLOT_BYTES):
            if start:
                self._show(note, data, start)
            for rank, whole in enumerate(found):
                piece = whole[start : start + SLOT_BYTES]
                piece[:] = self._slot(rank, len(piece))
        return found

    def meet(self) -> None:
        """Wait until every rank is here."""
        self._show("meet", memoryview(b""), 0)
        self.terms = STEP

    def send(self, note: str, data: bytes, to: int) -> None:
        with self._reasons():
            self._wires[to].send(msgspec.msgpack.encode(Sent(note, data)))

    def receive(self, note: str, sender: int) -> bytes:
        """What `sender` sends next to this rank, which has to have the same note."""
        found = self._next(sender, Sent)
        if found.note != note:
            self._part(f"ranks are apart: rank {sender} sent {found.note}, rank {self.rank} wants {note}")
        return found.data

    def abort(self, why: str) -> None:
        """The first reason stays, of whichever rank: the others follow from it."""
        with self._aborting:
            if not self._why():
                text = why.encode()[: HEAD_BYTES - LENGTH.size]
                self._memory[LENGTH.size : LENGTH.size + len(text)] = text
                self._memory[: LENGTH.size] = LENGTH.pack(len(text))  # at last: who sees it finds the text
        for wire in self._wires.values():
            wire.hang_up()

    def check(self) -> None:
        """Raises RanksApart if any rank has given up."""
        if why := self._why():
            raise RanksApart(why)

    def close(self) -> None:
        """Nobody of this process meets any more."""
        for wire in self._wires.values():
            wire.close()

    def _show(self, note: str, data: memoryview, start: int) -> list[int]:
        """Show the others a piece of `data`, and see that all have shown theirs; returns lengths of it all by rank."""
        self._count += 1
        piece = data[start : start + SLOT_BYTES]
        self._slot(self.rank, len(piece))[:] = piece
        shown = Shown(self._count, note, len(data))
        with self._reasons():
            for wire in self._wires.values():
                wire.send(msgspec.msgpack.encode(shown))
        lengths = [shown.length] * self.ranks
        for rank in self._wires:
            other = self._next(rank, Shown)
            if (other.count, other.note) != (shown.count, note):
                self._part(
                    f"ranks are apart: rank {self.rank} came to meeting {shown.count} for {note}, "
                    f"rank {rank} to {other.count} for {other.note}"
                )
            lengths[rank] = other.length
        return lengths

    def _next(self, rank: int, kind: type[Message]) -> Message:
        with self._reasons():
            data = self._wires[rank].receive(self.terms)
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.DecodeError:
            self._part(
                f"ranks are apart: rank {self.rank} waits for one of {kind.__name__}, and rank {rank} says other"
            )

    @contextlib.contextmanager
    def _reasons(self) -> Iterator[None]:
        """A rank that is left alone gives up, too."""
        self.check()
        try:
            yield
        except RanksApart as error:
            self._part(str(error))

    def _part(self, why: str) -> NoReturn:
        self.abort(why)
        raise RanksApart(self._why())

    def _slot(self, rank: int, length: int) -> memoryview:
        """Of the meeting that this rank is in."""
        start = HEAD_BYTES + (rank * SLOTS + self._count % SLOTS) * SLOT_BYTES
        return memoryview(self._memory)[start : start + length]

    def _why(self) -> str:
        (length,) = LENGTH.unpack_from(self._memory)
        return self._memory[LENGTH.size : LENGTH.size + length].decode(errors="replace")
