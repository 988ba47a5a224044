"""What the cache tells those who route requests: pages on which a hit can be built, as they come and go.

A page is named by its chain hash (`cache/keys.py`), so a name says a whole prefix. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Medium = Literal["GPU", "CPU"]  # the device's pages, of whatever kind it is, and the host's: vLLM's names


@dataclass(frozen=True)
class PagesStored:
    """Pages of one path, each the parent of the next. `parent`: of the first one; None at the root. `tokens`: all ids
    of these pages as 32-bit little-endian integers."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    medium: Medium


@dataclass(frozen=True)
class PagesRemoved:
    """They are not in this place any more; another place keeps them if it was told of."""

    hashes: tuple[bytes, ...]
    medium: Medium


@dataclass(frozen=True)
class AllRemoved:
    """Forget everything; what is there is told again."""


CacheEvent = PagesStored | PagesRemoved | AllRemoved
