"""What this user's earlier runs have found out about the machine: where that lies, and how much of a card was proven
to be of use. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kakera.target.cards import normalise

PROVEN = "proven.json"  # [{"card": "rtx5070", "driver": "580.88", "reserve": 250000000}, ...], the newest last


def state_directory() -> Path:
    """Where the XDG rules put state that survives restarts and that nobody misses."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kakera"


def proven_reserve(card: str, driver: str | None, directory: Path | None = None) -> int | None:
    """Bytes that were proven to be enough to keep free on such a card, beyond the margin; None if nothing was proven.
    `driver`: None where the card was named and not asked."""
    try:
        records = json.loads(((directory or state_directory()) / PROVEN).read_text())
        found = [int(r["reserve"]) for r in records if _is_of(r, card, driver)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # as if nothing had been proven: the default stands
    return max(0, found[-1]) if found else None


def _is_of(record: dict[str, object], card: str, driver: str | None) -> bool:
    return normalise(str(record["card"])) == normalise(card) and driver in (None, record["driver"])
