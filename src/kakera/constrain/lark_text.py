"""Lark as a client wrote it, read before llguidance does: how deep its rules go, what its patterns cost.

Only names, literals and patterns are told apart, by the tokens of llguidance's own lexer. What is no Lark passes: to
say what is wrong with it is llguidance's part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json import JSONDecoder
from typing import Any

from kakera.constrain.graph import longest_chain
from kakera.constrain.patterns import (
    MOST_REPEATS_SQUARED,
    Cost,
    Piece,
    Repeat,
    check_cost,
    check_count,
    fold,
    pattern_cost,
)
from kakera.constrain.refs import MOST_CHAINED
from kakera.constrain.schema import check_schema, patterns_of
from kakera.errors import RequestRefused

TOKENS = re.compile(
    r"(?P<skip>(#|//)[^\n]*|[ \t\r\n]+)"
    r'|(?P<string>"(\\(["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*")i?'
    r"|/(?P<regex>(\\.|[^/\\])+)/[imslux]*"
    r"|(?P<embedded>%(json|llguidance|regex))\b"
    r"|<[^<>\s]+>|@[a-zA-Z0-9_\-]+|%[a-z]+"
    r"|(?P<name>!?[_?]?[a-z][_a-z0-9\-]*|_?[A-Z][_A-Z0-9\-]*)"
    r"|\{\s*(?P<least>\d*)\s*(?P<comma>,)?\s*(?P<most>\d*)\s*\}"
    r"|(?P<colons>::\w*)|(?P<colon>:)|(?P<mark>[()|\[\]*+?&~])|.",
    re.DOTALL,
)
HEAD = re.compile(  # what may stand between the name that a line defines and what it is
    r"[ \t]*(::[ \t]*_)?[ \t]*(\{[^}]*\})?[ \t]*(\.[ \t]*[+-]?\d+)?[ \t]*"
    r'(?P<attributes>\[([^\]"/]|"([^"\\\n]|\\.)*"|/(\\.|[^/\\])+/)*\])?[ \t]*:(?!:)'
)
SPACE = re.compile(r"\s*")
MOST_ITEMS = 4_000  # of one rule; llguidance takes the square: 5 s to compile 20,000, and 12 s for their first mask
NUMBERS = JSONDecoder(parse_int=float)  # an int of 5,000 digits is an error for Python, and none for llguidance


@dataclass
class _Definition:
    pieces: list[Piece | _Reference] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Reference:
    name: str


def check_grammar(text: str, param: str) -> None:
    """Raises RequestRefused (400) for a grammar of ours, or bare Lark, that is too deep or too costly to compile."""
    squared = 0
    for lark in [part["lark_grammar"] for part in json.loads(text)["grammars"]] if text[:1] == "{" else [text]:
        squared += _check_lark(lark, param)
    if squared > MOST_REPEATS_SQUARED:
        raise RequestRefused(
            f"{param}: all patterns together have too many repeats (* + ? or a count): the sum of their squares is "
            f"{squared}; the limit is {MOST_REPEATS_SQUARED}",
            param=param,
            code="invalid_grammar",
        )


def _check_lark(text: str, param: str) -> int:
    """The sum over all patterns of the square of their repeats."""
    definitions: dict[str, _Definition] = {"": _Definition()}
    patterns: list[Cost] = []
    owner = definitions[""]
    for kind, value in _tokens(text, param):
        if kind == "definition":
            owner = definitions.setdefault(value, _Definition())
            owner.pieces.append("|")
        elif kind == "name":
            owner.names.add(value)
            owner.pieces.append(_Reference(value))
        elif kind == "schema":
            check_schema(value, param)
            patterns += [pattern_cost(pattern, param) for pattern in patterns_of(value)]
        else:
            owner.pieces.append(value)
            patterns += [value] if isinstance(value, Cost) else []
    rules = [(name, each.pieces) for name, each in definitions.items() if not _is_terminal(name)]
    largest, name = max((sum(isinstance(p, Cost | _Reference) for p in pieces), name) for name, pieces in rules)
    if largest > MOST_ITEMS:
        raise RequestRefused(
            f"{param}: the rule {name} has {largest} names and literals; the limit is {MOST_ITEMS}",
            param=param,
            code="invalid_grammar",
        )
    depth = longest_chain({name: definition.names for name, definition in definitions.items()})
    if depth > MOST_CHAINED:
        raise RequestRefused(
            f"{param}: its rules lead through {depth} others, one into the next; the limit is {MOST_CHAINED}",
            param=param,
            code="invalid_grammar",
        )
    costs: dict[str, Cost] = {}
    for name in definitions:
        _cost(name, definitions, costs, param)
    return sum(cost.repeats**2 for cost in [*patterns, *(c for n, c in costs.items() if _is_terminal(n))])


def _cost(name: str, definitions: dict[str, _Definition], costs: dict[str, Cost], param: str) -> Cost:
    """With all that it leads to, written out. Recursion is bounded by MOST_CHAINED, which was checked before."""
    if name in costs or name not in definitions:
        return costs.get(name, Cost())
    costs[name] = Cost()  # what leads to itself ends somewhere else
    pieces: list[Piece] = []
    for piece in definitions[name].pieces:
        if isinstance(piece, _Reference):
            inner = _cost(piece.name, definitions, costs, param)
            piece = inner if _is_terminal(piece.name) else Cost(inner.length)
        pieces.append(piece)
    cost = fold(pieces)
    costs[name] = check_cost(cost if _is_terminal(name) else Cost(cost.length), name or "the grammar", param)
    return costs[name]


def _tokens(text: str, param: str) -> Iterator[tuple[str, Any]]:
    at = 0
    while at < len(text):
        found = TOKENS.match(text, at)
        assert found is not None
        at = found.end()
        if (name := found["name"]) is not None:
            head = HEAD.match(text, at)
            yield ("definition" if head else "name", name.lstrip("!?"))
            if head is not None:  # attributes are read too: they may name terminals
                at = head.end() if head["attributes"] is None else head.start("attributes")
        elif found["string"] is not None:
            yield "piece", Cost(max(1, len(found["string"]) - 2) if found["string"] != '""' else 0)
        elif found["regex"] is not None:
            yield "piece", pattern_cost(found["regex"], param)
        elif found["least"] is not None:
            least = check_count(found["least"], param)
            check_count(found["most"], param)
            yield "piece", Repeat(least)
        elif found["embedded"] is not None:
            value, at = _json_at(text, at, param)
            if found["embedded"] == "%json":
                yield "schema", value
        elif (mark := found["mark"]) is not None:
            yield from _marks(mark)


def _marks(mark: str) -> Iterator[tuple[str, Piece]]:
    match mark:
        case "[":
            yield "piece", "("
        case "]":
            yield from (("piece", ")"), ("piece", Repeat(0)))
        case "*" | "?":
            yield "piece", Repeat(0)
        case "+":
            yield "piece", Repeat(1)
        case "&" | "~":
            yield "piece", Cost(0, 1)
        case _:
            yield "piece", mark


def _json_at(text: str, at: int, param: str) -> tuple[Any, int]:
    try:
        return NUMBERS.raw_decode(text, SPACE.match(text, at).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        what = "is nested too deep" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise RequestRefused(f"{param}: what follows %json {what}", param=param, code="invalid_grammar") from None


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()
