"""oneOf whose branches exclude each other says the same as anyOf, which a grammar can be made of.

llguidance proves that only of branches that are written out: pydantic, zod and OpenAPI write `$ref`s. What is not
proven here stays as it is, and llguidance refuses it. Proofs follow $refs and tell branches apart by their types,
values and lengths, and by a property or first item that one of them needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kakera.constrain.refs import Targets
from kakera.constrain.schema import NAMED, UNIONS, VALUES

MOST_COMPARED = 60_000  # parts of schemas, 0.8 s: a union of 200 branches told apart by a tag
MOST_VIEWS = 32
DEEPEST = 20
# "number" is what is no integer
TYPES = {"null": "null", "boolean": "boolean", "string": "string", "array": "array", "object": "object"}
KINDS = {**{name: {kind} for name, kind in TYPES.items()}, "integer": {"integer"}, "number": {"integer", "number"}}
EVERY_KIND = {"integer", "number", *TYPES}
BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}
View = dict[str, Any]


def with_any_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with each oneOf whose branches exclude each other written as anyOf."""
    if "oneOf" not in (text := json.dumps(schema)) or "/oneOf/" in text:  # a $ref may lead into one
        return schema
    written: dict[str, Any] = _Writer(schema).write(schema)
    return written


class _Writer:
    def __init__(self, schema: dict[str, Any]):
        self._targets = Targets(schema)
        self._left = MOST_COMPARED

    def write(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.write(item) for item in node]
        if not isinstance(node, dict):
            return node
        written: dict[str, Any] = {}
        for key, value in node.items():
            if key in NAMED and isinstance(value, dict):
                written[key] = {name: self.write(inner) for name, inner in value.items()}
            elif key in VALUES:
                written[key] = value
            elif key == "oneOf" and "anyOf" not in node and self._exclusive(value):
                written["anyOf"] = self.write(value)
            else:
                written[key] = self.write(value)
        return written

    def _exclusive(self, branches: Any) -> bool:
        return isinstance(branches, list) and all(
            self._apart(one, other, 0) for i, one in enumerate(branches) for other in branches[:i]
        )

    def _apart(self, one: Any, other: Any, depth: int) -> bool:
        """Whether it is proven that no value is of both schemas."""
        self._left -= 1
        if one is False or other is False:
            return True
        if depth > DEEPEST or self._left < 0 or not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        ones, others = self._views(one), self._views(other)
        if self._apart_by_branch(ones, other, depth) or self._apart_by_branch(others, one, depth):
            return True
        mine, theirs = _values(ones), _values(others)
        if mine is not None and theirs is not None:
            return not mine & theirs
        return all(self._apart_as(kind, ones, others, depth) for kind in _kinds(ones) & _kinds(others))

    def _apart_by_branch(self, views: list[View], other: Any, depth: int) -> bool:
        """A view is a union, none of whose branches meets the other."""
        unions = (view[name] for view in views for name in UNIONS if isinstance(view.get(name), list))
        return any(all(self._apart(branch, other, depth + 1) for branch in union) for union in unions)

    def _apart_as(self, kind: str, ones: list[View], others: list[View], depth: int) -> bool:
        """Whether no value of this kind is of both."""
        if kind in BOUNDS and (_beyond(ones, others, *BOUNDS[kind]) or _beyond(others, ones, *BOUNDS[kind])):
            return True
        if kind == "array" and max([0, *_numbers([*ones, *others], "minItems")]) > 0:
            return self._any_apart(_firsts(ones), _firsts(others), depth)
        if kind != "object":
            return False
        for name in dict.fromkeys(name for view in (*ones, *others) for name in _required(view)):
            if self._any_apart(_properties(ones, name), _properties(others, name), depth):
                return True
        return False

    def _any_apart(self, ones: list[Any], others: list[Any], depth: int) -> bool:
        self._left -= 1
        ones, others = ones or [True], others or [True]
        return any(self._apart(one, other, depth + 1) for one in ones for other in others)

    def _views(self, schema: View) -> list[View]:
        """The schema, what its $ref leads to and the parts of its allOf: a value is of all of them."""
        views: list[View] = []
        waiting = [schema]
        while waiting and len(views) < MOST_VIEWS:
            view = waiting.pop()
            if not isinstance(view, dict) or any(view is known for known in views):
                continue
            views.append(view)
            found = self._targets.of(ref) if isinstance(ref := view.get("$ref"), str) else []
            waiting += found if len(found) == 1 else []
            waiting += parts if isinstance(parts := view.get("allOf"), list) else []
        return views


def _kinds(views: list[View]) -> set[str]:
    kinds = set(EVERY_KIND)
    for view in views:
        if isinstance(declared := view.get("type"), str | list):
            listed = [declared] if isinstance(declared, str) else declared
            kinds &= {kind for name in listed if isinstance(name, str) for kind in KINDS.get(name, ())}
    values = _values(views)
    return kinds if values is None else kinds & {kind for kind, _ in values}


def _listed(view: View) -> list[Any] | None:
    if "const" in view:
        return [view["const"]]
    values = view.get("enum")
    return values if isinstance(values, list) else None


def _values(views: list[View]) -> set[tuple[str, str]] | None:
    """The values that a const or enum leaves, as (kind, spelling); None without one."""
    found = [{_value(value) for value in listed} for view in views if (listed := _listed(view)) is not None]
    return set.intersection(*found) if found else None


def _value(value: Any) -> tuple[str, str]:
    spelled = json.dumps(json.loads(json.dumps(value), parse_float=_shortest), sort_keys=True)
    match value:
        case None:
            return "null", spelled
        case bool():
            return "boolean", spelled
        case int() | float():
            return ("integer" if float(value).is_integer() else "number"), spelled
        case str():
            return "string", spelled
    return ("array" if isinstance(value, list) else "object"), spelled


def _shortest(digits: str) -> int | float:
    """1.0 is 1."""
    number = float(digits)
    return int(number) if number.is_integer() else number


def _beyond(ones: list[View], others: list[View], least: str, most: str) -> bool:
    """Whether all of one are greater than all of the other."""
    lows, highs = _numbers(ones, least), _numbers(others, most)
    return bool(lows and highs) and max(lows) > min(highs)


def _numbers(views: list[View], name: str) -> list[float]:
    found = (view.get(name) for view in views)
    return [number for number in found if isinstance(number, int | float) and not isinstance(number, bool)]


def _required(view: View) -> Iterator[str]:
    names = view.get("required")
    return (name for name in names if isinstance(name, str)) if isinstance(names, list) else iter(())


def _properties(views: list[View], name: str) -> list[Any]:
    """What each view says about a property; what a pattern may say is left aside."""
    said = []
    for view in views:
        named = view.get("properties")
        if isinstance(named, dict) and name in named:
            said.append(named[name])
        elif "additionalProperties" in view and not view.get("patternProperties"):
            said.append(view["additionalProperties"])
    return said


def _firsts(views: list[View]) -> list[Any]:
    """What each view says about an array's first item."""
    said = []
    for view in views:
        if isinstance(first := view.get("prefixItems"), list) and first:
            said.append(first[0])
        elif "items" in view:
            said.append(view["items"])
    return said
