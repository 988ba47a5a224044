"""The rules that say whether an answer is right. Pure functions of the answer's text and the case's expectations.

Source: the scoring rules of the reference model's evaluation suites (docs/developers/evaluation.md states them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from kakera.chat.tags import OPEN
from kakera.errors import UsageError

Call = dict[str, Any]  # {"name": str, "arguments": {name: JSON value}}
LETTER_OR_DIGIT = r"[^\W_]"


def contains_all(answer: str, expected: Sequence[str]) -> bool:
    """Every string occurs, letter case ignored, with no letter or digit right before or right after it."""
    return all(_contains_word(answer, text) for text in expected)


def _contains_word(answer: str, text: str) -> bool:
    pattern = f"(?<!{LETTER_OR_DIGIT}){re.escape(text)}(?!{LETTER_OR_DIGIT})"
    return re.search(pattern, answer, re.IGNORECASE) is not None


def json_equal(a: Any, b: Any) -> bool:
    """Equality of JSON values: numbers by value (214 equals 214.0), booleans are no numbers, key order is free."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(json_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(json_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def exact_calls(calls: Sequence[Call], expected: Sequence[Call]) -> bool:
    """Equal in number, order, names and arguments. Arguments have been typed by the declared schema already."""
    return len(calls) == len(expected) and all(
        call["name"] == want["name"] and json_equal(call["arguments"], want["arguments"])
        for call, want in zip(calls, expected, strict=True)
    )


def exact_json(answer: str, expected: Any) -> bool:
    """The whole answer parses as JSON and equals `expected`."""
    try:
        return json_equal(json.loads(answer, parse_constant=_refuse_constant), expected)
    except ValueError:
        return False


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def score(case: dict[str, Any], answer: str, text: str, calls: Sequence[Call]) -> bool:
    """Apply the rule that the case names.

    `answer` is the whole answer, `text` what stands in it beside the tool calls, `calls` the parsed tool calls.
    Raises UsageError for a rule that does not exist.
    """
    tried = calls or OPEN in text  # a call of a function that the case does not have stays text
    rules: dict[str, Callable[[], bool]] = {
        "contains_all": lambda: contains_all(answer, case["expected"]),
        "exact_calls": lambda: exact_calls(calls, case["expected"]),
        "no_calls": lambda: not tried and bool(text.strip()),
        "no_calls_contains_all": lambda: not tried and contains_all(text, case["contains_all"]),
        "exact_json": lambda: exact_json(answer, case["expected"]),
    }
    if case["score"] not in rules:
        raise UsageError(f"case {case['id']}: unknown scoring rule {case['score']!r}; known: {', '.join(rules)}")
    return rules[case["score"]]()
