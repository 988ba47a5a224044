"""Several servers behind a router: where conversations go, what is cached there, and what is lost when servers end.

`python -m tools.scale` in the root of the repository; `--help` tells its options, docs/scale-out.md what was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import typer

from kakera.bench.client import Client
from kakera.bench.figure import Figure, table
from kakera.bench.server import ServerProcess, flags
from kakera.bench.text import Prose
from kakera.cli import main
from kakera.cli.bench_common import show, waiting
from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.contract.grid import PAGE
from kakera.errors import KakeraError, UsageError
from kakera.plan.plan import Wishes
from tools.scale_fleet import Fleet, Router, Worker, router_named
from tools.scale_traffic import ANSWER_TOKENS, Conversation, Crowd, Reply, conversations_of

PARTS = ("turns", "credit", "killed", "restarted", "drained", "added", "first-token")
STREAM_TOKENS = 160
NEW_REQUESTS = 6
CUT_SECONDS, JOIN_SECONDS, ADDED_SECONDS = 2.0, 5.0, 0.020
STEP_SECONDS = 0.05
PAIRS = 9

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Size:
    """Of the traffic. `system`, `tokens`, `long`: tokens of what all begin with, of a message, of the timed prompt."""

    conversations: int
    turns: int
    at_once: int
    system: int
    tokens: int
    long: int


class Trial:
    """Measures a fleet; `figures` grow part by part. Use `run` once."""

    def __init__(self, fleet: Fleet, prose: Prose, size: Size, seed: int, sessions: bool):
        self._fleet, self._prose, self._size, self._seed = fleet, prose, size, seed
        self._sessions = sessions
        self._conversations, self._said = conversations_of(
            prose, size.conversations, size.turns, size.system, size.tokens
        )
        self.figures: list[Figure] = []

    def fresh(self) -> list[Conversation]:
        return [conversation.copy() for conversation in self._conversations]

    async def alone(self, url: str) -> tuple[int, int]:
        """The same turns on one server with room for everything: tokens of later turns that were cached, and all."""
        async with Crowd(url) as crowd:
            conversations = self.fresh()
            await crowd.converse(conversations, self._said, self._size.at_once, self._seed)
        later = _later(conversations)
        _check(later)
        return sum(reply.cached for reply in later), sum(reply.prompt for reply in later)

    async def run(self, parts: Sequence[str], best: tuple[int, int] | None, tell: Callable[[str], None]) -> None:
        async with Crowd(self._fleet.url, self._sessions) as crowd, Crowd(self._fleet.url, False) as nameless:
            for part in parts:
                tell(part)
                await {
                    "turns": lambda: self._turns(crowd, best),
                    "credit": lambda: self._credit(nameless),
                    "killed": lambda: self._killed(crowd),
                    "restarted": lambda: self._restarted(nameless),
                    "drained": lambda: self._drained(crowd),
                    "added": lambda: self._added(crowd),
                    "first-token": lambda: self._first_token(crowd),
                }[part]()

    def _figure(self, name: str, value: float, side: str, bar: float, form: str = ".0f", **more: str) -> None:
        self.figures.append(Figure(name, value, side, bar, form, **more))  # type: ignore[arg-type]

    async def _turns(self, crowd: Crowd, best: tuple[int, int] | None) -> None:
        await crowd.converse(self._conversations, self._said, self._size.at_once, self._seed)
        later = _later(self._conversations)
        _check(later)
        home = self._fleet.home()
        pairs = [pair for each in self._conversations for pair in zip(each.replies, each.replies[1:], strict=False)]
        stayed = sum(home[before.id] == home[after.id] for before, after in pairs)
        share = sum(reply.cached for reply in later) / sum(reply.prompt for reply in later)
        spread = [sum(home[r.id] == name for r in later) for name in sorted({*home.values()})]
        note = f"{len(pairs)} turns; by server {', '.join(map(str, spread))}"
        self._figure("later turns on the server of the turn before", stayed / len(pairs), ">=", 0.95, ".2f", note=note)
        if best is not None:
            whole = best[0] / best[1]
            note = f"{share:.3f} of their tokens were cached; {whole:.3f} on one server that has everything"
            self._figure("cached, as a share of one server that has everything", share / whole, ">=", 0.95, note=note)
            self.figures[-1] = replace(self.figures[-1], form=".2f")

    async def _credit(self, crowd: Crowd) -> None:
        """One request after the other, so that the router's decisions are those of its log in the same order. Without a
        session, of which the router would think first."""
        below, above, credited = 0, 0, 0
        for conversation in self._conversations:
            await asyncio.sleep(2 * STEP_SECONDS)  # events of the turn before are on their way
            seen = len(self._fleet.credits())
            reply = await crowd.turn(conversation, self._prose.take(self._size.tokens))
            _check([reply])
            said = self._fleet.credits()[seen:]
            if not said:
                raise KakeraError("the router's log does not say what it credits")
            credited += said[-1]
            below, above = max(below, reply.cached - said[-1]), max(above, said[-1] - reply.cached)
        note = f"{len(self._conversations)} requests, {credited:,} tokens credited"
        self._figure("credited less than was cached, at most", below, "<=", 0, unit=" tokens", note=note)
        gap = self._size.tokens + ANSWER_TOKENS + PAGE  # between two checkpoints
        self._figure("credited more than was cached, at most", above, "<=", gap, unit=" tokens")

    async def _streams(self, crowd: Crowd) -> tuple[list[asyncio.Task[Reply]], Worker]:
        """Long answers, two a server, all of them begun; and the server that has most of them."""
        count = 2 * len(self._fleet.live)
        begun = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(crowd.ask(self._opening(), f"stream-{time.monotonic()}", STREAM_TOKENS, event.set))
            for event in begun
        ]
        for task, event in zip(tasks, begun, strict=True):
            started = asyncio.create_task(event.wait())
            await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
        running = [(await asyncio.to_thread(worker.running), worker) for worker in self._fleet.live]
        return tasks, max(running, key=lambda found: found[0])[1]

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._prose.take(self._size.tokens)}]

    async def _new(self, crowd: Crowd) -> list[Reply]:
        asked = (crowd.ask(self._opening(), f"new-{time.monotonic()}") for _ in range(NEW_REQUESTS))
        return list(await asyncio.gather(*asked))

    async def _killed(self, crowd: Crowd) -> None:
        tasks, worker = await self._streams(crowd)
        had = await asyncio.to_thread(worker.running)
        at = time.perf_counter()
        worker.kill()
        self._fleet.lose(worker)
        new = await self._new(crowd)
        replies = await asyncio.gather(*tasks)
        cut = [reply for reply in replies if reply.fault]
        note = f"of {len(replies)} streams; {', '.join(sorted({reply.fault for reply in cut})) or 'no error seen'}"
        last = max((reply.ended - at for reply in cut), default=float("nan"))
        self._figure("killed: its streams end with an error within", last, "<=", CUT_SECONDS, ".2f", unit=" s")
        self._figure("killed: streams that failed", len(cut), "<=", had, note=note)
        self._lost("killed: new requests that failed", new)

    async def _restarted(self, crowd: Crowd) -> None:
        """The next turn of all conversations while the server that ended comes back empty."""
        gone = [worker for worker in self._fleet.workers if worker not in self._fleet.live]
        starting = asyncio.create_task(asyncio.to_thread(self._fleet.start, f"{gone[-1].name} again", gone[-1]))
        seen = len(self._fleet.credits())
        replies: list[Reply] = []
        while not starting.done() or len(replies) < len(self._conversations):
            conversation = self._conversations[len(replies) % len(self._conversations)]
            replies.append(await crowd.turn(conversation, "And then?"))
        self._lost("restarted: turns that failed meanwhile", replies)
        await asyncio.sleep(JOIN_SECONDS)
        again = [await crowd.turn(conversation, "And then?") for conversation in self._conversations]
        self._lost("restarted: turns that failed afterwards", again)
        if len(said := self._fleet.credits()[seen:]) >= len(again):
            pairs = zip(said[-len(again) :], again, strict=True)
            above = max(credit - reply.cached for credit, reply in pairs)
            gap = self._size.tokens + ANSWER_TOKENS + PAGE
            self._figure("restarted: credited more than is there, at most", above, "<=", gap, unit=" tokens")
        await starting

    async def _drained(self, crowd: Crowd) -> None:
        tasks, worker = await self._streams(crowd)
        had = await asyncio.to_thread(worker.running)
        async with Crowd(worker.url) as direct:
            await direct.post("/drain")
        self._fleet.lose(worker)
        new = await self._new(crowd)
        replies = await asyncio.gather(*tasks)
        self._lost("drained: streams that failed", replies, f"it had {had} of them")
        self._lost("drained: new requests that failed", new)
        status = await asyncio.to_thread(worker.wait, 60)
        self._figure("drained: exit status", float("nan") if status is None else status, "<=", 0)

    async def _added(self, crowd: Crowd) -> None:
        """A new server under load: conversations begin all the time."""
        worker = await asyncio.to_thread(self._fleet.start, f"server {len(self._fleet.workers)}")
        tasks, _ = await self._streams(crowd)
        at = time.perf_counter()
        adding = asyncio.create_task(asyncio.to_thread(self._fleet.add, worker))
        first, new = float("nan"), []
        while time.perf_counter() - at < 4 * JOIN_SECONDS:
            new.append(await crowd.ask(self._opening(), f"new-{time.monotonic()}", 1))
            if worker.answered():
                first = time.perf_counter() - at
                break
        await adding
        self._lost("added: streams that failed", await asyncio.gather(*tasks))
        self._lost("added: new requests that failed", new)
        self._figure("added: first request of the new server after", first, "<=", JOIN_SECONDS, ".2f", unit=" s")

    async def _first_token(self, crowd: Crowd) -> None:
        """A prompt that its server knows, directly and through the router by turns."""
        said = [{"role": "user", "content": self._prose.take(self._size.long)}]
        reply = await crowd.ask(said, "long", 1)
        _check([reply])
        home = self._fleet.home()[reply.id]
        worker = next(worker for worker in self._fleet.workers if worker.name == home)
        through, direct = [], []
        async with Crowd(worker.url) as near:
            for _ in range(PAIRS):
                direct.append(await near.ask(said, "long", 1))
                through.append(await crowd.ask(said, "long", 1))
        _check([*direct, *through])
        warm = [reply for reply in through if self._fleet.home()[reply.id] == home]
        if not warm:
            raise KakeraError("the router sent the long prompt to other servers each time")
        added = median(reply.ttft for reply in warm) - median(reply.ttft for reply in direct)
        note = f"{reply.prompt:,} tokens: {1e3 * median(r.ttft for r in direct):.0f} ms without it, {len(warm)} pairs"
        self._figure("added to a known prompt's first token", 1e3 * added, "<=", 1e3 * ADDED_SECONDS, note=note)
        self.figures[-1] = replace(self.figures[-1], unit=" ms")

    def _lost(self, name: str, replies: Sequence[Reply], note: str = "") -> None:
        faults = [reply.fault for reply in replies if reply.fault]
        self._figure(name, len(faults), "<=", 0, note=", ".join(sorted(set(faults))) or note or f"of {len(replies)}")


def _later(conversations: Sequence[Conversation]) -> list[Reply]:
    return [reply for conversation in conversations for reply in conversation.replies[1:]]


def _check(replies: Sequence[Reply]) -> None:
    for reply in replies:
        if reply.fault:
            raise KakeraError(f"a request failed: {reply.fault}")


async def _calibrate(url: str, prose: Prose, tokens: int) -> None:
    text = prose.take(tokens)
    async with Client(url) as client:
        prose.calibrate(text, (await client.complete(text, 1)).prompt_tokens)


def parts_of(only: str | None, router: Router | None) -> list[str]:
    """Those that were asked for, else all that can be measured with this router. Raises UsageError."""
    if router is None:
        possible: Sequence[str] = PARTS[:1]
    else:
        known = {"credit": bool(router.credit), "added": router.add is not None}
        possible = [part for part in PARTS if known.get(part, True)]
    chosen = only.split(",") if only else list(possible)
    if unknown := [part for part in chosen if part not in possible]:
        raise UsageError(f"--only {unknown[0]}: with this router choose {', '.join(possible)}")
    if "restarted" in chosen and "killed" not in chosen:
        raise UsageError("--only restarted needs a server that has ended: killed,restarted")
    return chosen


@app.command()
@with_memory_options
def scale(
    model: ModelArgument = "mini",
    router: Annotated[
        str | None,
        typer.Option("--router", help="vllm-router, smg, or a command with {port} and {urls}; none: one server."),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Of the environment that has the router.")] = sys.executable,
    router_options: Annotated[str, typer.Option("--router-options", help="More options of the router.")] = "",
    servers: Annotated[int, typer.Option("--servers", min=2)] = 3,
    conversations: Annotated[int, typer.Option("--conversations", min=1)] = 12,
    turns: Annotated[int, typer.Option("--turns", min=2, help="Of each conversation.")] = 6,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Turns that run at a time.")] = 4,
    system: Annotated[int, typer.Option("--system-tokens", min=16, help="That all conversations begin with.")] = 256,
    tokens: Annotated[int, typer.Option("--turn-tokens", min=16, help="Of each message.")] = 256,
    long: Annotated[
        int, typer.Option("--long", min=64, help="Tokens of the prompt whose first token is timed.")
    ] = 30_000,
    sessions: Annotated[
        bool, typer.Option("--sessions/--no-sessions", help="Whether requests say x-session-id.")
    ] = True,
    only: Annotated[str | None, typer.Option("--only", help=f"Of {', '.join(PARTS)}.", metavar="NAME,...")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides which conversation goes on when.")] = 0,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Several servers behind a router, against one that has everything. Exit status 1 if a bar is missed."""
    size = Size(conversations, turns, at_once, system, tokens, long)
    front = router_named(router, python, router_options) if router else None
    parts = parts_of(only, front)
    prose = Prose(seed)
    with waiting("starting servers") as tell, contextlib.ExitStack() as stack:
        fleet = Fleet(model, flags(wishes), servers if front else 1, front)
        trial = None
        best = None
        if "turns" in parts:
            roomy = flags(replace(wishes, host_cache=Wishes().host_cache))
            with ServerProcess(model, [*roomy, "--served-name", "model"]) as alone:
                asyncio.run(_calibrate(alone.url, prose, tokens))
                trial = Trial(fleet, prose, size, seed, sessions)
                tell("the turns on one server that has everything")
                best = asyncio.run(trial.alone(alone.url))
        stack.enter_context(fleet)
        if trial is None:
            asyncio.run(_calibrate(fleet.workers[0].url, prose, tokens))
            trial = Trial(fleet, prose, size, seed, sessions)
        asyncio.run(trial.run(parts, best, tell))
    title = f"{model}: {servers if front else 1} servers, {router or 'no router'} {router_options}".rstrip()
    shown = [figure.json() for figure in trial.figures]
    result: dict[str, Any] = {"model": model, "router": router, "options": router_options, "figures": shown}
    show(result, as_json, [table(trial.figures, title)])
    if not all(figure.ok for figure in trial.figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
