"""A call that a model wrote as JSON where its dialect wants XML: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kakera.chat.schema_types import Schema, declared_types, json_value, parse_value, resolve, typed_json

CLOSE = "</tool_call>"
MISSING = ("", "}", "}}")  # closing braces that a model forgets at the end
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonCall:
    """`arguments` is JSON text; the call ends at character `end` of the text that was read."""

    name: str
    arguments: str
    end: int


def json_call(text: str, schemas: dict[str, Schema], ended: bool = False) -> JsonCall | str | None:
    """The call at the start of `text`; the text itself if there is none; None if more of it has to come.

    What counts stands before the first closing tag, so the answer does not depend on how much has come behind it.
    """
    close = text.find(CLOSE)
    part = text if close < 0 else text[:close]
    value, end = _object(part, complete=ended or close >= 0)
    if value is None:
        return text if ended or close >= 0 else None
    function = value.get("function")
    inner = function if isinstance(function, dict) else value
    name = inner.get("name")
    arguments: Any = next((inner[key] for key in ARGUMENT_KEYS if key in inner), {})
    if isinstance(arguments, str):
        arguments = parse_value(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return text
    return JsonCall(name, json.dumps(_typed(arguments, schemas.get(name, {})), ensure_ascii=False), end)


def _object(part: str, complete: bool) -> tuple[dict[str, Any] | None, int]:
    """The JSON object at the start and where it ends. Only of a `complete` text are errors forgiven."""
    start = len(part) - len(part.lstrip())
    for missing in MISSING if complete else ("",):
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(part[start:] + missing)
        except (ValueError, RecursionError):
            continue
        return _plain(value), min(start + end, len(part))
    return _plain(parse_value(part.strip()) if complete else None), len(part)


def _plain(value: Any) -> dict[str, Any] | None:
    """An object that is JSON again; None for anything else."""
    try:
        return json_value(value) if isinstance(value, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _typed(arguments: dict[str, Any], root: Schema) -> dict[str, Any]:
    properties = resolve(root, root).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    return {
        key: typed_json(value, declared_types(properties[key], root)) if key in properties else value
        for key, value in arguments.items()
    }
