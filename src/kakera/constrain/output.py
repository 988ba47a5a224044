"""Where a request stands in its grammar and its thinking budget: which tokens may come next.

The state is a function of (constraint, generated tokens). What is kept between steps only saves the way there, so a
preempted request, one that runs again, or one whose state was forgotten goes on as if nothing had happened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from llguidance import LLMatcher

from kakera.constrain.compiler import Compiler, GrammarFailed, consume, next_tokens
from kakera.contract.events import INVALID_GRAMMAR
from kakera.contract.request import Constraint, Sampling, ThinkingBudget
from kakera.contract.step import RowResult, SamplingInput

REMEMBERED = 64  # requests; beyond that (and twice the rows of a step) the longest unused is replayed when it returns


@dataclass(frozen=True)
class Allowed:
    """`bits`: one a token, least significant first; None allows everything but `banned`. `forced`: this token alone."""

    bits: bytes | None = None
    banned: tuple[int, ...] = ()
    forced: int | None = None

    def permits(self, token: int) -> bool:
        if self.forced is not None:
            return token == self.forced
        if self.bits is not None:
            return token // 8 < len(self.bits) and bool(self.bits[token // 8] >> token % 8 & 1)
        return token not in self.banned


ANYTHING = Allowed()


class Outputs:
    """The running requests' positions. `allowed` before a row's token is chosen, `took` behind it."""

    def __init__(self, compiler: Compiler):
        self._compiler = compiler
        self._positions: OrderedDict[str, Position] = OrderedDict()

    def allowed(self, given: SamplingInput) -> Allowed | None:
        """None: the grammar is complete and nothing may follow. Raises GrammarFailed: then the request fails."""
        sampling = given.sampling
        if sampling.thinking is not None and (token := forced(sampling.thinking, given)) is not None:
            return Allowed(forced=token)
        if sampling.constraint is None:
            return ANYTHING
        position = self._position(given.request_id, sampling.constraint, given.output)
        return position.allowed(sampling, given.generated)

    def took(self, given: SamplingInput, token: int) -> bool:
        """Whether the answer is complete with this token. Raises GrammarFailed if it was not allowed."""
        constraint = given.sampling.constraint
        if constraint is None:
            return False
        output = [*given.output, token]
        return self._position(given.request_id, constraint, output).complete and token not in self._compiler.ends

    def _position(self, request_id: str, constraint: Constraint, output: Sequence[int]) -> Position:
        position = self._positions.get(request_id)
        if position is None or not position.comes_back_to(constraint, output):
            position = Position(constraint, self._compiler)
            self._positions[request_id] = position
            if len(self._positions) > REMEMBERED:
                self._positions.popitem(last=False)
        self._positions.move_to_end(request_id)
        position.go_on(output)
        return position


class Position:
    """One request's way through its constraint."""

    def __init__(self, constraint: Constraint, compiler: Compiler):
        self._constraint = constraint
        self._compiler = compiler
        self._taken: list[int] = []
        self._consumed: list[bool] = []  # of each, whether the matcher has it
        self._began = -1  # which of them the grammar began with or behind; -1: with the first, or not yet
        self._matcher: LLMatcher | None = None
        if constraint.after is None and constraint.at is None:
            self._matcher = compiler.matcher(constraint.grammar)

    def comes_back_to(self, constraint: Constraint, output: Sequence[int]) -> bool:
        """Give up what was taken and is not in `output`: drafts that were not chosen. False if it is on another way."""
        if constraint != self._constraint:
            return False
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._taken, output, strict=False)))
        if same <= self._began:
            self._matcher, self._began = None, -1
        elif (gone := sum(self._consumed[same:])) and not (self._matcher and self._matcher.rollback(gone)):
            return False
        del self._taken[same:], self._consumed[same:]
        return True

    def go_on(self, output: Sequence[int]) -> None:
        for token in output[len(self._taken) :]:
            self._take(token)

    def _take(self, token: int) -> None:
        self._taken.append(token)
        self._consumed.append(False)
        if self._matcher is None:
            if token in (self._constraint.after, self._constraint.at):
                self._matcher = self._compiler.matcher(self._constraint.grammar)
                self._began = len(self._taken) - 1
            if token != self._constraint.at:
                return
        assert self._matcher is not None
        if not (self._matcher.is_stopped() and token in self._compiler.ends):
            consume(self._matcher, token)
            self._consumed[-1] = True

    @property
    def complete(self) -> bool:
        return self._matcher is not None and self._matcher.is_stopped()

    def allowed(self, sampling: Sampling, generated: int) -> Allowed | None:
        too_early = generated < sampling.min_tokens
        if self._matcher is None:
            return Allowed(banned=self._compiler.ends if self._constraint.required else ())
        if self.complete:
            return None
        bits = next_tokens(self._matcher)
        for end in self._compiler.ends:
            if too_early or end not in sampling.stop_token_ids:
                bits[end // 8] &= ~(1 << end % 8)
        return Allowed(bytes(bits)) if any(bits) else None


def forced(budget: ThinkingBudget, given: SamplingInput) -> int | None:
    """The token that ends reasoning whose budget is used up."""
    over = given.generated - budget.tokens
    if not 0 <= over < len(budget.close):
        return None
    reasoning = given.output
    return None if any(end in reasoning for end in budget.ends) else budget.close[over]


def grammar_failure(given: SamplingInput, error: GrammarFailed) -> RowResult:
    """The row fails by its own request's grammar: what no look at its beginning could tell."""
    text = f"the request's grammar can not be followed beyond token {given.generated} of the answer: {error}"
    return RowResult(given.request_id, error=text, code=INVALID_GRAMMAR)
