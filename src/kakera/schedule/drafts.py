"""Drafts: guesses of what follows a request's last known token, computed with it and kept as far as they are chosen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens

from kakera.contract.step import SamplingInput
from kakera.schedule.sequence import Sequence

Drafter = Callable[[SamplingInput, int], Tokens[int]]
"""(a request's text so far, most tokens) -> ids of the vocabulary, as many or fewer, in order."""


def drafts_of(drafter: Drafter | None, sequence: Sequence, context: int) -> tuple[int, ...]:
    """What its next row carries behind its last known token."""
    if drafter is None or (most := sequence.most_drafts(context)) <= 0:
        return ()
    return tuple(drafter(sequence.sampling_input(), most)[:most])
