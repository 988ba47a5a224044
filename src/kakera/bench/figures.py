"""The figures that kakera promises for the bundled model on two cores, each against its bar.

`kakera bench figures` shows them as a table; its exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kakera.bench import figures_engine, figures_serve
from kakera.bench.client import Client
from kakera.bench.figure import Figure
from kakera.bench.load import calibrate
from kakera.bench.server import ServerProcess, serving
from kakera.bench.text import Prose
from kakera.errors import UsageError
from kakera.plan.plan import Wishes

SERVED = {"turn": figures_serve.warm_turn, "streams": figures_serve.streams, "beside": figures_serve.beside}
IN_PROCESS = ("bytes", "kld", "retrieval", "decode")
GROUPS = (*SERVED, *IN_PROCESS)


@dataclass(frozen=True)
class Subject:
    """What is measured. `data` and `longest` choose the retrieval prompts (None: the shipped ones, all)."""

    model: str
    directory: Path
    wishes: Wishes
    data: Path | None = None
    longest: int | None = None


def measure(
    subject: Subject, names: Sequence[str] = GROUPS, tell: Callable[[str], None] = lambda _: None
) -> list[Figure]:
    """Measure groups of figures in a fixed order. `tell` hears what is being measured. Raises UsageError for a name."""
    if unknown := [name for name in names if name not in GROUPS]:
        raise UsageError(f"--only {unknown[0]}: unknown; choose among {', '.join(GROUPS)}")
    found: list[Figure] = []
    if served := [name for name in SERVED if name in names]:
        found += asyncio.run(_served(subject, served, tell))
    for name in IN_PROCESS:
        if name in names:
            tell(name)
            found += _in_process(subject, name)
    return found


async def _served(subject: Subject, names: Sequence[str], tell: Callable[[str], None]) -> list[Figure]:
    found: list[Figure] = []
    tell("starting the server")
    with ServerProcess(subject.model, serving(subject.wishes)) as server:
        async with Client(server.url) as client:
            prose = Prose()
            await calibrate(client, prose)
            for name in names:
                tell(name)
                found += await SERVED[name](client, prose)
    return found


def _in_process(subject: Subject, name: str) -> list[Figure]:
    match name:
        case "bytes":
            return figures_engine.kv_bytes(subject.directory, subject.wishes)
        case "kld":
            return figures_engine.kv_divergence(subject.directory, subject.wishes)
        case "retrieval":
            return figures_engine.retrieval(subject.directory, subject.wishes, subject.data, subject.longest)
        case _:
            return figures_engine.decode_speed(subject.directory, subject.wishes)
