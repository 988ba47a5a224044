"""Pieces of grammar text: literals, tokens, JSON schemas, and whole grammars put together."""

from __future__ import annotations

import json
from typing import Any

from kakera.errors import RequestRefused
from kakera.text.tokenizer import Tokenizer

LONGEST_REPEAT = 100_000  # items, characters or properties that a schema may count up to
MOST_OPTIONAL = 490  # properties of one object: at the brace each is 4 items of the parser's row, which holds 2,000
REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# JSON comes on one line, with a space or none behind commas and colons: where any white space is allowed, small models
# go on writing it (mini spent 200 tokens on three fields). What a schema says about "lenient" is overruled: a keyword
# that can not be enforced is an error.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": False}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def token(tokenizer: Tokenizer, text: str) -> str:
    """The added token that `text` spells, or the letters where the vocabulary has no such token."""
    added = tokenizer.added.get(text)
    return literal(text) if added is None else f"<[{added.id}]>"


def json_value(schema: Any, param: str) -> str:
    """JSON of this schema. Raises RequestRefused (400) for what is no schema or counts too far."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestRefused(f"{param} must be a JSON schema, which is an object", param=param)
    check_schema(schema, param)
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def check_schema(node: Any, param: str, depth: int = 0) -> None:
    """Raises RequestRefused for what would compile to something else than its author meant, or to something huge."""
    if depth > 100:
        raise RequestRefused(f"{param} is nested more than 100 levels deep", param=param)
    if isinstance(node, list):
        for item in node:
            check_schema(item, param, depth + 1)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("items"), list):
        raise RequestRefused(f"{param}: items is a list; say prefixItems for the first items of an array", param=param)
    for name in REPEATS:
        count = node.get(name)
        if isinstance(count, int | float) and count > LONGEST_REPEAT:
            raise RequestRefused(f"{param}: {name} is {count}; the limit is {LONGEST_REPEAT}", param=param)
    optional = _optional(node)
    if optional > MOST_OPTIONAL:
        raise RequestRefused(
            f"{param}: {optional} optional properties of one object; the limit is {MOST_OPTIONAL}", param=param
        )
    for key, value in node.items():
        if key not in ("enum", "const", "default", "examples"):  # values, not schemas
            check_schema(value, param, depth + 1)


def _optional(node: dict[str, Any]) -> int:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return 0
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - names)


def grammar(start: str, rules: str, nested: dict[str, str] | None = None) -> str:
    """A grammar whose text is `start`, a right side made of `rules` and of `@name` for `nested` grammars."""
    main = {"lark_grammar": f"start: {start}\n{rules}"}
    return json.dumps(
        {"grammars": [main, *({"name": name, "lark_grammar": text} for name, text in (nested or {}).items())]}
    )
