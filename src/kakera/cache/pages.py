"""IdPool: ids 0 .. count - 1, each free or held. Device pages, host pages and slots are handed out by one of these."""

from __future__ import annotations


class IdPool:
    """Ids are made on demand, the lowest first, so a pool of millions costs nothing until it is used.

    Who shares a device page is counted where the sharing happens: `Node.users` in the tree. A page outside the tree
    has exactly one holder.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._returned: list[int] = []
        self._held: set[int] = set()
        self._made = 0

    @property
    def free(self) -> int:
        return self.count - len(self._held)

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)

    def take(self) -> int:
        """Hand out a free id. Raises IndexError if there is none: callers make room first."""
        if self._returned:
            taken = self._returned.pop()
        elif self._made < self.count:
            taken, self._made = self._made, self._made + 1
        else:
            raise IndexError(f"all {self.count} ids are held")
        self._held.add(taken)
        return taken

    def give(self, returned: int) -> None:
        """Take an id back. Raises KeyError if it is not held: nothing is freed twice."""
        self._held.remove(returned)
        self._returned.append(returned)

    def resize(self, count: int) -> dict[int, int]:
        """Hand out ids below `count` alone from now on, of which enough must be free: held ones at or above it change
        into others. Returns old and new ids of these."""
        strays = sorted(each for each in self._held if each >= count)
        self._held.difference_update(strays)
        self._returned = [each for each in self._returned if each < count]
        self._made, self.count = min(self._made, count), count
        return {stray: self.take() for stray in strays}
