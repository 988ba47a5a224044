"""LeadingRunner: rank 0's runner. Every step that it carries out goes to the other ranks as a message, and they answer
with what they did. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from kakera.contract.events import RegionRead
from kakera.contract.step import SamplingInput, StepPlan, StepResult
from kakera.errors import RanksApart
from kakera.run.interface import NOTHING_SAMPLED, Runner
from kakera.run.ranks.messages import Done, Execute, Sweep, Swept, decode_from_rank, digest, encode
from kakera.run.ranks.wire import Wire

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", Done, Swept)


class RankRunner(Runner, Protocol):
    """A runner of one rank. `branch`: every decision that it took in its last step and that was not in the plan; ranks
    that differ in one of them hold different things from then on."""

    @property
    def branch(self) -> tuple[int, ...]: ...


class Together(Protocol):
    """What is needed of the ranks' exchange here; see `kakera.ops.exchange`, which has tensors."""

    def meet(self) -> None: ...

    def abort(self, why: str) -> None: ...


class LeadingRunner:
    """Implements Runner. Whatever goes wrong on a rank ends all of them, for good: RanksApart."""

    def __init__(self, runner: RankRunner, exchange: Together, wires: Sequence[Wire]):
        self.runner = runner
        self._exchange, self._wires = exchange, wires

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] = NOTHING_SAMPLED) -> StepResult:
        try:
            return self._execute(plan, sampling)
        except BaseException as error:
            self._exchange.abort(f"rank 0: {error or type(error).__name__}")
            raise

    def _execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput]) -> StepResult:
        message = encode(Execute(plan))
        for wire in self._wires:
            wire.send(message)
        self._exchange.meet()
        result = self.runner.execute(plan, sampling)
        mine = Done(plan.step, digest(message), self.runner.branch)
        for wire in self._wires:
            if (other := self._answer(wire, Done)) != mine:
                log.error("step %d went apart: rank 0 took %s, %s took %s", plan.step, mine, wire.peer, other)
                raise RanksApart(f"{wire.peer} did something else in step {plan.step} than rank 0")
        return result

    def sweep(self) -> list[RegionRead]:
        """See Runner.sweep; regions of other ranks are named so. One after the other, since they may share a bus."""
        reads = self.runner.sweep()
        for wire in self._wires:
            wire.send(encode(Sweep()))
            found = self._answer(wire, Swept)
            reads += [replace(read, region=f"rank {wire.peer.rank}'s {read.region}") for read in found.reads]
        return reads

    def _answer(self, wire: Wire, kind: type[Answer]) -> Answer:
        found = decode_from_rank(wire.receive())
        if not isinstance(found, kind):
            raise RanksApart(f"{wire.peer} answered {found} where {kind.__name__} was due")
        return found
