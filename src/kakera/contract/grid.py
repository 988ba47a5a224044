"""The grid that everything lies on: a KV page, a chunk of the GDN scan and the distance of checkpoints are one number.

Splitting the scan at its multiples is exact in float32, so that chunked, resumed and whole prompts have the same bits.
"""

from __future__ import annotations

PAGE = 64  # tokens, at absolute positions


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)
