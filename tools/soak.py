"""Endurance: random mixed traffic for minutes, then an idle server that must have everything back.

`python -m tools.soak` in the root of the repository; `--help` tells its options, docs/developers/benchmarks.md what it
checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import psutil
import typer

from kakera.bench.client import Client
from kakera.bench.figure import Figure, table
from kakera.bench.server import ServerProcess, flags
from kakera.bench.text import Prose
from kakera.cli import main
from kakera.cli.bench_common import show, waiting
from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.errors import EngineDied, KakeraError, UsageError
from kakera.plan.plan import Wishes
from tools.soak_checks import Peak, ProcessReading, Snapshot, Tally, idle, judge
from tools.soak_traffic import Shot, Traffic, read_answer

WARM_UP_SECONDS = 60.0  # at most a fifth of the whole; grew by 12 MB (server) and 87 MB (engine) after one of 5 s
IDLE_SECONDS = 15.0  # an idle engine reports once a second; what is held after this long has leaked
WATCH_SECONDS = 0.5
WORKERS_PER_SLOT = 2  # half of them wait in the queue
CANARY_CHARS, CANARY_TOKENS = 600, 24
LEAST_CONTEXT = 1024
FAILED = re.compile(r'^kakera_engine_counter\{name="finished: error"\} (\S+)$', re.MULTILINE)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Report:
    """`seconds` and `tally` are of the whole run, warm-up included."""

    seconds: float
    tally: Tally
    peak: Peak
    before: Snapshot
    after: Snapshot
    checks: list[Figure]

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "checks": [check.json() for check in self.checks]}

    def lines(self) -> str:
        """What the run was like, below the table of its checks."""
        tally, peak, engine = self.tally, self.peak, self.after.engine
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.sent.items()))
        ends = (
            f"{tally.left} left by the client, {tally.refused} refused as they must be, {tally.queue_full} told to wait"
        )
        seen = f"at most {peak.running} running and {peak.waiting} waiting"
        pages = f"{peak.pages_held} of {engine['pages_total']} pages held by requests, {peak.pages_filled} filled"
        counters = ", ".join(f"{name} {count:,.0f}" for name, count in engine["counters"].items())
        return "\n".join((f"sent: {kinds}", ends, f"{seen}; {pages}", f"engine: {counters}", *tally.faults))


@dataclass
class Worker:
    """One client: its requests go on where they were when the warm-up ended."""

    name: str
    traffic: Traffic
    shots: Iterator[Shot]
    sent: int = 0


class Soak:
    """Traffic on the server at `url`; with its `process` known, memory, open files and log are looked at too.

    `tally` grows while it runs.
    """

    def __init__(self, url: str, seed: int, api_key: str | None = None, process: ServerProcess | None = None):
        self._url, self._key, self._seed, self._process = url, api_key, seed, process
        self.tally, self._peak = Tally(), Peak()
        self._prose = Prose()
        self._canary = self._prose.text[:CANARY_CHARS]
        self._expected: str | None = None
        self._workers: list[Worker] = []

    async def run(self, minutes: float, tell: Callable[[str], None] = lambda _: None) -> Report:
        """Raises EngineDied as soon as the server no longer answers, UsageError for a context below LEAST_CONTEXT."""
        began, seconds = time.monotonic(), minutes * 60
        await self._prepare()
        warm_up = min(WARM_UP_SECONDS, seconds / 5)
        tell(f"warm-up: {warm_up:.0f} s of traffic")
        await self._traffic(warm_up)
        before = await self._settled()
        tell(f"traffic for {(seconds - warm_up) / 60:.1f} minutes")
        await self._traffic(seconds - warm_up)
        tell("waiting until it is idle")
        after = await self._settled()
        async with Client(self._url, self._key) as client:
            await self._ask_canary(client)
        tracebacks = self._process.log().count("Traceback (most recent call last)") if self._process else 0
        checks = judge(before, after, self.tally, tracebacks, warm=warm_up >= WARM_UP_SECONDS)
        return Report(time.monotonic() - began, self.tally, self._peak, before, after, checks)

    async def _prepare(self) -> None:
        """The canary's text on an idle server, the density of the tokenizer, and a worker for each place."""
        async with Client(self._url, self._key) as client:
            status = await client.status()
            if status["context"] < LEAST_CONTEXT:
                raise UsageError(f"a soak needs a context of {LEAST_CONTEXT} tokens, not {status['context']}")
            trace = await client.complete(self._canary, CANARY_TOKENS)
        self._expected, self.tally.canaries = trace.text, 1
        self._prose.calibrate(self._canary, trace.prompt_tokens)
        count = WORKERS_PER_SLOT * status["engine"]["slots_total"]
        traffics = [Traffic(self._prose, status["context"], self._seed, i) for i in range(count)]
        self._workers = [Worker(f"worker {i}", traffic, traffic.shots()) for i, traffic in enumerate(traffics)]

    async def _traffic(self, seconds: float) -> None:
        """All workers at once; each ends with the request that it has begun before the time is up."""
        deadline = time.monotonic() + seconds
        async with Client(self._url, self._key) as client:
            watching = asyncio.create_task(self._watch(client))
            try:
                async with asyncio.TaskGroup() as group:
                    for worker in self._workers:
                        group.create_task(self._work(client, worker, deadline))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                watching.cancel()

    async def _work(self, client: Client, worker: Worker, deadline: float) -> None:
        while time.monotonic() < deadline:
            shot = next(worker.shots)
            worker.sent += 1
            self.tally.count(shot.kind)
            try:
                if shot.kind == "canary":
                    await self._ask_canary(client)
                else:
                    await self._send(client, worker, shot)
            except KakeraError as error:
                self.tally.server_errors += 1
                self.tally.note(f"{worker.name}, request {worker.sent} ({shot.kind}): {error}")
                if not await client.healthy():
                    raise EngineDied(f"the server no longer answers; the first faults: {self.tally.faults}") from None

    async def _send(self, client: Client, worker: Worker, shot: Shot) -> None:
        try:
            async with asyncio.timeout(shot.leave_after):
                status, body = await client.send(shot.path, shot.body)
        except TimeoutError:
            self.tally.left += 1
            return
        if not self.tally.count_status(status, bad=shot.kind == "bad"):
            what = f"{worker.name}, request {worker.sent} ({shot.kind}), {shot.path}"
            self.tally.note(f"{what}: HTTP {status}: {body[:300]}")
        elif status == 200:
            answer = read_answer(shot, body)
            if answer.fault:
                raise KakeraError(f"{shot.path}: {answer.fault}")
            worker.traffic.answered(answer.text)

    async def _ask_canary(self, client: Client) -> None:
        text = (await client.complete(self._canary, CANARY_TOKENS)).text
        self.tally.canaries += 1
        if text != self._expected:
            self.tally.canaries_changed += 1
            self.tally.note(f"the canary said {text!r}, not {self._expected!r}")

    async def _watch(self, client: Client) -> None:
        while True:
            with contextlib.suppress(KakeraError):  # the workers notice a server that is gone
                self._peak.see((await client.status())["engine"])
            await asyncio.sleep(WATCH_SECONDS)

    async def _settled(self) -> Snapshot:
        """The server once it is idle, or as it is after IDLE_SECONDS. No connection but the asking one is open."""
        deadline = time.monotonic() + IDLE_SECONDS
        async with Client(self._url, self._key) as client:
            while not idle(engine := (await client.status())["engine"]) and time.monotonic() < deadline:
                await asyncio.sleep(WATCH_SECONDS)
            failed = FAILED.search(await client.text("/metrics"))
            healthy = await client.healthy()
        processes = read_processes(self._process.pid) if self._process else ()
        return Snapshot(engine, healthy, int(float(failed[1])) if failed else 0, processes)


def read_processes(pid: int) -> tuple[ProcessReading, ...]:
    """The server, its engine (its largest child) and other children, if any, as helpers."""
    server = psutil.Process(pid)
    children = sorted(server.children(recursive=True), key=lambda child: -child.memory_info().rss)
    names = ["server", "engine", *(f"helper {i}" for i in range(1, len(children)))]
    return tuple(
        ProcessReading(name, process.num_fds(), process.memory_info().rss)
        for name, process in zip(names, (server, *children), strict=False)
    )


@app.command()
@with_memory_options
def soak(
    model: ModelArgument = "mini",
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="Time of all traffic.")] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides what each worker sends.")] = 0,
    url: Annotated[str | None, typer.Option("--url", help="Use this server instead of starting one.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key of the server at --url.")] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Random mixed traffic, then an idle server that must have everything back. Exit status 1 if not."""
    with contextlib.ExitStack() as stack:
        process, subject = None, url
        if url is None:
            with waiting("starting the server"):
                process = stack.enter_context(ServerProcess(model, flags(wishes)))
            url, subject = process.url, model
        with waiting("soaking") as tell:
            report = asyncio.run(Soak(url, seed, api_key, process).run(minutes, tell))
    title = f"{subject}: {report.tally.requests} requests in {report.seconds:.0f} s, seed {seed}"
    result = {"subject": subject, "seed": seed, **report.json()}
    show(result, as_json, [table(report.checks, title), report.lines()])
    if not all(check.ok for check in report.checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
