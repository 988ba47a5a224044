"""What this user's earlier runs have found out about the machine: where that lies, which plans were proven on which
cards, and how much of a card that leaves free. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kakera.target.cards import normalise

PROVEN = "proven.json"  # a list of `Proof`s, the newest last; of others' entries "card", "driver" and "reserve" count
MOST = 64  # that are kept
KINDS = {
    "card": str,
    "driver": str | None,
    "reserve": int,
    "shape": str,
    "context": int,
    "planned": int,
    "day": str,
}


@dataclass(frozen=True)
class Proof:
    """What `kakera prove` has filled and found whole. Bytes of one card: `reserve` stayed free beyond the margin,
    `planned` is what the plan took. `shape`: of the model and of what does not depend on free memory (`Plan.shape`)."""

    card: str
    driver: str | None
    reserve: int
    shape: str
    context: int
    planned: int
    day: str  # 2026-11-30


def state_directory() -> Path:
    """Where the XDG rules put state that survives restarts and that nobody misses."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kakera"


def proven_reserve(card: str, driver: str | None, directory: Path | None = None) -> int | None:
    """Bytes that were proven to be enough to keep free on such a card, beyond the margin: the least of them; None if
    nothing was proven. `driver`: None where the card was named and not asked."""
    return min((max(0, r["reserve"]) for r in _records(directory) if _is_of(r, card, driver)), default=None)


def proof_of(card: str, driver: str | None, shape: str, directory: Path | None = None) -> Proof | None:
    """The newest proof of such a plan on such a card."""
    for record in reversed(_records(directory)):
        if record.get("shape") == shape and _is_of(record, card, driver) and _has(record, *KINDS):
            return Proof(**{name: record[name] for name in KINDS})
    return None


def remember(proof: Proof, directory: Path | None = None) -> None:
    """Keep it, in place of what is known of the same card, driver and shape. A crash leaves the old file.
    Raises OSError where nothing can be written."""
    with _alone(directory):
        others = [r for r in _records(directory) if not _same(r, proof.card, proof.driver, proof.shape)]
        _write([*others, asdict(proof)], directory)


def forget(proof: Proof, directory: Path | None = None) -> None:
    """The plan has failed: neither it nor anything that leaves as little free is proven. Raises OSError."""
    with _alone(directory):
        before = _records(directory)
        kept = [
            r
            for r in before
            if not _same(r, proof.card, proof.driver, proof.shape)
            and not (_is_of(r, proof.card, proof.driver) and r["reserve"] <= proof.reserve)
        ]
        if len(kept) < len(before):
            _write(kept, directory)


def _records(directory: Path | None) -> list[dict[str, Any]]:
    """Whatever else is in the file, or where it should be, is as if nothing had been proven."""
    try:
        found = json.loads(((directory or state_directory()) / PROVEN).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    return [r for r in found if isinstance(r, dict) and _has(r, "card", "reserve")] if isinstance(found, list) else []


def _has(record: dict[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), KINDS[name]) for name in names)


@contextlib.contextmanager
def _alone(directory: Path | None) -> Iterator[None]:
    """While the block changes what is remembered, no other process does. Raises OSError."""
    directory = directory or state_directory()
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(records: Iterable[dict[str, Any]], directory: Path | None) -> None:
    directory = directory or state_directory()
    handle, name = tempfile.mkstemp(prefix=PROVEN, dir=directory)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(list(records)[-MOST:], file, indent=1)
        Path(name).replace(directory / PROVEN)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _same(record: dict[str, Any], card: str, driver: str | None, shape: str) -> bool:
    return record.get("shape") == shape and record.get("driver") == driver and _is_of(record, card, driver)


def _is_of(record: dict[str, Any], card: str, driver: str | None) -> bool:
    return normalise(str(record.get("card", ""))) == normalise(card) and driver in (None, record.get("driver"))
