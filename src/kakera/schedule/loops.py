"""The loop guard: notices that an answer repeats the same few tokens without end.

A model that has lost its thread writes the same cycle until a token limit ends it; 2-bit weights do so more often than
16-bit ones. Texts that people want repeat too (tables, zeros, rulers), so the bound is far above those: the last 512
tokens at least, and at least eight rounds of a cycle of at most 128 tokens.
"""

from __future__ import annotations

from array import array

LONGEST_CYCLE = 128  # tokens; a paragraph
ROUNDS = 8
SHORTEST_RUN = 512  # tokens in the loop before it counts
_BLOCK = 64  # a loop that counts holds a whole block, wherever blocks begin
_KEPT = ROUNDS * LONGEST_CYCLE + _BLOCK  # no loop needs more tokens to count


class LoopGuard:
    """Fed token by token; costs half a microsecond each.

    Cycles are looked for once a block, and a cycle that has held for the last block is then followed token by token.
    """

    def __init__(self) -> None:
        self.found = False
        self._recent = array("i")
        self._until_look = _BLOCK
        self._runs: dict[int, int] = {}  # cycle: so many tokens in a row were equal to the one a cycle before

    def add(self, token: int) -> bool:
        """Whether the text up to this token is in a loop."""
        recent = self._recent
        recent.append(token)
        if self._runs:
            self._runs = {cycle: run + 1 for cycle, run in self._runs.items() if recent[-1 - cycle] == token}
        self._until_look -= 1
        if self._until_look == 0:
            self._look()
        if self._runs and not self.found:
            self.found = any(run + cycle >= max(SHORTEST_RUN, ROUNDS * cycle) for cycle, run in self._runs.items())
        return self.found

    def _look(self) -> None:
        self._until_look = _BLOCK
        del self._recent[:-_KEPT]
        recent = self._recent
        block = recent[-_BLOCK:]
        for cycle in range(1, min(LONGEST_CYCLE, len(recent) - _BLOCK) + 1):
            if cycle not in self._runs and recent[-_BLOCK - cycle : -cycle] == block:
                self._runs[cycle] = _run(recent, cycle)


def _run(tokens: array[int], cycle: int) -> int:
    """How many tokens at the end are equal to the one a cycle before."""
    run = 0
    while run + cycle < len(tokens) and tokens[-1 - run] == tokens[-1 - run - cycle]:
        run += 1
    return run
