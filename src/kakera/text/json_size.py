"""How much JSON there is to read, known before it is read: a reader makes millions of objects without a pause."""

from __future__ import annotations

import json
from typing import Any

NESTS = 131_072  # lists and objects, read in 0.2 s; 20,000 messages with their parts have half as many
ENTRIES = 524_288  # of them all; the ids of two contexts of 262,144 tokens


def excess(body: bytes) -> str | None:
    """What there is too much of, in words, or None. What stands in strings does not count. 16 MB take 0.05 s, usually
    less: where all of the body has too little, strings included, they are not looked for (0.8 MB: 6 ms to 0.3)."""
    most = body.count(b"[") + body.count(b"{")
    if most <= NESTS and most + body.count(b",") <= ENTRIES:
        return None
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * ENTRIES:  # a name and a text each; to split there would make as many objects
        return f"more than {ENTRIES} entries of lists and objects"
    outside = b"".join(bare.split(b'"')[::2])
    if (nests := outside.count(b"[") + outside.count(b"{")) > NESTS:
        return f"{nests} lists and objects, and {NESTS} is the limit"
    if (entries := outside.count(b",") + nests) > ENTRIES:
        return f"about {entries} entries of lists and objects, and {ENTRIES} is the limit"
    return None


def read_json(text: str) -> Any:
    """Of a text within a body; models write raw line breaks into strings. Raises ValueError for what is no JSON or too
    much of it, and RecursionError."""
    if too_much := len(text) > NESTS and excess(text.encode("utf-8", "replace")):
        raise ValueError(f"it has {too_much}")
    return json.loads(text, strict=False)
