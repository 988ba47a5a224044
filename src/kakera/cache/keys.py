"""A page's key: a chain hash that says the same in every process and on every machine. No torch.

hash = BLAKE2b-128 of (parent's hash, the page's 64 token ids, extra keys), and the parent of a first page is the hash
of a salt. So one key names a whole prefix: what a disk, a router or another worker can be asked for. 4,096 pages of
262,144 tokens take about 4 ms.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kakera.contract.grid import PAGE
from kakera.contract.request import packed

HASH_BYTES = 16
_ROOT = b"kakera prefix"  # tells a root's hash from a page's (personalisation of BLAKE2b, at most 16 bytes)


class PageKey(NamedTuple):
    """`tokens`: the page's ids as 32-bit little-endian integers; `beside`: the extra keys. Dictionaries compare them
    too, so that not even a collision of hashes could give wrong text."""

    hash: bytes
    tokens: bytes
    beside: bytes = b""


def root_hash(salt: bytes) -> bytes:
    """Parent of all first pages under one salt: caches of different salts share nothing."""
    return hashlib.blake2b(salt, digest_size=HASH_BYTES, person=_ROOT).digest()


_UNSALTED = root_hash(b"")


def is_unsalted(first: PageKey) -> bool:
    """Whether a first page's key follows from its tokens alone."""
    return hashlib.blake2b(_UNSALTED + first.tokens, digest_size=HASH_BYTES).digest() == first.hash


def page_keys(
    tokens: Sequence[int],
    salt: bytes = b"",
    known: Sequence[PageKey] = (),
    extra: Mapping[int, bytes] | None = None,
) -> list[PageKey]:
    """Keys of the complete pages of `tokens` behind the `known` ones. Token ids must fit 32 bits.

    `extra`: by page number, whatever its contents depend on beside the tokens up to its end (digests of images whose
    tokens lie in it, an adapter's name).
    """
    whole = packed(tokens[len(known) * PAGE : len(tokens) // PAGE * PAGE])
    if sys.byteorder == "big":
        whole.byteswap()
    data, width = whole.tobytes(), PAGE * whole.itemsize
    parent = known[-1].hash if known else root_hash(salt)
    found: list[PageKey] = []
    for begin in range(0, len(data), width):
        page = data[begin : begin + width]
        beside = extra.get(len(known) + len(found), b"") if extra else b""
        parent = hashlib.blake2b(parent + page + beside, digest_size=HASH_BYTES).digest()
        found.append(PageKey(parent, page, beside))
    return found
