"""Drafts: guesses of what follows a request's last known token, computed with it and kept as far as they are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kakera.contract.step import SamplingInput

Drafter = Callable[[SamplingInput, int], Sequence[int]]
"""(a request's text so far, most tokens) -> ids of the vocabulary, as many or fewer, in order."""


def guess(drafter: Drafter | None, given: SamplingInput, most: int) -> tuple[int, ...]:
    return tuple(drafter(given, most)[:most]) if drafter is not None and most > 0 else ()
