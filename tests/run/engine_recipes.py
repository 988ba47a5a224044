"""Build functions that a spawned engine process can unpickle, and a parent process to kill.

Imports torch only where an engine is built: a process that fails before that starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kakera.contract.step import StepResult
from kakera.errors import CheckpointError
from kakera.run.engine import LocalEngine
from kakera.run.process.client import EngineClient
from kakera.run.scripted import ScriptedRecipe


@dataclass(frozen=True)
class TinyRecipe:
    """The tiny model with a queue of two, so that refusals are easy to have."""

    directory: Path
    slots: int = 4
    max_waiting: int = 2

    def __call__(self) -> LocalEngine:
        from run_world import tiny_plan

        from kakera.run.build import build_engine

        engine = build_engine(self.directory, tiny_plan(self.directory, slots=self.slots))
        engine.scheduler.limits = replace(engine.scheduler.limits, max_waiting=self.max_waiting)
        return engine


@dataclass(frozen=True)
class HeldRecipe:
    """A scripted engine none of whose steps ends before a file is there."""

    script: Path
    end: Path

    def __call__(self) -> LocalEngine:
        engine = ScriptedRecipe(self.script)()
        execute = engine.runner.execute

        def held(*step: Any) -> StepResult:
            while not self.end.exists():
                time.sleep(0.01)
            return execute(*step)

        engine.runner.execute = held  # type: ignore[method-assign]
        return engine


@dataclass(frozen=True)
class BrokenRecipe:
    """Fails to build with one of the errors that may come."""

    error: str

    def __call__(self) -> LocalEngine:
        if self.error == "words":
            raise CheckpointError("the file x is truncated")
        if self.error == "defect":
            raise ZeroDivisionError("a defect")
        sys.exit(3)


async def parent(script: Path) -> None:
    """Start an engine, say its process id, and wait to be killed."""
    client = await EngineClient.start(ScriptedRecipe(script))
    print(client.pid, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(parent(Path(sys.argv[1])))
