"""Where an answer shows calls that are none: results of tools that the model invents, and code fences."""

from __future__ import annotations

import re
from functools import lru_cache

from kakera.chat.call_head import FUNCTION, skip
from kakera.chat.tags import CALL_CLOSE, OPEN, beginning, closing, closing_begun, undecided

CALL_START = re.compile(f"{OPEN}|{FUNCTION}(?=[ \t=])")  # a call may lack its first tag
CALL_START_BEGUN = re.compile(f"(?:{beginning(OPEN)}|{beginning(FUNCTION)})\\Z")

RESULTS = [f"{who}_{what}" for who in ("tool", "function", "tool_call") for what in ("response", "output", "result")]
COMMON = ("result", "output")  # tags of other documents too: a result only at a line's beginning, and closed
_ATTRIBUTES = r"(?:[ \t][^<>\n]{0,256})?"
RESULT = rf"(?i:<(?P<result>(?:{'|'.join(RESULTS)})s?|{'|'.join(COMMON)}){_ATTRIBUTES}>)"
_NAMES_BEGUN = "|".join(beginning(name) for name in (*(f"{name}s" for name in RESULTS), *COMMON))
RESULT_BEGUN = rf"(?i:<(?:{_NAMES_BEGUN}){_ATTRIBUTES})"

FENCE = r"`{3,}|~{3,}"
FENCE_HEAD = re.compile(rf"({FENCE})([^\n<`~]{{0,256}})(?=\n|<)")  # a call may stand where the language does
FENCE_HEAD_BEGUN = re.compile(rf"(?:{FENCE})[^\n<`~]{{0,256}}\Z")
CALL_LANGUAGES = {"", "xml", "html", "json", "text", "txt", "plaintext", "tool", "tool_call", "tool_calls", "tool_code"}


@lru_cache
def result_end(name: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The end of a result of this name, and what may still become it or the beginning of a call."""
    name = name.casefold().removesuffix("s")
    names = (name, f"{name}s")
    return re.compile(closing(names)), re.compile(rf"{closing_begun(names)}\Z|{CALL_START_BEGUN.pattern}")


class Fence:
    """A code fence that has been opened with `mark`, in a text of which what stands before `inside` is its head."""

    def __init__(self, mark: str, inside: int):
        self.inside = inside
        self.has_call = False
        self._looked = inside
        self._end: int | None = None
        line = rf"\n[ \t]{{0,12}}{mark}{mark[0]}*[ \t]{{0,12}}"
        self._close = re.compile(rf"{line}(?=\r?\n)")
        self._last = re.compile(rf"{line}(?:(?=\r?\n)|\Z)")
        self._begun = re.compile(rf"\n[ \t]{{0,12}}{mark[0]}*[ \t]{{0,12}}\r?\Z")

    def end(self, text: str, ended: bool) -> int | None:
        """Where it is closed; each line is looked at once."""
        if self._end is None:
            close = (self._last if ended else self._close).search(text, self._looked)
            self._end = close.end() if close else None
            self._looked = self.settled(text)
        return self._end

    def settled(self, text: str) -> int:
        """Characters that are inside of it, whatever follows."""
        line = text.rfind("\n")
        return line if line >= 0 and self._begun.match(text, line) else len(text)

    def may_be_call(self, text: str) -> bool:
        """Whether nothing but calls stands inside so far."""
        begun = skip(text, self.inside)
        return text.startswith(OPEN, begun) or OPEN.startswith(text[begun : begun + len(OPEN)])

    def call(self, text: str, end: int | None) -> str | None:
        """What stands inside up to the closing mark, if it begins and ends as a call."""
        inner = text[self.inside : end].rstrip().rstrip("`~").strip()
        tag = inner.rfind("<")
        whole = inner.startswith(OPEN) and CALL_CLOSE.fullmatch(inner, tag if tag >= 0 else 0)
        return inner if whole else None

    def cut(self, size: int) -> None:
        """So many characters were taken off the text's beginning."""
        self.inside, self._looked = max(self.inside - size, 0), max(self._looked - size, 0)


def decided(text: str, begun: re.Pattern[str]) -> int:
    """Characters before a tag or a fence that the text's end cuts."""
    return min(undecided(text, begun), len(text.rstrip("`~")))
