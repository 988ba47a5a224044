"""Drafts: guesses of what follows a request's last known token, computed with it and kept as far as they are chosen.

How many a row carries is decided here, before each step: no more than its drafter guesses, than its page and its
limits leave, and, if they are to pay, than the request can afford to lose. What it can afford is a credit in seconds:
it begins with a step's worth, grows by what drafts have saved and by a fiftieth of what is written without, and pays
for every token that a step has more. So a text that nobody guesses right is written no more than 3 % slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import takewhile

from kakera.contract.step import SamplingInput, Segment, StepResult
from kakera.plan.plan import MOST_DRAFTS
from kakera.schedule.depths import DEEPEST
from kakera.schedule.sequence import Sequence

log = logging.getLogger(__name__)

Drafter = Callable[[SamplingInput, int], Tokens[int]]
"""(a request's text so far, most tokens) -> ids of the vocabulary, as many or fewer, in order."""

WATCHED, LEAST_RIGHT = 200, 0.05  # guesses of a draft layer, and the share of right ones that a sound one exceeds
ALLOWANCE = 0.02  # of the time that a request takes without drafts
MOST_CREDIT = 8.0  # steps: what was once saved is not all risked again
_FIRST_GUESS = 0.15  # of a step of one token: what one more costs, before anything was measured
_FIRST_DEPTH = 0.25  # of a token: what the draft layer takes to guess one, before anything was measured
_WEIGHT = 0.25  # of the newest measurement
_OUTLIER = 4.0  # a slower step (a page fault, another program) counts as so many times the estimate


class StepCosts:
    """Seconds of a decode step by its number of tokens: running averages of steps without prompts."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        old = self.of(tokens)
        if old and tokens in self._seconds:
            seconds = old + _WEIGHT * (min(seconds, _OUTLIER * old) - old)
        self._seconds[tokens] = seconds if old is None else min(seconds, _OUTLIER * old)

    def of(self, tokens: int) -> float | None:
        """Between what was measured; beyond it by a guess. None before anything was."""
        below = max((n for n in self._seconds if n <= tokens), default=None)
        above = min((n for n in self._seconds if n >= tokens), default=None)
        if below is None or above is None:
            known = below if below is not None else above
            if known is None:
                return None
            each = self._seconds[known] / (1 / _FIRST_GUESS + known - 1)
            return self._seconds[known] + each * (tokens - known)
        share = (tokens - below) / (above - below) if above > below else 0.0
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])

    def more(self, tokens: int, drafts: int) -> float:
        """What `drafts` tokens add to a step of `tokens`. None before anything was measured."""
        before, behind = self.of(tokens), self.of(tokens + drafts)
        return 0.0 if before is None or behind is None else max(0.0, behind - before)


@dataclass(frozen=True)
class Guess:
    """What a row carries behind its last known token, and the most that the draft layer is to guess behind it.
    `looked_up`: the drafter's, not the layer's."""

    drafts: tuple[int, ...] = ()
    propose: int = 0
    looked_up: bool = False


@dataclass(frozen=True)
class Checked:
    """A decode row of a step that has run: its drafts, how many of them stay, and the draft layer's next guesses."""

    sequence: Sequence
    drafts: int
    accepted: int
    proposed: int


class Drafts:
    """The guesses of a drafter, and where it has none those of the draft layer, if that is computed (`layer`): at most
    `most` a row and MOST_DRAFTS in all; `paying`: and as far as they pay."""

    def __init__(
        self, drafter: Drafter | None, most: int | None = None, paying: bool = False, layer: bool = False
    ) -> None:
        self._drafter, self._most, self._paying, self._layer = drafter, most, paying, layer
        self.costs = StepCosts()
        self.guess_seconds = 0.0  # of the draft layer, for one guess
        self._made: dict[str, Guess] = {}  # for the step that is planned or runs
        self._first = [0, 0]  # of the first WATCHED guesses of the layer: checked, right

    def of(self, sequences: Iterable[Sequence], context: int) -> dict[str, Guess]:
        """What the next rows of those that decode carry, by request."""
        found: dict[str, Guess] = {}
        rows = list(sequences)
        tokens = len(rows)
        for sequence in rows:
            most = sequence.most_drafts(context)
            if self._most is not None:  # all rows' drafts together are what the plan counts
                most = min(most, self._most, MOST_DRAFTS - (tokens - len(rows)))
            most = max(0, most)
            drafts = self._look_up(sequence, most)
            looked_up = bool(drafts)
            drafts = drafts or sequence.proposed[:most]
            if drafts and self._paying:
                drafts = drafts[: self._affordable(sequence, len(rows), tokens, len(drafts))]
            found[sequence.id] = Guess(drafts, 0 if looked_up else self._propose(sequence, len(rows)), looked_up)
            tokens += len(drafts)
        self._made = found
        return found

    def _look_up(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        if self._drafter is None or most == 0:
            return ()
        return tuple(self._drafter(sequence.sampling_input(), most)[:most])

    def _propose(self, sequence: Sequence, rows: int) -> int:
        if not self._layer:
            return 0
        most = DEEPEST if self._most is None else min(DEEPEST, self._most)
        if not self._paying:
            return most
        if (plain := self.costs.of(rows)) is None:
            return 0
        token = plain / rows
        each = self.guess_seconds or _FIRST_DEPTH * token
        best = sequence.depths.best(token, lambda n: self.costs.more(rows, n) + n * each)
        credit = self._credit(sequence, token)
        while best and self.costs.more(rows, best) + best * each > credit:
            best -= 1
        return min(best, most)

    def _credit(self, sequence: Sequence, token: float) -> float:
        if sequence.credit is None:
            sequence.credit = token
        return sequence.credit

    def _affordable(self, sequence: Sequence, rows: int, tokens: int, drafts: int) -> int:
        if (plain := self.costs.of(rows)) is None:
            return 0
        credit = self._credit(sequence, plain / rows)
        while drafts and self.costs.more(tokens, drafts) > credit:
            drafts -= 1
        return drafts

    def observe(self, rows: Tokens[Checked], result: StepResult, beside_prompts: bool) -> None:
        """A step has run: these are its decode rows."""
        for row in rows:
            made = self._made.get(row.sequence.id)
            if made is not None and not made.looked_up:
                row.sequence.depths.observe(row.drafts, row.accepted)
                self._watch(row.drafts, row.accepted)
        if not rows or not self._paying:
            return
        guesses = sum(row.proposed for row in rows)
        if guesses:
            each = result.guessing / guesses
            known = self.guess_seconds
            self.guess_seconds = known + _WEIGHT * (min(each, _OUTLIER * known) - known) if known else each
        if not beside_prompts:
            self.costs.observe(len(rows) + sum(row.drafts for row in rows), result.seconds - result.guessing)
        if (plain := self.costs.of(len(rows))) is None:
            return
        token = plain / len(rows)
        for row in rows:
            spent = self.costs.more(len(rows), row.drafts) + row.proposed * self.guess_seconds
            earned = row.accepted * token - spent if spent else ALLOWANCE * token
            if row.sequence.credit is not None:
                row.sequence.credit = min(row.sequence.credit + earned, MOST_CREDIT * token)

    def _watch(self, drafts: int, accepted: int) -> None:
        """A layer that was read wrongly loads, guesses, and is refused for ever: somebody should hear of it."""
        if self._first[0] >= WATCHED:
            return
        self._first = [self._first[0] + drafts, self._first[1] + accepted]
        checked, right = self._first
        if checked >= WATCHED and right < LEAST_RIGHT * checked:
            log.warning(
                "of the draft layer's first %d guesses %d were right: its weights may be damaged or of another model; "
                "answers are not affected, and guesses are made only where they pay",
                checked,
                right,
            )


def count_accepted(row: Segment, taken: Tokens[int]) -> int:
    """How many of a row's drafts are among the tokens that count."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row.drafts, taken, strict=False)))
