"""Remembers the sizes of the last start, so that a pool which became smaller without a word is noticed.

A restart that meets a half-freed card, or a desktop that took memory, gives a smaller plan that still "works".
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from kakera.plan.plan import Plan, Wishes
from kakera.plan.table import gigabytes
from kakera.target.remembered import state_directory

SMALLER = 0.9  # free memory differs a little from start to start; a tenth is worth a line


def compare_with_last(plan: Plan, model: str, wishes: Wishes, directory: Path | None = None) -> list[str]:
    """Warnings about what shrank since the last start with the same model and wishes; remembers this one."""
    directory = directory or state_directory()
    key = hashlib.sha256(json.dumps([model, asdict(wishes)]).encode()).hexdigest()[:16]
    path = directory / f"plan-{key}.json"
    now = {"pages": plan.pages, "context": plan.context, "slots": plan.slots, "host_cache": plan.host_cache}
    before = _read(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now))
    except OSError:
        pass  # a read-only home must not keep a server from starting
    return [_line(name, before[name], now[name]) for name in now if now[name] < SMALLER * before.get(name, 0)]


def _read(path: Path) -> dict[str, int]:
    try:
        data = json.loads(path.read_text())
        return {str(name): int(value) for name, value in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _line(name: str, before: int, now: int) -> str:
    shown = {
        "pages": ("the KV pool", f"{before * 64} to {now * 64} tokens"),
        "context": ("the context", f"{before} to {now} tokens"),
        "slots": ("the number of running requests", f"{before} to {now}"),
        "host_cache": ("the prefix cache", f"{gigabytes(before)} to {gigabytes(now)}"),
    }
    what, change = shown[name]
    return f"{what} shrank from {change} since the last start: other programs hold memory now (kakera plan shows it)"
