"""Ranks without a model: runners that only remember, and take what decisions a plan leaves to whoever carries it out.

No torch, so that a process of one starts in a fraction of a second.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.contract.events import RegionRead
from kakera.contract.grid import PAGE, pages_for
from kakera.contract.step import (
    Action,
    ResetSlot,
    RowResult,
    SamplingInput,
    SavePoint,
    Segment,
    StepPlan,
    StepResult,
)
from kakera.errors import CheckpointError
from kakera.run.engine import LocalEngine
from kakera.run.interface import NOTHING_SAMPLED
from kakera.run.ranks.leader import LeadingRunner
from kakera.run.ranks.meeting import Meeting, memory_bytes
from kakera.run.ranks.memory import mapped, shared_memory
from kakera.run.ranks.start import Followers
from kakera.run.ranks.wire import Peer, Wire
from kakera.schedule.limits import Limits
from kakera.schedule.scheduler import Scheduler

VOCAB, SLOTS, CONTEXT = 256, 4, 2048


@dataclass
class SymbolicRunner:
    """Remembers a number for what each slot holds, and meets the other ranks once a row. Rank 0's next token is a
    function of that number; a follower hears nothing of it but by the next plan."""

    meeting: Meeting
    held: dict[int, int] = field(default_factory=dict)  # by slot
    ahead: dict[int, int] = field(default_factory=dict)  # slot -> position of a row that ran ahead
    branch: tuple[int, ...] = ()

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] = NOTHING_SAMPLED) -> StepResult:
        for action in plan.before:
            if isinstance(action, ResetSlot):
                self.held[action.slot] = 0
                self.ahead.pop(action.slot, None)
        taken, results = [], []
        ahead, self.ahead = self.ahead, {plan.decode[i].slot: plan.decode[i].end for i in plan.may_follow}
        for row in plan.rows:
            taken += [row.slot, int(ahead.get(row.slot) == row.start)]
            self.held[row.slot] = zlib.crc32(repr((row.tokens, row.new_pages, row.saves)).encode(), self.held[row.slot])
            self.meeting.everyones("sum", memoryview(bytes(8)))
            tokens = (self.held[row.slot] % VOCAB,) if row.sampled and self.meeting.rank == 0 else ()
            results.append(RowResult(row.request_id, tokens))
        self.branch = tuple(taken)
        return StepResult(plan.step, tuple(results), 0.0)

    def sweep(self) -> list[RegionRead]:
        return [RegionRead("memory", 0, 1, (1.0,))]


def random_plans(seed: int, steps: int) -> list[StepPlan]:
    """Prompts that begin, decode and end in any slots; some decode rows run ahead."""
    rng, plans = random.Random(seed), []
    at: dict[int, int] = {}
    for step in range(1, steps + 1):
        before: list[Action] = []
        decode: list[Segment] = []
        prefill: list[Segment] = []
        for slot in range(SLOTS):
            if slot not in at or rng.random() < 0.1:
                before.append(ResetSlot(slot))
                at[slot] = count = rng.randrange(1, 200)
                prefill.append(_row(rng, slot, 0, count, 0))
            elif rng.random() < 0.8:
                decode.append(_row(rng, slot, at[slot], 1, pages_for(at[slot])))
                at[slot] += 1
        following = tuple(i for i in range(len(decode)) if not prefill and rng.random() < 0.7)
        plans.append(StepPlan(step, tuple(before), tuple(decode), tuple(prefill), (), following))
    return plans


def _row(rng: random.Random, slot: int, start: int, count: int, known: int) -> Segment:
    tokens = tuple(rng.randrange(VOCAB) for _ in range(count))
    pages = tuple(rng.randrange(99) for _ in range(pages_for(start + count) - known))
    saves = tuple(SavePoint(PAGE, 7) for _ in range(rng.randrange(2)) if start == 0 and count > PAGE)
    return Segment(f"request {slot}", slot, tokens, start, known, pages, 1, 0, saves)


@dataclass(frozen=True)
class Known(Peer):
    """A rank that is a thread here: always at work, unless a test says otherwise."""

    doing: Callable[[], tuple[str, float]] = lambda: ("running", 0.0)
    ended: list[bool] = field(default_factory=list)

    def activity(self) -> tuple[str, float]:
        return self.doing()

    def end(self) -> None:
        self.ended.append(True)


def wires(peer: Peer | None = None) -> tuple[Wire, Wire]:
    """Two ends, of rank 0 and of rank 1. `peer`: what rank 0 sees of the other."""
    one, other = socket.socketpair()
    return Wire(one, peer or Known(1, 0)), Wire(other, Known(0, 0))


def meetings(ranks: int, peer: Peer | None = None) -> list[Meeting]:
    """Of ranks in this process. `peer`: what rank 0 sees of rank 1."""
    memory = shared_memory(memory_bytes(ranks))
    ends: list[dict[int, Wire]] = [{} for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        mine, its = socket.socketpair()
        ends[one][other] = Wire(mine, peer if peer and (one, other) == (0, 1) else Known(other, 0))
        ends[other][one] = Wire(its, Known(one, 0))
    found = [Meeting(rank, mapped(memory), ends[rank]) for rank in range(ranks)]
    os.close(memory)
    return found


class Killed(BaseException):
    """The kernel's way: nobody cleans up, and all descriptors are closed."""


def killed_at(count: int, ends: list[Wire]) -> None:
    """Have whoever has these ends die when it begins to use one of them for the time `count`."""
    used = 0

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def used_once(*given: Any) -> Any:
            nonlocal used
            used += 1
            if used == count:
                for end in ends:
                    end.hang_up()
                raise Killed
            return act(*given)

        return used_once

    for end in ends:
        end.send, end.receive = dying(end.send), dying(end.receive)  # type: ignore[method-assign]


def together(meetings: list[Meeting], work: Callable[[Meeting], Any]) -> list[Any]:
    """`work` of each at the same time: what it returned or raised."""

    def caught(meeting: Meeting) -> Any:
        try:
            return work(meeting)
        except Killed as death:
            return death
        except BaseException as error:
            meeting.abort(f"rank {meeting.rank}: {error}")
            return error

    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(caught, meetings))


@dataclass(frozen=True)
class SymbolicRecipe:
    """An engine of some ranks, each a process. `late`: seconds that rank 0 is built for; `fails`: the step in which
    rank 1 raises; `refuses`: it can not be built; `absent`: it never comes to meet."""

    ranks: int = 2
    late: float = 0.0
    fails: int = -1
    refuses: str = ""
    absent: bool = False

    def __call__(self) -> LocalEngine:
        followers = Followers(self.follower, self.ranks)
        try:
            time.sleep(self.late)
            followers.wait_built()
            followers.meeting.meet()
        except BaseException:
            followers.close()
            raise
        runner = LeadingRunner(SymbolicRunner(followers.meeting), followers.meeting, followers.wires)
        pages = SLOTS * pages_for(CONTEXT)
        sizes = CacheSizes(pages, 4096, checkpoint_bytes=1, sink_bytes=1, page_bytes=1, windowed=False)
        limits = Limits(context=CONTEXT, pages=pages, slots=SLOTS, chunk=256)
        return LocalEngine(Scheduler(limits, PrefixCache(sizes), time.monotonic), runner)

    def follower(self, meeting: Meeting) -> tuple[SymbolicRunner, Meeting]:
        if self.refuses:
            raise CheckpointError(self.refuses)
        runner = SymbolicRunner(meeting)
        execute = runner.execute

        def executed(plan: StepPlan) -> StepResult:
            if plan.step == self.fails:
                raise MemoryError("no memory for a step")
            return execute(plan)

        runner.execute = executed  # type: ignore[method-assign, assignment]
        if self.absent:
            meeting.meet = lambda: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
        return runner, meeting
