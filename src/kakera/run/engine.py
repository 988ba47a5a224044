"""LocalEngine: scheduler + runner in the caller's process (tests, evaluation, and inside the engine process)."""

from __future__ import annotations

from collections.abc import Callable

from kakera.contract.events import EngineStats, Event, Flushed
from kakera.contract.request import NO_LIMIT, Request
from kakera.contract.step import StepResult
from kakera.run.interface import EngineLimits, Runner
from kakera.schedule.scheduler import Scheduler


class LocalEngine:
    """Not thread-safe: one caller submits, aborts and steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self.runner = runner
        self._unseen: list[Event] = []

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
        plan = self.scheduler.plan_step()
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

    def flush(self) -> Flushed:
        """See Engine.flush. The host's memory is free when this returns."""
        flushed, plan = self.scheduler.flush()
        self.runner.execute(plan)
        return flushed

    def stats(self) -> EngineStats:
        return self.scheduler.stats()
