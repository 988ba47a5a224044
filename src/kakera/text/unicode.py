"""Halves of surrogate pairs: JSON can spell them (`"\\ud83d"`, an emoji that was cut), UTF-8 has nothing for them."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text itself, or with U+FFFD where half a pair stands alone. Two halves that meet become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
