"""Long texts in slices whose ids, one after the other, are those of the whole text.

A slice ends between a letter or digit and a white space or sign behind it. No pattern of a byte-level BPE reaches over
such a place and no normaliser composes over it; the tokenizer at hand is asked all the same before it is cut there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

SLICE = 65_536  # characters: 16K tokens, 0.06 s of one core, 3 MB of the library's memory until they are packed
NEAR = 1024  # characters before a slice's full length in which its end is looked for first
AROUND = 16  # characters on each side of a cut that the tokenizer is asked about

# Not before an apostrophe, which some patterns join to the word before it ("it's").
WORD_END = re.compile(
    r"(?<=[^\W_])(?=[\s!\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~、。，！？：；「」（）])|(?<=[A-Za-z])(?=[0-9])"
)

Parts = Callable[[str], list[tuple[str, tuple[int, int]]]]  # a pre-tokenizer: words and where they are


def slices(text: str, parts: Parts) -> Iterator[str]:
    """Pieces of about SLICE characters; one is longer where no word ends for so long."""
    start = 0
    while len(text) - start > SLICE:
        end = _cut(text, start, parts)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, start: int, parts: Parts) -> int:
    full = start + SLICE
    near = [match.start() for match in WORD_END.finditer(text, full - NEAR, full)]
    for at in reversed(near):
        if _parts_at(text, at, parts):
            return at
    while full < len(text):  # in stretches: one search through megabytes would keep other threads waiting
        for match in WORD_END.finditer(text, full, full + SLICE):
            if _parts_at(text, match.start(), parts):
                return match.start()
        full += SLICE
    return len(text)


def _parts_at(text: str, at: int, parts: Parts) -> bool:
    first = max(0, at - AROUND)
    return any(begin == at - first for _, (begin, _) in parts(text[first : at + AROUND]))
