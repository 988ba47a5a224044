"""The loop guard: notices that an answer repeats the same few tokens without end.

A model that has lost its thread writes the same cycle until a token limit ends it; 2-bit weights do so more often than
16-bit ones. Texts that people want repeat too (tables, zeros, rulers), so the bound is far above those: the last 512
tokens at least, and at least eight rounds of a cycle of at most 128 tokens.
"""

from __future__ import annotations

LONGEST_CYCLE = 128  # tokens; a paragraph
ROUNDS = 8
SHORTEST_RUN = 512  # tokens in the loop before it counts


class LoopGuard:
    """Fed token by token; costs about 10 microseconds each."""

    def __init__(self) -> None:
        self.found = False
        self._recent: list[int] = []  # the last LONGEST_CYCLE tokens, the newest first
        self._runs = [0] * LONGEST_CYCLE  # entry p: so many tokens in a row were equal to the one p + 1 before

    def add(self, token: int) -> bool:
        """Whether the text up to this token is in a loop."""
        recent = self._recent
        runs = [run + 1 if past == token else 0 for past, run in zip(recent, self._runs, strict=False)]
        self._runs = runs + [0] * (LONGEST_CYCLE - len(runs))
        recent.insert(0, token)
        del recent[LONGEST_CYCLE:]
        if not self.found and max(runs, default=0) >= SHORTEST_RUN - LONGEST_CYCLE:
            self.found = any(loops(run, period) for period, run in enumerate(runs, start=1))
        return self.found


def loops(run: int, period: int) -> bool:
    """`run` tokens in a row equal to the one `period` before make run + period tokens of one cycle."""
    return run + period >= max(SHORTEST_RUN, ROUNDS * period)
