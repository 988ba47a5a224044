"""Match: how much of a prompt the cache can give back, and in words why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kakera.cache.keys import PageKey
from kakera.cache.tree import Checkpoint, Node, PageTree
from kakera.contract.grid import PAGE

# "": everything the cache knows of this prompt is used. The other reasons are few, so that they can be counted.
MissReason = Literal[
    "",
    "cold",
    "shorter than a page",
    "no checkpoint on the shared prefix",
    "evicted checkpoint",
    "evicted pages",
    "diverged",
    "not used",
]
_SIBLINGS = 256  # children compared to name the token of divergence


@dataclass(frozen=True)
class Match:
    """`position` tokens can be restored: `checkpoint` holds the state there, `path` the pages of [0, position).

    `kv_position` >= position says how far pages alone go: if it is beyond, a checkpoint saved there makes the next
    such prompt hit. Valid until the cache changes.
    """

    position: int = 0
    checkpoint: Checkpoint | None = None
    path: tuple[Node, ...] = ()
    kv_position: int = 0
    reason: MissReason = "cold"
    diverged_at: int | None = None

    def explain(self) -> str:
        return self.reason if self.diverged_at is None else f"{self.reason} at token {self.diverged_at}"


def find_match(tree: PageTree, keys: Sequence[PageKey], tokens: int, windowed: bool) -> Match:
    """The deepest checkpoint on the prompt's path that leaves at least one of `tokens` tokens to compute."""
    limit = (tokens - 1) // PAGE
    shared = tree.walk(keys, limit)
    usable = 0
    if shared and (shared[0].sink is not None or not windowed):
        usable = next((node.depth for node in reversed(shared) if node.checkpoint is not None), 0)
    reason = _reason(tree, keys, shared, usable, limit)
    return Match(
        position=usable * PAGE,
        checkpoint=shared[usable - 1].checkpoint if usable else None,
        path=tuple(shared[:usable]),
        kv_position=len(shared) * PAGE,
        reason=reason,
        diverged_at=_divergence(shared[-1], keys, limit) if reason == "diverged" else None,
    )


def _reason(tree: PageTree, keys: Sequence[PageKey], shared: Sequence[Node], usable: int, limit: int) -> MissReason:
    if usable == limit:
        return "" if limit else "shorter than a page"
    if len(shared) < limit and tree.was_removed(keys[len(shared)]):
        return "evicted pages"
    if len(shared) > usable:
        lost = any(node.lost_checkpoint for node in shared[usable:])
        return "evicted checkpoint" if lost else "no checkpoint on the shared prefix"
    if not shared:
        return "cold"
    return "diverged" if shared[-1].children else ""


def _divergence(last: Node, keys: Sequence[PageKey], limit: int) -> int:
    """The first token that no known continuation of `last` has; of pages that differ in an image, their first."""
    tokens = keys[last.depth].tokens
    width = len(tokens) // PAGE
    common = max(_common_bytes(tokens, child.tokens) for child in islice(last.children, _SIBLINGS))
    return last.depth * PAGE + common // width % PAGE


def _common_bytes(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
