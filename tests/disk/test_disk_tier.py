"""The threads before the log: what may be written is bounded; a drive that fails is a miss, counted and said once."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from kakera.disk.log import DiskLog
from kakera.disk.record import BLOCK, Kind
from kakera.disk.tier import DAY, DiskTier, Done, Draft, Want

QUEUE, DAILY = 64 * BLOCK, 16 * BLOCK


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    tier = DiskTier(DiskLog(tmp_path, "k" * 32, {}, 2**22, 32 * BLOCK), DAILY, QUEUE, clock)
    yield tier
    tier.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(tier: DiskTier, number: int, blocks: int = 1) -> None:
    key = key_of(number)
    tier.write(Draft(Kind.PAGE, key, key, key * 16, 64, (memoryview(bytes([number]) * blocks * BLOCK),)))
    assert tier.settle(20)


def read(tier: DiskTier, number: int, position: int = 64) -> bytes | None:
    key, part = key_of(number), bytearray(BLOCK)
    tier.read(number, [Want(Kind.PAGE, key, key * 16, position, (memoryview(part),))])
    end = time.monotonic() + 20
    while not (ended := tier.poll()):
        assert time.monotonic() < end
    assert ended == [Done(number, ended[0].whole)]
    return bytes(part) if ended[0].whole else None


def test_a_days_bytes_are_bounded_come_back_with_time_and_do_not_bind_the_end(tier: DiskTier, clock: Clock) -> None:
    assert tier.room == DAILY
    write(tier, 1, blocks=12)
    assert tier.room == 4 * BLOCK
    clock.now += DAY / 2
    assert tier.room == 12 * BLOCK
    clock.now += DAY
    assert tier.room == DAILY, "what was not used does not add up"
    write(tier, 2, blocks=16)
    assert tier.room == 0
    tier.hurry()
    assert tier.room == QUEUE


def test_what_waits_to_be_written_is_bounded(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.hurry()
    gate, append, key = Event(), tier.log.append, key_of(1)
    monkeypatch.setattr(tier.log, "append", lambda *given: gate.wait(20) and append(*given))
    tier.write(Draft(Kind.PAGE, key, key, key * 16, 64, (memoryview(bytes(8 * BLOCK)),)))
    assert tier.room == QUEUE - 8 * BLOCK and not tier.settle(0)
    gate.set()
    assert tier.settle(20) and tier.room == QUEUE


@pytest.mark.parametrize("call", ["pwrite", "preadv", "pread", "open"])
def test_a_drive_that_fails_is_a_miss_counted_always_and_said_once(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    write(tier, 1)
    write(tier, 2)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "input/output error")

        broken.setattr(os, call, fail)
        if call == "pwrite":
            write(tier, 3)
            write(tier, 4)
        else:
            assert read(tier, 1) is None and read(tier, 2) is None
    counted = tier.counted()
    assert counted["disk_not_saved: OSError" if call == "pwrite" else "disk_read_failed"] == 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "requests go on without it" in said[0]
    write(tier, 5)
    assert read(tier, 5) == bytes([5]) * BLOCK, "it is used again"
    assert tier.has(Kind.PAGE, key_of(1)) == (call == "pwrite")


def test_bytes_of_another_place_are_a_miss(tier: DiskTier) -> None:
    write(tier, 1)
    assert read(tier, 1, position=128) is None and read(tier, 7) is None
    assert tier.counted()["disk_read_failed"] == 2
