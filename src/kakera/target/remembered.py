"""What this user's earlier runs have found out about the machine: where that lies, which plans were proven on which
cards, and how much of a card that leaves free. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kakera.target.cards import normalise

PROVEN = "proven.json"  # a list of `Proof`s, the newest last; of others' entries "card", "driver" and "reserve" count
MOST = 64  # that are kept


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
    try:
        found = [max(0, int(r["reserve"])) for r in _records(directory) if _is_of(r, card, driver)]
    except (ValueError, TypeError, KeyError):
        return None  # as if nothing had been proven: the default stands
    return min(found, default=None)


def proof_of(card: str, driver: str | None, shape: str, directory: Path | None = None) -> Proof | None:
    """The newest proof of such a plan on such a card."""
    names = {field.name for field in fields(Proof)}
    with contextlib.suppress(ValueError, TypeError, KeyError):
        for record in reversed(_records(directory)):
            if record.get("shape") == shape and _is_of(record, card, driver):
                return Proof(**{name: value for name, value in record.items() if name in names})
    return None


def remember(proof: Proof, directory: Path | None = None) -> None:
    """Keep it, in place of what is known of the same card, driver and shape. A crash leaves the old file.
    Raises OSError where nothing can be written."""
    others = [r for r in _records(directory) if not _same(r, proof.card, proof.driver, proof.shape)]
    _write([*others, asdict(proof)], directory)


def forget(proof: Proof, directory: Path | None = None) -> None:
    """The plan has failed: neither it nor anything that leaves as little free is proven. Raises OSError."""
    before = _records(directory)
    kept = [
        r
        for r in before
        if not _same(r, proof.card, proof.driver, proof.shape)
        and not (_is_of(r, proof.card, proof.driver) and _reserve(r) <= proof.reserve)
    ]
    if len(kept) < len(before):
        _write(kept, directory)


def _records(directory: Path | None) -> list[dict[str, Any]]:
    try:
        found = json.loads(((directory or state_directory()) / PROVEN).read_text())
    except (OSError, ValueError):
        return []
    return [record for record in found if isinstance(record, dict)] if isinstance(found, list) else []


def _write(records: Iterable[dict[str, Any]], directory: Path | None) -> None:
    directory = directory or state_directory()
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=PROVEN, dir=directory)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(list(records)[-MOST:], file, indent=1)
        Path(name).replace(directory / PROVEN)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _reserve(record: dict[str, Any]) -> int:
    reserve = record.get("reserve")
    return reserve if isinstance(reserve, int) else 0


def _same(record: dict[str, Any], card: str, driver: str | None, shape: str) -> bool:
    return record.get("shape") == shape and record.get("driver") == driver and _is_of(record, card, driver)


def _is_of(record: dict[str, Any], card: str, driver: str | None) -> bool:
    return normalise(str(record.get("card", ""))) == normalise(card) and driver in (None, record.get("driver"))
