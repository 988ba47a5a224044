"""The two seams of the engine: Runner (executes a StepPlan) and Engine (what a server talks to)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kakera.contract.events import EngineStats, Event, Flushed, RegionRead, SleepState
from kakera.contract.request import NO_LIMIT, Request
from kakera.contract.step import SamplingInput, StepPlan, StepResult

NOTHING_SAMPLED: Mapping[str, SamplingInput] = MappingProxyType({})
PROBE = "health-"  # ids of requests by which a server sees whether a token comes; scripts spend no stream on them


class Runner(Protocol):
    """Carries out step plans on a device, or pretends to (scripted). Decides nothing."""

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] = NOTHING_SAMPLED) -> StepResult:
        """Run one step to its end. `sampling` has an entry for each row that is sampled or scored. A row that
        fails gets `RowResult.error`; raising means that the device is lost."""
        ...

    def sweep(self) -> list[RegionRead]:
        """Time reads of all the device's memory that is held for good, between steps. Empty for a script."""
        ...


class Sleeps(Protocol):
    """Gives the memory of a runner's device back, and takes it again. See Engine.sleep and Engine.wake_up."""

    def sleep(self, level: int) -> SleepState: ...

    def wake_up(self, progress: Callable[[int, int], None]) -> SleepState: ...


class Engine(Protocol):
    """One model that can be asked. Implemented in process (tests, Python API) and by a client of the engine process."""

    def submit(self, request: Request, allowed: int = NO_LIMIT) -> None:
        """Queue a request. Raises RequestRefused (400 if it can never run, 429 if the queue is full).

        It pauses, while others go on, when it has generated `allowed` tokens: what waits for a reader has a bound.
        """
        ...

    def allow(self, request_id: str, tokens: int) -> None:
        """Its reader has come further: a request may generate up to `tokens` tokens in all. Unknown ids are ignored."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; it ends with Finished("abort") unless it has ended already. Unknown ids are ignored."""
        ...

    def step(self) -> list[Event]:
        """Plan, execute and commit one step; returns what happened. Empty if there is nothing to do."""
        ...

    def flush(self, disk: bool = False) -> Flushed:
        """Forget every cached prefix that no running request holds; with `disk` also all that this model has on the
        disk, whose files go in the background. Between steps only."""
        ...

    def sweep(self) -> list[RegionRead]:
        """See Runner.sweep."""
        ...

    def sleep(self, level: int) -> SleepState:
        """Give the device's memory back: who runs waits, with states and pages in the host store, and goes on when the
        engine is woken. Level 1 keeps the weights in host memory, level 2 reads them again. Never less deep than
        before. Raises RequestRefused (503) if the host lacks memory; the engine is awake then. Between steps only."""
        ...

    def wake_up(self, progress: Callable[[int, int], None]) -> SleepState:
        """`progress` (done, in all) of what is read again. Raises RequestRefused (503) if the device lacks memory, or
        the model can not be read; the engine sleeps on then."""
        ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class EngineLimits:
    """What a server must know to refuse early. Tokens."""

    context: int  # prompt + completion of one request can never be longer
    max_waiting: int  # queued requests beyond the running ones; more get 429


class AsyncEngine(Protocol):
    """The engine as the server's event loop sees it (a client of the engine process, or a fake in tests)."""

    limits: EngineLimits

    def stream(self, request: Request) -> AsyncIterator[Event]:
        """Submit and yield events up to and including Finished.

        Raises RequestRefused before the first event if the request is refused, EngineDied if the engine is gone.
        Closing the iterator early (client disconnect) aborts the request. Asking for an event says that those before
        have been read: the request pauses when too many tokens wait for that.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request and keep its stream (stop string found): it ends with Finished("abort") and its usage."""
        ...

    async def flush(self, disk: bool = False) -> Flushed:
        """See Engine.flush. Raises EngineDied."""
        ...

    async def sweep(self) -> list[RegionRead]:
        """See Runner.sweep. Raises EngineDied."""
        ...

    async def sleep(self, level: int) -> SleepState:
        """See Engine.sleep. Raises EngineDied."""
        ...

    async def wake_up(self) -> SleepState:
        """See Engine.wake_up. Raises EngineDied."""
        ...

    async def stats(self) -> EngineStats:
        """The engine's last report, and requests that were sent since as waiting ones. The same `at` again means that
        there was no new report: an idle engine reports once a second, a busy one after each step. Raises EngineDied.
        """
        ...
