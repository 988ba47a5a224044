"""What patterns cost, read from their text: the grammar library has no bound of its own on the time to compile them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kakera.errors import RequestRefused

# llguidance 1.9.1 on one core: `a*b?` 1,000 times compiles in 0.12 s, 3,000 times in 0.5 s, 10,000 times in 4 s and
# 834 MB (the square). Where 10,000 characters are prescribed, the first mask takes 80 ms and each of the others 10 ms;
# 1.5 s and 200 ms for 200,000.
MOST_REPEATS = 1_000
MOST_REPEATS_SQUARED = 5_000_000  # summed over the patterns of a grammar: 0.5 s
LONGEST_TEXT = 10_000
LONGEST_PATTERN = 50_000  # characters
LARGEST_COUNT = 100_000
PIECES = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\[pP]\w|\\x\w\w|\\u\w{4}|\\.|\(\?P?<\w+>|\(\?[a-zA-Z-]*:|\(\?[a-zA-Z-]*\)|"
    r"\w+(?=\w)|\{(?P<least>\d*)(?P<more>,(?P<most>\d*))?\}|.",
    re.DOTALL,
)


@dataclass(frozen=True)
class Cost:
    """`length`: characters that a text of the pattern has at least. `repeats`: operators like * + ? {}, as written."""

    length: int = 0
    repeats: int = 0


@dataclass(frozen=True)
class Repeat:
    """The piece before it comes at least so often."""

    least: int


Piece = Cost | Repeat | str  # "(", ")" and "|" are themselves


def pattern_cost(pattern: str, param: str) -> Cost:
    """Raises RequestRefused (400) if the pattern is beyond the limits."""
    if len(pattern) > LONGEST_PATTERN:
        raise RequestRefused(
            f"{param}: a pattern has {len(pattern)} characters; the limit is {LONGEST_PATTERN}", param=param
        )
    # Repeats are counted without reading the structure, which comments in a pattern could hide.
    repeats = sum(piece in ("*", "+", "?", "{") for piece in re.findall(r"\\.|\(\?|[*+?{]", pattern, re.DOTALL))
    what = f"the pattern {_short(pattern)}"
    check_cost(Cost(0, repeats), what, param)
    return check_cost(Cost(fold(_pieces(pattern, param)).length, repeats), what, param)


def check_cost(cost: Cost, what: str, param: str) -> Cost:
    if cost.repeats > MOST_REPEATS:
        raise RequestRefused(
            f"{param}: {what} has {cost.repeats} repeats (* + ? or a count); the limit is {MOST_REPEATS}",
            param=param,
            code="invalid_grammar",
        )
    if cost.length > LONGEST_TEXT:
        raise RequestRefused(
            f"{param}: {what} prescribes a text of {cost.length} characters or more; the limit is {LONGEST_TEXT}",
            param=param,
            code="invalid_grammar",
        )
    return cost


def check_count(count: str, param: str) -> int:
    """The number. Raises RequestRefused (400) if nobody should repeat anything so often."""
    if len(count) > 9 or int(count or 0) > LARGEST_COUNT:
        raise RequestRefused(
            f"{param}: something is repeated {count[:20]} times; the limit is {LARGEST_COUNT}",
            param=param,
            code="invalid_grammar",
        )
    return int(count or 0)


def fold(pieces: Iterable[Piece]) -> Cost:
    """The cost of pieces in a row, in groups and with alternatives. Groups that never close end with the text."""
    # one frame a group: the longest alternative so far, the row that grows, its last piece, repeats
    frames = [[0, 0, 0, 0]]
    for piece in pieces:
        frame = frames[-1]
        if piece == "(":
            frames.append([0, 0, 0, 0])
        elif piece == "|":
            frame[0], frame[1], frame[2] = max(frame[0], frame[1] + frame[2]), 0, 0
        elif isinstance(piece, Repeat):
            frame[2] *= piece.least
            frame[3] += 1
        else:
            if piece == ")":
                piece = _closed(frames.pop()) if len(frames) > 1 else Cost()
                frame = frames[-1]
            assert isinstance(piece, Cost)
            frame[1], frame[2] = frame[1] + frame[2], piece.length
            frame[3] += piece.repeats
    while len(frames) > 1:
        inner = _closed(frames.pop())
        frames[-1][1] += inner.length
        frames[-1][3] += inner.repeats
    return _closed(frames[0])


def _closed(frame: list[int]) -> Cost:
    longest, row, last, repeats = frame
    return Cost(max(longest, row + last), repeats)


def _pieces(pattern: str, param: str) -> Iterable[Piece]:
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            at = _behind_class(pattern, at)
            yield Cost(1)
            continue
        found = PIECES.match(pattern, at)
        assert found is not None
        at, text = found.end(), found[0]
        if found["least"] is not None and (found["least"] or found["most"]):
            least = check_count(found["least"], param)
            check_count(found["most"] or "", param)
            yield Repeat(least)
        elif text in ("*", "?"):
            yield Repeat(0)
        elif text == "+":
            yield Repeat(1)
        elif text.startswith("(") and not (len(text) > 1 and text.endswith(")")):
            yield "("
        elif text in (")", "|"):
            yield text
        elif text not in ("^", "$"):
            yield Cost(1 if text.startswith("\\") else len(text))


def _behind_class(pattern: str, at: int) -> int:
    """Where the class that begins here has ended: they nest, and a bracket that comes first is a character."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at


def _short(pattern: str) -> str:
    return f"/{pattern}/" if len(pattern) <= 40 else f"/{pattern[:40]}.../"
