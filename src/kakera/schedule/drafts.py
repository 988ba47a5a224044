"""Drafts: guesses of what follows a request's last known token, computed with it and kept as far as they are chosen.

How many a row carries is decided here, before each step: no more than its drafter guesses, than its page and its
limits leave, and, if they are to pay, than the request can afford to lose. What it can afford is a credit in seconds:
it begins with a step's worth, grows by what drafts have saved and by a fiftieth of what is written without, and pays
for every token that a step has more. So a text that nobody guesses right is written no more than 3 % slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from itertools import takewhile
from typing import Final, Literal

from kakera.contract.step import SamplingInput, Segment
from kakera.schedule.sequence import Sequence

Drafter = Callable[[SamplingInput, int], Tokens[int]]
"""(a request's text so far, most tokens) -> ids of the vocabulary, as many or fewer, in order."""

DraftWish = Literal["auto"] | int  # of a user: as many as pay, or the most at a time; 0 for none
AUTO: Final = "auto"
OFF: Final = 0
MOST_DRAFTS = 31  # a row of 32 tokens: products of more rows are bound by arithmetic
ALLOWANCE = 0.02  # of the time that a request takes without drafts
MOST_CREDIT = 8.0  # steps: what was once saved is not all risked again
_FIRST_GUESS = 0.15  # of a step of one token: what one more costs, before anything was measured
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


class Drafts:
    """The guesses of a drafter, at most `most` a row; `paying`: and as far as they pay."""

    def __init__(self, drafter: Drafter, most: int | None = None, paying: bool = False):
        self._drafter, self._most, self._paying = drafter, most, paying
        self.costs = StepCosts()

    def of(self, sequences: Iterable[Sequence], context: int) -> dict[str, tuple[int, ...]]:
        """What the next rows of those that decode carry behind their last known tokens, by request."""
        found: dict[str, tuple[int, ...]] = {}
        rows = list(sequences)
        tokens = len(rows)
        for sequence in rows:
            guess = self._guess(sequence, context)
            if guess and self._paying:
                guess = guess[: self._affordable(sequence, len(rows), tokens, len(guess))]
            found[sequence.id] = guess
            tokens += len(guess)
        return found

    def _guess(self, sequence: Sequence, context: int) -> tuple[int, ...]:
        most = sequence.most_drafts(context)
        if self._most is not None:
            most = min(most, self._most)
        return tuple(self._drafter(sequence.sampling_input(), most)[:most]) if most > 0 else ()

    def _affordable(self, sequence: Sequence, rows: int, tokens: int, drafts: int) -> int:
        plain = self.costs.of(rows)
        if plain is None:
            return 0
        if sequence.credit is None:
            sequence.credit = plain / rows
        while drafts and self.costs.more(tokens, drafts) > sequence.credit:
            drafts -= 1
        return drafts

    def observe(self, rows: Tokens[tuple[Sequence, int, int]], seconds: float, beside_prompts: bool) -> None:
        """A step has run: its decode rows, with their drafts and how many of them stay."""
        if not rows or not self._paying:
            return
        if not beside_prompts:
            self.costs.observe(len(rows) + sum(drafts for _, drafts, _ in rows), seconds)
        if (plain := self.costs.of(len(rows))) is None:
            return
        token = plain / len(rows)
        for sequence, drafts, accepted in rows:
            earned = accepted * token - self.costs.more(len(rows), drafts) if drafts else ALLOWANCE * token
            if sequence.credit is not None:
                sequence.credit = min(sequence.credit + earned, MOST_CREDIT * token)


def count_accepted(row: Segment, taken: Tokens[int]) -> int:
    """How many of a row's drafts are among the tokens that count."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row.drafts, taken, strict=False)))
