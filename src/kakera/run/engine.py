"""LocalEngine: scheduler + runner in the caller's process (tests, evaluation, and inside the engine process)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kakera.cache.announced import Announced
from kakera.contract.events import EngineStats, Event, Flushed, RegionRead, SleepState
from kakera.contract.request import NO_LIMIT, Request
from kakera.contract.step import StepPlan, StepResult
from kakera.run.card_watch import CardWatch
from kakera.run.interface import EngineLimits, Runner, Sleeps
from kakera.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from kakera.run.process.kv_events import Publisher


class LocalEngine:
    """Not thread-safe: one caller submits, aborts and steps."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sleeper: Sleeps | None = None, card: CardWatch | None = None
    ):
        """`sleeper`: of the runner; without one there is no memory to give back. `card`: gives back some while other
        programs need it."""
        self.scheduler = scheduler
        self.runner = runner
        self.card = card
        self.asleep = 0
        self._sleeper = sleeper
        self._unseen: list[Event] = []
        self._publisher: Publisher | None = None
        self._announced: Announced | None = None

    @property
    def limits(self) -> EngineLimits:
        limits = self.scheduler.limits
        return EngineLimits(limits.context, limits.max_waiting)

    def submit(self, request: Request, allowed: int = NO_LIMIT) -> None:
        self.scheduler.submit(request, allowed)

    def allow(self, request_id: str, tokens: int) -> None:
        self.scheduler.allow(request_id, tokens)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self, planned: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """See Engine.step. If the runner raises (or Ctrl-C does), the step's requests end as failed, which the next
        call reports, and the engine can be asked again.

        `planned` hears at once what planning alone has brought (who begins), since the step itself can take long.
        """
        if self.card is not None and not self.asleep:
            self.card.follow(self.scheduler, self.runner)
        plan = None if self.asleep else self.scheduler.plan_step()
        if plan is None:
            return self._take_unseen() + self.scheduler.take_events()
        if planned and (events := self._take_unseen() + self.scheduler.take_events()):
            planned(events)
        try:
            result = self.runner.execute(plan, self.scheduler.sampling_of(plan))
        except BaseException:
            self._unseen += self.scheduler.commit(plan, StepResult(plan.step, (), 0.0))
            raise
        return self._take_unseen() + self.scheduler.commit(plan, result)

    def _take_unseen(self) -> list[Event]:
        unseen, self._unseen = self._unseen, []
        return unseen

    def flush(self, disk: bool = False) -> Flushed:
        """See Engine.flush. The host's memory is free when this returns."""
        flushed, plan = self.scheduler.flush()
        self.runner.execute(plan)
        if disk and self.scheduler.disk is not None:
            return replace(flushed, disk_bytes=self.scheduler.disk.purge())
        return flushed

    def sleep(self, level: int) -> SleepState:
        """See Engine.sleep."""
        if self.asleep == 0:
            self.runner.execute(self.scheduler.suspend())
        state = SleepState(max(level, self.asleep)) if self._sleeper is None else self._sleeper.sleep(level)
        self.asleep = state.level
        return state

    def wake_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> SleepState:
        """See Engine.wake_up."""
        state = SleepState(0) if self._sleeper is None else self._sleeper.wake_up(progress)
        self.asleep = state.level
        return state

    def publish(self, publisher: Publisher) -> None:
        """From now on routers hear what can be hit: see `announce`. To be called before the first request."""
        self._announced, self._publisher = self.scheduler.cache.announce(), publisher

    def announce(self) -> None:
        """Tell what has changed since the last call, unless much waits to be told already. Between steps."""
        publisher, announced = self._publisher, self._announced
        if publisher is None or announced is None or publisher.full:
            return
        if publisher.lost.is_set():
            publisher.lost.clear()
            announced.again()
        if events := announced.take():
            publisher.offer(events)

    def sweep(self) -> list[RegionRead]:
        """See Runner.sweep."""
        return self.runner.sweep()

    @property
    def keeps(self) -> bool:
        """There is a disk cache."""
        return self.scheduler.disk is not None

    @property
    def fetching(self) -> bool:
        """Something goes on beside the steps: ask again soon, even if there was nothing to compute."""
        return not self.asleep and self.scheduler.disk is not None and self.scheduler.disk.busy

    def keep(self, seconds: float) -> None:
        """Before the end: what conversations hold goes to the disk, the most recent first, for at most so long. What
        still runs ends."""
        if (disk := self.scheduler.disk) is None:
            return
        self.scheduler.abort_all()
        end = time.monotonic() + seconds
        for _ in disk.write_all(seconds):
            self.runner.execute(StepPlan(0, self.scheduler.cache.take_actions()))
        disk.tier.close(max(1.0, end - time.monotonic()))

    def stats(self) -> EngineStats:
        return replace(self.scheduler.stats(), asleep=self.asleep)
