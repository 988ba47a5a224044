"""How far prompts are read, in the shape of llama.cpp's `prompt_progress`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kakera.contract.events import Progress


@dataclass
class PromptProgress:
    """Of one answer."""

    _begun: dict[int, tuple[float, int]] = field(default_factory=dict)  # by choice: when, and what was cached

    def as_json(self, choice: int, progress: Progress) -> dict[str, int]:
        """`processed` includes `cache`; `time_ms` is since the prompt's reading began."""
        now = time.monotonic()
        began, cached = self._begun.setdefault(choice, (now, progress.done))
        passed = round(1000 * (now - began))
        return {"total": progress.total, "cache": cached, "processed": progress.done, "time_ms": passed}
