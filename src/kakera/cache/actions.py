"""ActionLog: the cache's decisions in the order in which they were made.

The cache's bookkeeping always describes the world *after* every action in the log. The runner executes the log from
the front, so each action meets the world in which it was decided. Only neighbours of one kind are merged; nothing is
ever reordered. That single rule replaces all special care: a page is demoted before it is handed out again, a host
page is dropped before another page is demoted into it, a checkpoint is restored before a later drop of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kakera.contract.step import Action, DemotePages, Drop, PromotePages


class ActionLog:
    def __init__(self) -> None:
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        self._actions.append(action)

    def __bool__(self) -> bool:
        return bool(self._actions)

    def take(self) -> tuple[Action, ...]:
        """Everything decided since the last call."""
        taken, self._actions = self._actions, []
        return tuple(merged for _, group in groupby(taken, type) for merged in _merge(list(group)))


def _merge(group: list[Action]) -> Iterator[Action]:
    """One action for neighbours of one kind: 4,096 pages demoted one by one become one copy."""
    demoted = tuple(pair for action in group if isinstance(action, DemotePages) for pair in action.pairs)
    promoted = tuple(pair for action in group if isinstance(action, PromotePages) for pair in action.pairs)
    drops = [action for action in group if isinstance(action, Drop)]
    if demoted:
        yield DemotePages(demoted)
    elif promoted:
        yield PromotePages(promoted)
    elif drops:
        yield Drop(
            checkpoints=tuple(record for drop in drops for record in drop.checkpoints),
            sinks=tuple(record for drop in drops for record in drop.sinks),
            host_pages=tuple(page for drop in drops for page in drop.host_pages),
        )
    else:
        yield from group
