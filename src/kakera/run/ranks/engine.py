"""From a model directory and a plan to a running engine, of one rank or of several: rank 0 is this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kakera.contract.events import SleepState
from kakera.disk.home import DiskCache
from kakera.errors import RanksApart, RequestRefused, UsageError
from kakera.plan.plan import Plan
from kakera.run.build import build_engine, build_runner, scheduler_for
from kakera.run.engine import LocalEngine
from kakera.run.process.starting import Tell
from kakera.run.ranks.exchange import ProcessExchange
from kakera.run.ranks.leader import LeadingRunner
from kakera.run.ranks.meeting import Meeting
from kakera.run.ranks.start import Followers, end_process
from kakera.run.step.runner import TorchRunner
from kakera.run.threads import USERS
from kakera.target.threads import given_threads


@dataclass(frozen=True)
class RankBuild:
    """How any rank is built; can be pickled. `threads`: of a CPU, for all ranks together."""

    directory: Path
    plan: Plan
    escha_bias: bool = False
    threads: int | None = None

    def __call__(
        self, meeting: Meeting, progress: Tell | None = None, grammars: bool = False
    ) -> tuple[TorchRunner, ProcessExchange]:
        exchange = ProcessExchange(meeting)
        self._share_threads(meeting.ranks)
        runner = build_runner(
            self.directory,
            self.plan,
            exchange=exchange,
            progress=progress,
            grammars=grammars,
            escha_bias=self.escha_bias,
        )
        return runner, exchange

    def _share_threads(self, ranks: int) -> None:
        """All ranks compute at the same time."""
        import torch

        if self.threads is not None or not any(name in os.environ for name in USERS):
            torch.set_num_threads(max(1, (self.threads or given_threads()) // ranks))


class RanksEngine(LocalEngine):
    """Of several ranks, all of which would have to give their memory back."""

    def sleep(self, level: int) -> SleepState:
        raise RequestRefused(
            "a model that several processes share can not sleep yet; stop the server to have its memory",
            status=501,
            code="can_not_sleep",
        )


def open_engine(
    directory: Path,
    plan: Plan,
    *,
    progress: Tell | None = None,
    escha_bias: bool = False,
    grammars: bool = False,
    threads: int | None = None,
    disk: DiskCache | None = None,
) -> LocalEngine:
    """An engine as `build_engine` makes it, with as many ranks as the plan has. Raises CheckpointError, UsageError, and
    RanksApart if a rank does not come. The death of a rank ends this process."""
    if plan.ranks == 1:
        return build_engine(directory, plan, progress=progress, escha_bias=escha_bias, grammars=grammars, disk=disk)
    if disk is not None:
        raise UsageError("--disk-cache: not for a model that several processes share yet")
    build = RankBuild(directory, plan, escha_bias, threads)
    runner, _ = lead(build, plan.ranks, progress=progress, grammars=grammars)
    return RanksEngine(scheduler_for(plan), runner)


def lead(
    build: RankBuild,
    ranks: int,
    *,
    progress: Tell | None = None,
    grammars: bool = False,
    on_death: Callable[[str], None] = end_process,
) -> tuple[LeadingRunner, Followers]:
    """Rank 0's runner, when all ranks are warm and have met; and the others, which end with it or its process."""
    followers = Followers(build, ranks, on_death)
    try:
        try:
            runner, exchange = build(followers.meeting, progress, grammars)
        except RanksApart:
            followers.wait_built()  # whoever could not be built has said why
            raise
        followers.wait_built()
    except BaseException:
        followers.close()
        raise
    leading = LeadingRunner(runner, exchange, followers.wires)
    weakref.finalize(leading, followers.close)  # at the end of the process, too
    return leading, followers
