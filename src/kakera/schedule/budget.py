"""PrefillBudget: how many prompt tokens a step may compute, and how prompts share them."""

from __future__ import annotations

from collections.abc import Sequence

from kakera.contract.grid import PAGE

_FIRST_GUESS = 256  # prefill tokens beside running streams before anything was measured
_WEIGHT = 0.25  # of the newest measurement
_OUTLIER = 4.0  # a step slower than this many times the estimate (a compilation, a page fault) counts as this many
_RESERVE = 4  # one part in so many goes to the shortest other prompts


class PrefillBudget:
    """Measures seconds per step and per prefill token, and keeps decode steps under `target_seconds`.

    The model: seconds = decode seconds + prefill tokens x seconds per token. A decode step costs about what any step
    costs before its first prompt token: one reading of the weights. Both are running averages, so longer contexts and
    more streams are followed as they come.
    """

    def __init__(self, chunk: int, target_seconds: float) -> None:
        self.chunk = max(PAGE, chunk // PAGE * PAGE)
        self.target_seconds = target_seconds
        self.decode_seconds = 0.0
        self.token_seconds = 0.0

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        if prefill_tokens == 0:
            self.decode_seconds = _average(self.decode_seconds, seconds)
        elif prefill_tokens >= PAGE:  # fewer say more about the step than about tokens
            spent = max(seconds - self.decode_seconds, 0.0)
            self.token_seconds = _average(self.token_seconds, spent / prefill_tokens)

    def tokens(self, decode_rows: int) -> int:
        """A multiple of PAGE, at least PAGE: prompts never stand still."""
        if decode_rows == 0:
            return self.chunk
        if self.token_seconds == 0.0:
            return min(_FIRST_GUESS, self.chunk)
        affordable = (self.target_seconds - self.decode_seconds) / self.token_seconds
        return min(self.chunk, max(PAGE, int(affordable) // PAGE * PAGE))


def divide(budget: int, remaining: Sequence[int], step: int) -> list[int]:
    """Tokens for each prompt; `remaining` is in order of arrival. Shares end on the page grid or at a prompt's end.

    The oldest prompt gets three quarters, so long prompts always move. The shortest others get the rest, so a short
    question does not wait behind a 150K prompt. If a quarter is less than a page, they take every fourth step.
    """
    shares = [0] * len(remaining)
    if not remaining:
        return shares
    others = sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i))
    reserve = budget // _RESERVE // PAGE * PAGE
    if reserve == 0 and step % _RESERVE == _RESERVE - 1:
        reserve = budget
    left = budget
    for i, most in [(0, budget - reserve if others else budget), *((i, budget) for i in others), (0, budget)]:
        share = _on_grid(min(left, most), remaining[i] - shares[i])
        shares[i] += share
        left -= share
    return shares


def _on_grid(allowed: int, remaining: int) -> int:
    return remaining if remaining <= allowed else allowed // PAGE * PAGE


def _average(old: float, new: float) -> float:
    if old == 0.0:
        return new
    return old + _WEIGHT * (min(new, _OUTLIER * old) - old)
