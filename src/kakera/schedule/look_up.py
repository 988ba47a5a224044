"""Look-up drafts: what followed the last time that the text's end stood in it. For copying and edits; needs no model.

No index: the whole text is compared with its own end at every call, half a millisecond for 200,000 tokens, so that
there is nothing to build, to keep, to restore with a hit, or to get wrong.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from kakera.contract.step import SamplingInput
from kakera.plan.plan import AUTO, MOST_DRAFTS, OFF, DraftWish
from kakera.schedule.drafts import Drafts

LEAST = 8  # tokens that must be alike: shorter ones mislead where text repeats its form only (tool calls, lists)
LONGEST = 32  # of the longest match the latest counts; beyond so many tokens all are as long
PLACES = 1024  # latest places that are looked at: a text of one token has more than can be compared in a step
LIMITS = (7, 15, 31)  # drafts: the next limit after all of a draft was right, the first again after a miss
BARRED = 8  # tokens for which nothing is guessed behind a first token that was wrong; twice as many each time
MOST_BARRED = 128
REMEMBERED = 256  # requests


def look_up(text: Sequence[int], most: int, least: int = LEAST) -> list[int]:
    """At most `most` tokens that followed the longest earlier occurrence of the text's end, the latest of equally long
    ones; nothing if `least` tokens are not alike. No more than are alike; where the text ends before, it goes on with
    itself, as a loop does. `text`: best a packed array."""
    ids_N = np.frombuffer(text, np.intc) if isinstance(text, array) else np.array(text)
    count = len(ids_N)
    if most <= 0 or count <= least:
        return []
    alike = ids_N[least - 1 : -1] == ids_N[-1]
    for back in range(1, least):
        alike &= ids_N[least - 1 - back : -1 - back] == ids_N[-1 - back]
    ends = np.flatnonzero(alike)[-PLACES:] + least - 1  # where the last token of an occurrence stands
    if not len(ends):
        return []
    length = least
    while length < min(LONGEST, count):
        longer = ends[ends >= length]
        longer = longer[ids_N[longer - length] == ids_N[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    follows = ids_N[int(ends[-1]) + 1 :]
    found: list[int] = np.resize(follows, min(most, length)).tolist()
    return found


@dataclass
class _Trust:
    """In what one request's text promises. `guess`: the last one, made behind `at` tokens."""

    limit: int = 0  # of LIMITS
    misses: int = 0  # in a row, of first tokens
    silent_until: int = 0  # tokens of the text
    guess: tuple[int, ...] = ()
    at: int = 0

    def hear(self, text: Sequence[int]) -> None:
        """What has come of the last guess."""
        came = text[self.at : self.at + len(self.guess)]
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.guess, came, strict=False)))
        if not came or not self.guess:
            return
        if right == len(came):
            self.limit = min(self.limit + (right == len(self.guess)), len(LIMITS) - 1)
            self.misses = 0
        else:
            self.limit = 0
            self.misses = 0 if right else self.misses + 1
            if not right:
                self.silent_until = self.at + min(BARRED << (self.misses - 1), MOST_BARRED)
        self.guess = ()


class LookUp:
    """A drafter that trusts a request's text as far as it has kept its promises."""

    def __init__(self) -> None:
        self._trust: OrderedDict[str, _Trust] = OrderedDict()

    def __call__(self, given: SamplingInput, most: int) -> list[int]:
        trust = self._trust_of(given.request_id)
        trust.hear(given.context)
        if len(given.context) < trust.silent_until:
            return []
        found = look_up(given.context, min(most, LIMITS[trust.limit]))
        trust.guess, trust.at = tuple(found), len(given.context)
        return found

    def _trust_of(self, request_id: str) -> _Trust:
        trust = self._trust.setdefault(request_id, _Trust())
        self._trust.move_to_end(request_id)
        if len(self._trust) > REMEMBERED:
            self._trust.popitem(last=False)
        return trust


def drafts_for(wanted: DraftWish, layer: bool) -> Drafts | None:
    """What was asked for: as many as pay, or as many as are found up to a number. `layer`: the draft layer is there."""
    if wanted == OFF:
        return None
    return Drafts(LookUp(), MOST_DRAFTS if wanted == AUTO else wanted, paying=wanted == AUTO, layer=layer)
