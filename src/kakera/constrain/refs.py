"""Where the $refs of a JSON schema lead: how deep a compiler gets that follows them, how much it copies on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from kakera.constrain.graph import longest_chain
from kakera.errors import RequestRefused

# llguidance 1.9.1 follows each $ref and each rule into the next on the native stack, 9 KB for each object or $ref and
# 4.5 for each other level. On 8 MB, main thread or other, it dies by SIGSEGV at 910 to 1,040 $refs in properties, items
# or anyOf, 1,280 in allOf, 2,290 bare ones; 1,560 Lark rules with an optional group, 2,540 bare ones; 3,380 terminals;
# and at 80 $refs with 20 levels of JSON between each two. 200 with 100 levels each would take 90 MB of the 256 that
# deep_stack.py gives. Groups in Lark (35), in patterns (250) and %lark (35) have limits of the library's own.
MOST_CHAINED = 200
MOST_WRITTEN_OUT = 10_000  # nodes; where keywords stand beside a $ref, its target is copied: 5,000 take 0.3 s and 20 MB
MOST_IDS = 200  # a $ref may begin at each of them
REFS = ("$ref", "$dynamicRef", "$recursiveRef")
IDS = ("$id", "id")
ANCHORS = ("$anchor", "$dynamicAnchor")
DEFINITIONS = ("$defs", "definitions")  # compiled only where a $ref leads to them
MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)  # names to schemas
ANNOTATIONS = {
    *REFS,
    *IDS,
    *ANCHORS,
    *DEFINITIONS,
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
}


def check_refs(schema: dict[str, Any], param: str) -> None:
    """Raises RequestRefused (400) naming `param`. The schema's levels of JSON are bounded already."""
    targets = Targets(schema)
    if targets.ids > MOST_IDS:
        raise RequestRefused(f"{param}: {targets.ids} parts have an $id; the limit is {MOST_IDS}", param=param)
    nodes = {id(schema): _Node()} | {id(node): _Node() for ref in targets.refs for node in targets.of(ref)}
    waiting: list[tuple[int, dict[str, Any]]] = [(id(schema), schema)]
    while waiting:
        owner, part = waiting.pop()
        node = nodes[owner]
        node.parts += 1
        node.leads_to |= {id(target) for ref in _refs(part) for target in targets.of(ref)}
        node.copies += [id(target) for ref in _copied(part) for target in targets.of(ref)]
        for keyword, inner in _inner(part):
            if id(inner) in nodes:
                waiting.append((id(inner), inner))
                if keyword not in DEFINITIONS:
                    node.leads_to.add(id(inner))
                    node.copies.append(id(inner))
            else:
                waiting.append((owner, inner))
    chained = longest_chain({key: node.leads_to for key, node in nodes.items()}) - 1  # the schema itself is no target
    if chained > MOST_CHAINED:
        raise RequestRefused(
            f"{param}: its $refs lead through {chained} others, one into the next; the limit is {MOST_CHAINED}",
            param=param,
            code="invalid_grammar",
        )
    sizes: dict[int, int] = {}
    if any(_written_out(key, nodes, sizes) > MOST_WRITTEN_OUT for key in nodes):
        raise RequestRefused(
            f"{param}: what its $refs lead to is combined with other keywords, and has {max(sizes.values())} parts "
            f"when it is written out; the limit is {MOST_WRITTEN_OUT}",
            param=param,
            code="invalid_grammar",
        )


@dataclass
class _Node:
    """The schema or a target, without the targets inside it. Nodes are told apart by the id of their object."""

    parts: int = 0
    leads_to: set[int] = field(default_factory=set)
    copies: list[int] = field(default_factory=list)


def _written_out(key: int, nodes: dict[int, _Node], sizes: dict[int, int]) -> int:
    """Parts with each copy. Recursion is bounded by MOST_CHAINED; what is copied into itself llguidance refuses."""
    if key not in sizes:
        sizes[key] = 0
        sizes[key] = nodes[key].parts + sum(_written_out(copy, nodes, sizes) for copy in nodes[key].copies)
    return sizes[key]


class Targets:
    """What the $refs of a schema may mean: from its root or that of a part with its own $id, or by an anchor's name."""

    def __init__(self, schema: dict[str, Any]):
        self.refs: set[str] = set()
        self._bases: list[dict[str, Any]] = [schema]
        self._named: dict[str, list[dict[str, Any]]] = {}
        self._found: dict[str, list[dict[str, Any]]] = {}
        waiting: list[Any] = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict):
                self.refs.update(_refs(part))
                self._note_names(part)
            waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()

    @property
    def ids(self) -> int:
        return len(self._bases) - 1

    def _note_names(self, part: dict[str, Any]) -> None:
        for name in (name for name in (*IDS, *ANCHORS) if isinstance(part.get(name), str)):
            self._named.setdefault(_last_step(part[name]), []).append(part)
            if name in IDS and part is not self._bases[0]:
                self._bases.append(part)

    def of(self, ref: str) -> list[dict[str, Any]]:
        if ref not in self._found:
            address, _, fragment = ref.partition("#")
            found = [*self._named.get(_last_step(fragment), ()), *self._named.get(_last_step(address), ())]
            if not fragment or fragment.startswith("/"):
                found += [_at(base, unquote(fragment)) for base in self._bases]
            self._found[ref] = [node for node in found if isinstance(node, dict)]
        return self._found[ref]


def _last_step(address: str) -> str:
    """Of an $id, an anchor or what refers to it: addresses may be spelled in many ways, and still end alike."""
    return unquote(address.rstrip("#/").rsplit("/", 1)[-1])


def _at(base: Any, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        if isinstance(base, list):
            base = base[int(step)] if step.isdecimal() and len(step) < 9 and int(step) < len(base) else None
        elif isinstance(base, dict):
            base = base[step] if step in base else base.get(step.replace("~1", "/").replace("~0", "~"))
    return base


def _inner(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects next within this schema, with the keyword that holds them."""
    for keyword, value in part.items():
        waiting = list(value.values()) if keyword in MAPS and isinstance(value, dict) else [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                yield keyword, item
            elif isinstance(item, list):
                waiting += item


def _refs(part: dict[str, Any]) -> Iterator[str]:
    return (ref for name in REFS if isinstance(ref := part.get(name), str))


def _copied(part: dict[str, Any]) -> Iterator[str]:
    """The $refs of this object whose targets are combined with something else: they are compiled as copies."""
    listed = part.get("allOf")
    parts = listed if isinstance(listed, list) else []
    if part.keys() - ANNOTATIONS:
        yield from _refs(part)
    if len(parts) > 1 or part.keys() - ANNOTATIONS - {"allOf"}:
        yield from (
            ref for each in parts if isinstance(each, dict) and not each.keys() - ANNOTATIONS for ref in _refs(each)
        )
