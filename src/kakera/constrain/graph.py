"""How deep a compiler can get that follows a graph from node to node and enters none twice."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def longest_chain(edges: Mapping[Node, Collection[Node]]) -> int:
    """Nodes on the longest way that enters none twice; at least that, whatever the order that edges are taken in.

    Exact without cycles. Nodes that lead to each other count as one chain of them all: to find the longest way
    through them takes exponential time, and recursion in real schemas and grammars goes through few.
    """
    backwards: dict[Node, list[Node]] = {node: [] for node in edges}
    for node, targets in edges.items():
        for target in targets:
            if target in backwards:
                backwards[target].append(node)
    longest: dict[Node, int] = {}  # that ends in the node's component, which is then complete
    for first in reversed(_leaving_order(edges)):  # Kosaraju: each component behind all that lead to it
        if first in longest:
            continue
        component, waiting, before = {first}, [first], 0
        while waiting:
            for source in backwards[waiting.pop()]:
                if source in longest:
                    before = max(before, longest[source])
                elif source not in component:
                    component.add(source)
                    waiting.append(source)
        longest |= dict.fromkeys(component, before + len(component))
    return max(longest.values(), default=0)


def _leaving_order(edges: Mapping[Node, Collection[Node]]) -> list[Node]:
    """Nodes as a depth-first search leaves them."""
    left: list[Node] = []
    entered: set[Node] = set()
    for root in edges:
        if root in entered:
            continue
        entered.add(root)
        way = [(root, iter(edges[root]))]
        while way:
            node, targets = way[-1]
            target = next((t for t in targets if t in edges and t not in entered), None)
            if target is None:
                left.append(node)
                way.pop()
            else:
                entered.add(target)
                way.append((target, iter(edges[target])))
    return left
