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
from kakera.ops.exchange import Exchange
from kakera.plan.plan import Plan
from kakera.run.build import build_engine, build_runner, scheduler_for
from kakera.run.engine import LocalEngine
from kakera.run.process.starting import Tell
from kakera.run.ranks.cards import card_exchange, segment_bytes
from kakera.run.ranks.exchange import ProcessExchange
from kakera.run.ranks.leader import LeadingRunner
from kakera.run.ranks.meeting import Meeting
from kakera.run.ranks.start import Followers, end_process
from kakera.run.step.runner import TorchRunner
from kakera.run.threads import USERS
from kakera.schedule.look_up import drafts_for
from kakera.target.as_torch import DTYPES
from kakera.target.threads import given_threads


@dataclass(frozen=True)
class RankBuild:
    """How any rank is built; can be pickled. `threads`: of a CPU, for all ranks together. `cards`: the place of each
    rank's among those that CUDA shows; () for the first, the second and so on."""

    directory: Path
    plan: Plan
    escha_bias: bool = False
    threads: int | None = None
    cards: tuple[int, ...] = ()

    def __call__(
        self, meeting: Meeting, progress: Tell | None = None, grammars: bool = False
    ) -> tuple[TorchRunner, Exchange]:
        exchange = self._exchange(meeting)
        runner = build_runner(
            self.directory,
            self.plan,
            exchange=exchange,
            progress=progress,
            grammars=grammars,
            escha_bias=self.escha_bias,
        )
        return runner, exchange

    @property
    def segment_bytes(self) -> int:
        """Of memory that cards share."""
        return segment_bytes(self.plan.spec.hidden) if self.plan.target.has_cards else 0

    def _exchange(self, meeting: Meeting) -> Exchange:
        if not self.plan.target.has_cards:
            self._share_threads(meeting.ranks)
            return ProcessExchange(meeting)
        see_only(self.cards[meeting.rank] if self.cards else meeting.rank)
        return card_exchange(meeting, self.plan.spec.hidden, DTYPES[self.plan.target.dtype])

    def _share_threads(self, ranks: int) -> None:
        """All ranks compute at the same time."""
        import torch

        if self.threads is not None or not any(name in os.environ for name in USERS):
            torch.set_num_threads(max(1, (self.threads or given_threads()) // ranks))


def see_only(card: int) -> None:
    """Of the cards that CUDA shows to this process, which has not used one yet: then its card is the only one, and the
    first for whatever names none."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(card) if shown is None else shown.split(",")[card].strip()


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
        return build_engine(
            directory,
            plan,
            progress=progress,
            escha_bias=escha_bias,
            grammars=grammars,
            disk=disk,
            drafts=drafts_for(plan.drafts, plan.spec.drafting),
        )
    if disk is not None:
        raise UsageError("--disk-cache: not for a model that several processes share yet")
    build = RankBuild(directory, plan, escha_bias, threads)
    runner, _ = lead(build, plan.ranks, progress=progress, grammars=grammars)
    return LocalEngine(scheduler_for(plan), runner, Sleepless())


class Sleepless:
    """Of ranks: to sleep all would have to, and to wake at the same time, since they capture graphs together."""

    def sleep(self, level: int) -> SleepState:
        raise RequestRefused(
            "a model that several processes share can not sleep yet; stop the server to free its memory",
            status=501,
            code="can_not_sleep",
        )

    def wake_up(self, progress: Callable[[int, int], None]) -> SleepState:
        return SleepState(0)


def lead(
    build: RankBuild,
    ranks: int,
    *,
    progress: Tell | None = None,
    grammars: bool = False,
    on_death: Callable[[str], None] = end_process,
) -> tuple[LeadingRunner, Followers]:
    """Rank 0's runner, when all ranks are warm and have met; and the others, which end with it or its process."""
    followers = Followers(build, ranks, on_death, build.segment_bytes)
    try:
        try:
            runner, exchange = build(followers.meeting, progress, grammars)
        except RanksApart:
            followers.wait_built()  # whoever could not be built has said why
            raise
        followers.wait_built()
        exchange.meet()
    except BaseException:
        followers.close()
        raise
    leading = LeadingRunner(runner, exchange, followers.wires)
    weakref.finalize(leading, followers.close)  # at the end of the process, too
    return leading, followers
