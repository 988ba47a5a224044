"""EngineRecipe: what the engine process needs to build its engine. Imports no torch, so that a server holds none."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kakera.disk.home import DiskCache
from kakera.errors import UsageError
from kakera.plan.plan import Plan
from kakera.run.process.kv_events import KvEvents, Publisher

if TYPE_CHECKING:
    from kakera.run.engine import LocalEngine


@dataclass(frozen=True)
class Recording:
    """Where steps are recorded, and under which name of the model. `prompts`: with the tokens as they are."""

    path: Path
    model: str
    prompts: bool


@dataclass(frozen=True)
class EngineRecipe:
    """A picklable build function, which shows on stderr how far it has come. `threads` that a CPU computes with; None:
    as many as are fast here."""

    directory: Path
    plan: Plan
    recording: Recording | None = None
    disk: DiskCache | None = None
    kv_events: KvEvents | None = None
    threads: int | None = None

    def __call__(self) -> LocalEngine:
        """Raises CheckpointError, UsageError."""
        from kakera.run.process.starting import start_progress
        from kakera.run.ranks.engine import open_engine
        from kakera.run.refused import refusals_in_words

        plan, threads, disk = self.plan, self.threads, self.disk
        with start_progress() as progress, refusals_in_words(plan):
            engine = open_engine(self.directory, plan, progress=progress, grammars=True, threads=threads, disk=disk)
        if not plan.target.has_cards and plan.ranks == 1:
            from kakera.run.threads import settle_threads

            print(f"the CPU {settle_threads(engine.runner, threads)}", file=sys.stderr, flush=True)
        if self.recording is not None:
            record(engine, plan, self.recording)
        if self.kv_events is not None:
            engine.publish(Publisher(self.kv_events))
        return engine


def record(engine: LocalEngine, plan: Plan, recording: Recording) -> None:
    """From now on every step of the engine goes to the file, too. Raises UsageError if it can not be written."""
    from kakera import __version__
    from kakera.contract.recording import VERSION, Header, Recorder
    from kakera.run.recording.record import RecordingRunner

    wishes = asdict(plan.wishes())
    header = Header(
        VERSION, __version__, recording.model, wishes, plan.spec.vocab, plan.pages, prompts=recording.prompts
    )
    try:
        engine.runner = RecordingRunner(engine.runner, Recorder(recording.path, header))
    except OSError as error:
        raise UsageError(f"--record {recording.path}: {error.strerror}") from None
