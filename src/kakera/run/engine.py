"""LocalEngine: scheduler + runner in the caller's process (tests, evaluation, and inside the engine process)."""

from __future__ import annotations

from kakera.run.interface import EngineLimits, Runner
from kakera.schedule.request import EngineStats, Event, Request
from kakera.schedule.scheduler import Scheduler


class LocalEngine:
    """Not thread-safe: one caller submits, aborts and steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self.runner = runner

    @property
    def limits(self) -> EngineLimits:
        limits = self.scheduler.limits
        return EngineLimits(limits.context, limits.max_waiting)

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self) -> list[Event]:
        plan = self.scheduler.plan_step()
        if plan is None:
            return self.scheduler.take_events()
        return self.scheduler.commit(plan, self.runner.execute(plan))

    def stats(self) -> EngineStats:
        return self.scheduler.stats()
