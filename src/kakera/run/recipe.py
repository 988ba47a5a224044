"""EngineRecipe: what the engine process needs to build its engine. Imports no torch, so that a server holds none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kakera.plan.plan import Plan

if TYPE_CHECKING:
    from kakera.run.engine import LocalEngine


@dataclass(frozen=True)
class EngineRecipe:
    """A picklable build function, which shows on stderr how far it has come."""

    directory: Path
    plan: Plan

    def __call__(self) -> LocalEngine:
        """Raises CheckpointError, UsageError."""
        from kakera.run.build import build_engine
        from kakera.run.starting import start_progress

        with start_progress() as progress:
            return build_engine(self.directory, self.plan, progress=progress, grammars=True)
