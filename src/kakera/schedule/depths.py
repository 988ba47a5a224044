"""Depths: how often a draft layer's guesses of one request are right, by depth, and how many of them are worth it."""

from __future__ import annotations

from collections.abc import Callable

DEEPEST = 7  # guesses of one layer, applied again and again
_WEIGHT = 0.1  # of the newest round
_FIRST_GUESS = 0.7
PROBE = 16  # tokens without a guess, then one to see whether it would be right by now


class Depths:
    def __init__(self) -> None:
        self.right = [_FIRST_GUESS] * DEEPEST  # chances of each guess, if all before it are right
        self.without = 0  # tokens since the last guess

    def observe(self, guesses: int, accepted: int) -> None:
        """So many guesses were checked, of which the first so many were right."""
        self.without = 0 if guesses else self.without + 1
        for depth in range(min(guesses, accepted + 1, DEEPEST)):
            self.right[depth] += _WEIGHT * ((depth < accepted) - self.right[depth])

    def best(self, plain: float, more: Callable[[int], float]) -> int:
        """Guesses that yield the most tokens a second, where a token takes `plain` seconds without any and `more(n)`
        are added by n of them; now and then one to see, where none is worth it."""
        best, speed = 0, 1.0 / plain
        tokens = chance = 1.0
        for guesses, right in enumerate(self.right, 1):
            chance *= right
            tokens += chance
            if (reached := tokens / (plain + more(guesses))) > speed:
                best, speed = guesses, reached
        return 1 if best == 0 and self.without >= PROBE else best
