"""ActionLog: the cache's decisions in the order in which they were made.

The cache's bookkeeping always describes the world *after* every action in the log. The runner executes the log from
the front, so each action meets the world in which it was decided. Only neighbours of one kind are merged; nothing is
ever reordered. That single rule replaces all special care: a page is demoted before it is handed out again, a host
page is dropped before another page is demoted into it, a checkpoint is restored before a later drop of it.
"""

from __future__ import annotations

from kakera.schedule.step import Action, DemotePages, Drop, PromotePages


class ActionLog:
    def __init__(self) -> None:
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        if self._actions and (merged := _merge(self._actions[-1], action)):
            self._actions[-1] = merged
        else:
            self._actions.append(action)

    def take(self) -> tuple[Action, ...]:
        """Everything decided since the last call."""
        taken, self._actions = tuple(self._actions), []
        return taken


def _merge(first: Action, second: Action) -> Action | None:
    if isinstance(first, DemotePages) and isinstance(second, DemotePages):
        return DemotePages(first.pairs + second.pairs)
    if isinstance(first, PromotePages) and isinstance(second, PromotePages):
        return PromotePages(first.pairs + second.pairs)
    if isinstance(first, Drop) and isinstance(second, Drop):
        return Drop(
            first.checkpoints + second.checkpoints, first.sinks + second.sinks, first.host_pages + second.host_pages
        )
    return None
