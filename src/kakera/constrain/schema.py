"""JSON schemas checked for what would compile to something else than their author meant, or to something huge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from kakera.constrain.patterns import LONGEST_TEXT, pattern_cost
from kakera.constrain.refs import check_refs
from kakera.errors import RequestRefused

LONGEST_REPEAT = 100_000  # items, characters or properties that a schema may count up to
LONGEST_SCHEMA = 512 * 1024  # characters; a grammar may have as many
DEEPEST = 100  # levels of JSON
LARGEST_MULTIPLE = 100_000  # llguidance counts remainders in states: 1 s to compile 86,400, 27 s for 1,000,003
MOST_PATTERN_NAMES = 50  # of one object: each two are compared
# llguidance's parser holds 2,000 items in a row. At the brace of an object each optional property is four of them, and
# each branch of a union that no single token pattern can stand for is one.
MOST_OPTIONAL = 490
MOST_BRANCHES = 1_900
REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
UNIONS = ("anyOf", "oneOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names to schemas
VALUES = ("enum", "const", "default", "examples")  # values, not schemas, unless a $ref leads into them
REF_INTO_VALUES = re.compile(rf'"\$(dynamicRef|ref)": "[^"]*#[^"]*/({"|".join(VALUES)})[/"]')


def check_schema(schema: Any, param: str) -> None:
    """Raises RequestRefused (400) naming `param`."""
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise _too_deep(param) from None
    if len(text) > LONGEST_SCHEMA:
        raise RequestRefused(
            f"{param}: the schema has {len(text)} characters; the limit is {LONGEST_SCHEMA}", param=param
        )
    _check(schema, param, 0, VALUES)
    if REF_INTO_VALUES.search(unquote(text)):
        _check(schema, param, 0, ())
    if (multiples := _multiples(schema)) > LARGEST_MULTIPLE:
        raise RequestRefused(
            f"{param}: the digits of its multipleOf add up to {multiples}; the limit is {LARGEST_MULTIPLE}", param=param
        )
    check_refs(schema, param)


def _check(node: Any, param: str, depth: int, skipped: tuple[str, ...]) -> None:
    if depth > DEEPEST:
        raise _too_deep(param)
    if isinstance(node, list):
        for item in node:
            _check(item, param, depth + 1, skipped)
    if not isinstance(node, dict):
        return
    _check_own(node, param)
    for key, value in node.items():
        if key in NAMED and isinstance(value, dict):
            for schema in value.values():
                _check(schema, param, depth + 2, skipped)
        elif key not in skipped:
            _check(value, param, depth + 1, skipped)


def _check_own(node: dict[str, Any], param: str) -> None:
    """This schema alone, without those within it."""
    if isinstance(node.get("items"), list):
        raise RequestRefused(f"{param}: items is a list; say prefixItems for the first items of an array", param=param)
    for name in REPEATS:
        count = node.get(name)
        if isinstance(count, int | float) and count > LONGEST_REPEAT:
            raise RequestRefused(f"{param}: {name} is {count}; the limit is {LONGEST_REPEAT}", param=param)
    values = node.get("enum")
    for value in [node.get("const"), *(values if isinstance(values, list) else ())]:
        if (length := len(json.dumps(value))) > LONGEST_TEXT:
            raise RequestRefused(
                f"{param}: a value (const, enum) has {length} characters; the limit is {LONGEST_TEXT}",
                param=param,
            )
    if isinstance(pattern := node.get("pattern"), str):
        pattern_cost(pattern, param)
    if isinstance(named := node.get("patternProperties"), dict):
        for pattern in named:
            pattern_cost(pattern, param)
        if len(named) > MOST_PATTERN_NAMES:
            raise RequestRefused(
                f"{param}: {len(named)} patternProperties of one object; the limit is {MOST_PATTERN_NAMES}", param=param
            )
    optional = _optional(node)
    if optional > MOST_OPTIONAL:
        raise RequestRefused(
            f"{param}: {optional} optional properties of one object; the limit is {MOST_OPTIONAL}", param=param
        )
    for name in UNIONS:
        branches = _branches(node.get(name))
        if branches > MOST_BRANCHES:
            raise RequestRefused(
                f"{param}: {branches} branches of one {name}; the limit is {MOST_BRANCHES}", param=param
            )


def _optional(node: dict[str, Any]) -> int:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return 0
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - names)


def _branches(union: Any) -> int:
    """Single values are left out: together they are one pattern, of any number."""
    listed = union if isinstance(union, list) else []
    return sum(not (isinstance(branch, dict) and ("const" in branch or "enum" in branch)) for branch in listed)


def _too_deep(param: str) -> RequestRefused:
    return RequestRefused(f"{param} is nested more than {DEEPEST} levels deep", param=param)


def patterns_of(schema: Any) -> Iterator[str]:
    """All patterns in a schema whose levels are bounded, wherever they stand."""
    for node in _objects(schema):
        if isinstance(pattern := node.get("pattern"), str):
            yield pattern
        if isinstance(named := node.get("patternProperties"), dict):
            yield from named


def _multiples(schema: Any) -> int:
    """The sum of all multipleOf, without their decimal points. Powers of ten cost nothing."""
    numbers = [node.get("multipleOf") for node in _objects(schema)]
    exact = [Decimal(str(n)).normalize().as_tuple() for n in numbers if isinstance(n, int | float) and abs(n) < 1e30]
    written = [(int("".join(map(str, n.digits))), int(n.exponent)) for n in exact]
    return sum(digits * 10 ** max(0, exponent) for digits, exponent in written if digits > 1)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
