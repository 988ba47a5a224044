"""How much a running answer slows down while another conversation is written to the disk cache.

`python -m tools.beside_write MODEL --tokens 190000` in the root of the repository prints one line. It starts a server,
has a conversation, and follows an answer over the pause after which that conversation is written. What is written stays
in the disk cache's usual place, which is on the drive that counts.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import typer

from kakera.bench.client import Client
from kakera.bench.server import ServerProcess, flags
from kakera.bench.text import Prose
from kakera.cli import main
from kakera.cli.bench_common import waiting
from kakera.cli.options import ModelArgument, with_memory_options
from kakera.errors import KakeraError
from kakera.plan.plan import Wishes
from kakera.schedule.disk import PAUSE_SECONDS

STREAM_TOKENS = 20_000
SETTLE_SECONDS, ALONE_SECONDS = 3.0, 20.0  # after the first token; after the write
WRITE_SECONDS = 180.0
LOOK_SECONDS = 0.25  # between looks at what is written, in each window alike
WRITTEN = re.compile(r'kakera_engine_counter\{name="disk_written_bytes"\} (\S+)')

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Watch:
    """When text of the answer came, and (when, bytes) of what was written by then. Seconds of one clock."""

    arrivals: list[float] = field(default_factory=list)
    written: list[tuple[float, float]] = field(default_factory=list)

    def window(self) -> tuple[float, float] | None:
        """From the last look before anything was written to the first one that saw all of it."""
        first, last = self.written[0][1], self.written[-1][1]
        if first == last:
            return None
        begin = max(at for at, count in self.written if count == first)
        return begin, min(at for at, count in self.written if count == last)

    def speed(self, begin: float, end: float) -> tuple[float, float]:
        """Pieces of text a second, and the longest gap between two, in seconds."""
        inside = [at for at in self.arrivals if begin <= at <= end]
        if len(inside) < 3:
            raise KakeraError(f"only {len(inside)} tokens came in {end - begin:.1f} s: write more (--conversations)")
        gaps = [b - a for a, b in pairwise(inside)]
        return len(gaps) / (inside[-1] - inside[0]), max(gaps)


async def measure(server: ServerProcess, tokens: int, conversations: int) -> str:
    """The line. Raises KakeraError if nothing was written, or too little."""
    prose, watch = Prose(int(time.time())), Watch()  # of this run alone: on no disk yet
    async with Client(server.url) as client:
        for _ in range(conversations):
            said = [{"role": "user", "content": prose.take(tokens // conversations)}]
            await client.chat(said, 4)
        stream = asyncio.create_task(
            client.complete(prose.take(64), STREAM_TOKENS, lambda _: watch.arrivals.append(time.perf_counter()))
        )
        try:
            await _follow(server, watch, stream)
        finally:
            stream.cancel()
            await asyncio.wait((stream,))
    return line(watch)


async def _follow(server: ServerProcess, watch: Watch, stream: asyncio.Task[object]) -> None:
    """Look until the write has been over for a while."""
    end = time.perf_counter() + PAUSE_SECONDS + WRITE_SECONDS
    while not stream.done() and time.perf_counter() < end:
        found = WRITTEN.search(await asyncio.to_thread(server.get, "/metrics"))
        if watch.arrivals:
            watch.written.append((time.perf_counter(), float(found[1]) if found else 0.0))
            window = watch.window()
            if window and time.perf_counter() - window[1] > ALONE_SECONDS:
                return
        await asyncio.sleep(LOOK_SECONDS)
    if stream.done():
        raise KakeraError(f"the answer ended before the write was over: {stream.exception() or 'all tokens said'}")


def line(watch: Watch) -> str:
    window = watch.window()
    if window is None:
        raise KakeraError("nothing was written to the disk cache")
    begin, end = window
    before, gap_before = watch.speed(watch.arrivals[0] + SETTLE_SECONDS, begin)
    after, gap_after = watch.speed(end + SETTLE_SECONDS, watch.arrivals[-1])
    beside, gap = watch.speed(begin, end)
    alone = (before + after) / 2
    megabytes, longest = (watch.written[-1][1] - watch.written[0][1]) / 1e6, max(gap_before, gap_after)
    return (
        f"alone {alone:.1f} tokens/s ({before:.1f} before, {after:.1f} after), "
        f"while {megabytes:,.0f} MB are written in {end - begin:.1f} s {beside:.1f}: {beside / alone:.1%}; "
        f"longest gap {1e3 * longest:.0f} ms alone, {1e3 * gap:.0f} ms beside"
    )


@app.command()
@with_memory_options
def beside_write(
    model: ModelArgument = "mini",
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Of what is written, in all.")] = 190_000,
    conversations: Annotated[int, typer.Option("--conversations", min=1, help="That these are of.")] = 1,
    disk_cache: Annotated[str, typer.Option("--disk-cache", metavar="BYTES")] = "20GB",
    *,
    wishes: Wishes,
) -> None:
    """An answer's speed while another conversation is written to the disk cache, beside its speed alone."""
    options = [*flags(wishes), "--disk-cache", disk_cache]
    with waiting("measuring, some minutes"), ServerProcess(model, options) as server:
        found = asyncio.run(measure(server, tokens, conversations))
    typer.echo(f"{model}, {tokens:,} tokens of {conversations} conversations: {found}")


if __name__ == "__main__":
    main(app)
