"""The log of the disk cache: what it returns is what was written, or nothing; a crash at any byte, a flipped bit, a cut
file and a full disk lose records and never change one."""

from __future__ import annotations

import errno
import os
import random
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest

from kakera.disk import log as log_module
from kakera.disk.home import MANIFEST, bytes_in, directories, in_use, remove
from kakera.disk.log import DiskLog, NoRoom
from kakera.disk.record import BLOCK, HEAD_BYTES, Head, Kind, sum_of, unpack
from kakera.disk.tier import DiskTier, Draft

LIMIT, NAME = 64 * BLOCK, "k" * 32
Written = dict[tuple[Kind, bytes], bytes]


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can see whether a drive has flushed, and each time costs 10 ms."""
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


def head_of(kind: Kind, key: bytes, payload: bytes) -> Head:
    return Head(kind, key, key[::-1], key * 16, 64, len(payload), sum_of([memoryview(payload)], NAME))


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(log: DiskLog, number: int, payload: bytes, kind: Kind = Kind.PAGE) -> bool:
    cut = len(payload) // 3
    parts = [memoryview(payload)[:cut], memoryview(payload)[cut:]]
    return log.append(head_of(kind, key_of(number), payload), parts)


def get(log: DiskLog, kind: Kind, key: bytes) -> bytes | None:
    place = log.find(kind, key)
    if place is None:
        return None
    payload = bytearray(place.length)
    head = log.read(place, kind, key, [memoryview(payload)])
    assert head is None or head == head_of(kind, key, bytes(payload))
    return None if head is None else bytes(payload)


def opened(home: Path, limit: int = LIMIT, segment: int = 8 * BLOCK) -> DiskLog:
    return DiskLog(home, NAME, {"model": "test"}, limit, segment)


def test_what_was_appended_is_there_after_closing_and_opening(tmp_path: Path) -> None:
    log = opened(tmp_path)
    payloads = {number: os.urandom(size) for number, size in enumerate([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK])}
    assert all(put(log, number, payload) for number, payload in payloads.items())
    assert not put(log, 1, b"other"), "a key is written once"
    log.close()
    log = opened(tmp_path)
    assert {n: get(log, Kind.PAGE, key_of(n)) for n in payloads} == payloads
    assert get(log, Kind.CHECKPOINT, key_of(1)) is None, "kinds are apart"
    log.close()


def test_one_process_writes_and_a_second_is_told(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert in_use(log.path)
    with pytest.raises(BlockingIOError):
        opened(tmp_path)
    log.close()
    assert not in_use(log.path)
    opened(tmp_path).close()


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 1, b"secret")
    assert {path.stat().st_mode & 0o777 for path in log.path.iterdir()} == {0o600}
    assert log.path.stat().st_mode & 0o777 == 0o700
    log.close()
    (log.path / "00000001.seg").rename(tmp_path / "elsewhere")
    (log.path / "00000001.seg").symlink_to(tmp_path / "elsewhere")
    assert len(opened(tmp_path)) == 0


@pytest.mark.slow
def test_the_bound_holds_after_every_operation_and_what_is_read_stays(tmp_path: Path) -> None:
    """1,000 operations, starts of another process among them; `bytes_in` is what du counts."""
    log, rng = opened(tmp_path), random.Random(1)
    put(log, 0, b"used")
    for number in range(1, 1000):
        if number % 97 == 0:
            log.close()
            log = opened(tmp_path)
        else:
            put(log, number, rng.randbytes(rng.randrange(3 * BLOCK)))
        assert bytes_in(tmp_path) <= LIMIT and abs(log.bytes - bytes_in(tmp_path)) <= 2 * BLOCK
        assert get(log, Kind.PAGE, key_of(0)) == b"used", number
    assert get(log, Kind.PAGE, key_of(1)) is None, "nobody has read it"
    log.close()


def test_other_keys_go_first_and_what_is_written_by_others_stays(tmp_path: Path) -> None:
    first = DiskLog(tmp_path, "a" * 32, {}, LIMIT, 8 * BLOCK)
    held = DiskLog(tmp_path, "b" * 32, {}, LIMIT, 8 * BLOCK)
    for log in (first, held):
        for number in range(20):
            put(log, number, bytes(BLOCK))
    first.close()
    log = opened(tmp_path)
    for number in range(30):
        put(log, number, bytes(BLOCK))
    assert [each.path.name[0] for each in directories(tmp_path)] == ["b", "k"]
    log.close(), held.close()


def test_a_purge_takes_all_of_this_key_and_what_waits_to_be_written_and_the_tier_goes_on(tmp_path: Path) -> None:
    other = DiskLog(tmp_path, "o" * 32, {"model": "other"}, LIMIT, 8 * BLOCK)
    put(other, 1, b"of another model")
    other.close()
    log, gate, begun = opened(tmp_path), Event(), Event()
    log.sync = lambda: (begun.set(), gate.wait(20))  # type: ignore[method-assign]
    for number in range(20):
        put(log, number, bytes(BLOCK))
    tier = DiskTier(log, daily_bytes=2**40)

    def write(number: int, kind: Kind) -> None:
        head = head_of(kind, key_of(number), bytes(BLOCK))
        tier.write(Draft(kind, head.key, head.parent, head.tokens, head.position, (memoryview(bytes(BLOCK)),)))

    write(100, Kind.CHECKPOINT)  # the writer stands in its sync while the others wait
    begun.wait(20)
    write(101, Kind.PAGE)
    assert tier.purge() > 20 * BLOCK and not tier.has(Kind.PAGE, key_of(1))
    write(102, Kind.PAGE)
    gate.set()
    assert tier.settle(20)
    assert [n for n in (1, 101, 102) if tier.has(Kind.PAGE, key_of(n))] == [102]
    assert not tier.has(Kind.CHECKPOINT, key_of(100))
    tier.close()
    assert log.bytes >= bytes_in(tmp_path) > 0
    assert len(opened(tmp_path)) == 1 and len(DiskLog(tmp_path, "o" * 32, {"model": "other"}, LIMIT)) == 1


def test_the_bound_holds_for_servers_of_two_models_at_once(tmp_path: Path) -> None:
    logs = [opened(tmp_path), DiskLog(tmp_path, "b" * 32, {}, LIMIT, 8 * BLOCK)]
    for number in range(60):
        for log in logs:
            with suppress(NoRoom):
                put(log, number, bytes(BLOCK))
            assert bytes_in(tmp_path) <= LIMIT + 8 * BLOCK
    assert not remove(logs[1].path) and all(len(log) > 0 for log in logs)
    logs[1].close()
    assert all(put(logs[0], number, bytes(BLOCK)) for number in range(60, 90)), "a server that has ended holds nothing"
    logs[0].close()


def test_a_segment_of_another_model_is_a_miss(tmp_path: Path) -> None:
    other, log = DiskLog(tmp_path, "b" * 32, {}, LIMIT, 8 * BLOCK), opened(tmp_path)
    put(log, 1, b"of k")
    log.close(), other.close()
    (log.path / "00000001.seg").rename(other.path / "00000001.seg")
    other = DiskLog(tmp_path, "b" * 32, {}, LIMIT, 8 * BLOCK)
    assert get(other, Kind.PAGE, key_of(1)) is None
    other.close()


def test_what_is_no_segment_or_manifest_is_passed_over(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 1, b"kept")
    log.close()
    (log.path / "00000002.seg").mkdir()
    os.mkfifo(log.path / "00000003.seg")
    (log.path / "00000001.seg").rename(log.path / "00000004.seg")
    for name in ("4.seg", "x.seg", "-0000005.seg"):
        (log.path / name).write_bytes((log.path / "00000004.seg").read_bytes())
    other = tmp_path / ("o" * 32)
    other.mkdir()
    (other / MANIFEST).write_text("[" * 100_000)
    assert [each.key for each in directories(tmp_path) if each.path == other] == [{}]
    log = opened(tmp_path)
    assert get(log, Kind.PAGE, key_of(1)) == b"kept"
    assert {file.name for file in log.path.glob("*.seg")} == {"00000002.seg", "00000004.seg"}
    assert put(log, 2, b"more")
    log.close()


def test_who_can_not_open_a_log_keeps_nobody_else_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(log_module, "bytes_in", lambda _: (tmp_path / "gone").stat())
        with pytest.raises(FileNotFoundError):
            opened(tmp_path)
    opened(tmp_path).close()


def test_a_file_system_that_became_read_only_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    put(log, 1, b"read")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "utime", refuse)
    assert get(log, Kind.PAGE, key_of(1)) == b"read"
    log.close()


def test_a_read_that_comes_too_late_forgets_nothing_that_was_written_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 1, b"same")
    place = log.find(Kind.PAGE, key_of(1))
    assert place is not None
    for number in range(2, 100):  # its segment goes
        put(log, number, bytes(BLOCK))
    put(log, 1, b"same")
    assert log.read(place, Kind.PAGE, key_of(1), [memoryview(bytearray(4))]) is None
    assert get(log, Kind.PAGE, key_of(1)) == b"same"
    log.close()


def test_a_bound_too_small_for_a_record_is_said(tmp_path: Path) -> None:
    log = opened(tmp_path, limit=8 * BLOCK)
    with pytest.raises(NoRoom):
        put(log, 1, bytes(9 * BLOCK))
    assert put(log, 2, b"small") and get(log, Kind.PAGE, key_of(2)) == b"small"
    log.close()


def test_part_of_the_file_system_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    state = os.statvfs(tmp_path)
    monkeypatch.setattr(log_module, "FREE_BYTES", state.f_bavail * state.f_frsize)
    monkeypatch.setattr(log_module, "FREE_SHARE", 1)
    with pytest.raises(NoRoom, match="are free"):
        put(log, 1, b"x")
    log.close()


def test_where_the_file_system_is_short_of_room_what_is_old_goes_for_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk of its own with 32 blocks, less than the bound, of which 4 are to stay free."""
    monkeypatch.setattr(DiskLog, "_free", lambda _: (32 * BLOCK - bytes_in(tmp_path), 4 * BLOCK))
    log = opened(tmp_path)
    for number in range(40):
        assert put(log, number, bytes(BLOCK))
        assert bytes_in(tmp_path) <= 29 * BLOCK
    assert len(log) > 3 and get(log, Kind.PAGE, key_of(39)) == bytes(BLOCK)
    log.close()


def test_a_segment_that_nobody_used_for_a_month_goes_at_the_start(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 1, b"old")
    log.close()
    old = log.path / "00000001.seg"
    os.utime(old, (0, old.stat().st_mtime - 31 * 86400))
    assert len(opened(tmp_path)) == 0 and not old.exists()


@pytest.mark.parametrize("failing", ["pwrite", "posix_fallocate"])
def test_a_full_disk_loses_a_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    log = opened(tmp_path)
    put(log, 1, b"before")
    with monkeypatch.context() as broken:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no space left")

        broken.setattr(os, failing, full)
        with pytest.raises(OSError, match="no space"):
            put(log, 2, bytes(9 * BLOCK))
    assert put(log, 3, b"after")
    assert [get(log, Kind.PAGE, key_of(n)) for n in (1, 2, 3)] == [b"before", None, b"after"]
    log.close()


def test_no_prefix_or_flip_of_a_head_is_a_head() -> None:
    data = head_of(Kind.SINK, key_of(3), b"abc").pack()
    assert unpack(data) == head_of(Kind.SINK, key_of(3), b"abc")
    assert all(unpack(data[:count]) is None for count in range(HEAD_BYTES))
    for bit in range(8 * HEAD_BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack(bytes(flipped)) is None


def damage(rng: random.Random, directory: Path) -> None:
    """A crash: the open file loses any part of what was not synced. Or a drive's fault: bits flip, files end early."""
    files = sorted(directory.glob("*.seg"))
    if not files:
        return
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    if not data:
        return
    place = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            del data[place:]
        case 1:
            data[place] ^= 1 << rng.randrange(8)
        case 2:  # a block that never reached the disk
            block = place // BLOCK * BLOCK
            data[block : block + BLOCK] = bytes(len(data[block : block + BLOCK]))
        case 3:
            data[place : place + 64] = rng.randbytes(len(data[place : place + 64]))
    path.write_bytes(data)


def crash_case(seed: int, home: Path) -> None:
    """Some lives of a log, each ended by a close or a crash: whatever is returned is what was written."""
    rng = random.Random(seed)
    written: Written = {}
    for _ in range(rng.randint(1, 3)):
        log = opened(home, LIMIT, rng.choice([6, 8]) * BLOCK)
        for _ in range(rng.randint(0, 12)):
            number, kind = rng.randrange(12), rng.choice(list(Kind))
            key = key_of(number)
            match rng.randrange(4):
                case 0 | 1:
                    fresh = rng.randbytes(rng.choice([0, 5, BLOCK, 2 * BLOCK + 7]))
                    put(log, number, written.setdefault((kind, key), fresh), kind)
                case 2:
                    assert get(log, kind, key) in (None, written.get((kind, key)))
                case 3:
                    log.sync()
        if rng.random() < 0.3:
            log.close()
        else:
            os.close(log._lock_file)  # the process is gone
            if rng.random() < 0.8:
                damage(rng, log.path)
    log = opened(home)
    for (kind, key), payload in written.items():
        assert get(log, kind, key) in (None, payload)
        assert put(log, int.from_bytes(key, "big"), payload, kind) or get(log, kind, key) == payload
        assert get(log, kind, key) == payload, "it can be written again"
    log.close()


@pytest.mark.slow
def test_after_crashes_and_faults_of_a_drive_whatever_is_returned_is_what_was_written(tmp_path: Path) -> None:
    for seed in range(150):
        home = tmp_path / str(seed)
        home.mkdir()
        crash_case(seed, home)
