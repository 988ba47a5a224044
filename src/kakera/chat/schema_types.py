"""Text to JSON values: what a parameter's declared schema says its text means."""

from __future__ import annotations

import ast
import json
import re
from typing import Any
from urllib.parse import unquote

from kakera.text.unicode import well_formed

Schema = dict[str, Any]
DEEPEST_REF = 8  # a $ref may lead to itself
BACKSLASH = re.compile(r"\\(.)", re.DOTALL)
JSON_ESCAPES, PYTHON_ESCAPES = '"\\/bfnrtu', "\\'\"\nabfnrtvxuUN01234567"
NO_SPACE = re.compile(r"\S")
NUMBER_BEGUN = re.compile(r"\s*[-+0-9.eE]+\s*")
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "string": (str,),
}


def declared_types(schema: Schema, root: Schema) -> frozenset[str]:
    """Names of the JSON types that the schema allows; empty if it does not say."""
    found: set[str] = set()
    seen: set[int] = set()  # a $ref may lead back, and many may lead to one place
    waiting: list[Any] = [schema]
    while waiting:
        part = resolve(waiting.pop(), root)
        if id(part) in seen:
            continue
        if part:  # an empty one is made here, and another may get its id
            seen.add(id(part))
        kind = part.get("type")
        options = next((part[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(part.get(key), list)), None)
        values = part.get("enum", [part["const"]] if "const" in part else [])
        if isinstance(kind, str):
            found.add(kind)
        elif isinstance(kind, list):
            found.update(name for name in kind if isinstance(name, str))
        elif options is not None:
            waiting += options
        elif isinstance(values, list):
            found.update(name for value in values for name, types in PYTHON_TYPES.items() if type(value) in types)
    return frozenset(found)


def typed_value(text: str, types: frozenset[str]) -> Any:
    """The value that `text` means under these types. Text that fits none of them stays a string.

    A string type alone keeps the text as it is, whatever it looks like; in a union the other types come first,
    since a template writes strings and numbers alike.
    """
    if types == {"string"}:
        return text
    value = parse_value(text.strip())
    if not types:
        return text if value is _UNREADABLE else value
    if isinstance(value, float) and value.is_integer() and "number" not in types and "integer" in types:
        return int(value)
    for name in types - {"string"}:
        if type(value) in PYTHON_TYPES.get(name, ()):
            return value
    return text


def surely_text(begun: str, types: frozenset[str]) -> bool:
    """Whether `typed_value` keeps every text that begins so as a string."""
    first = NO_SPACE.search(begun)
    if first is None or (types and "string" not in types):
        return False
    if first[0] in '[{"':
        others = {"array", "object"} if first[0] != '"' else set()
    elif NUMBER_BEGUN.fullmatch(begun):
        others = {"integer", "number"}
    elif any(word.startswith(begun[: LONGEST_WORD + first.end()].strip().lower()) for word in _WORDS):
        others = {"boolean", "null"}
    else:
        return True
    return bool(types) and not types & others


def typed_json(value: Any, types: frozenset[str]) -> Any:
    """A value that came as JSON under these types: strings may mean something else, as in the XML dialect."""
    if isinstance(value, str):
        return value if "string" in types or not types else typed_value(value, types)
    return json.dumps(value, ensure_ascii=False) if types == {"string"} else value


_UNREADABLE = object()
_WORDS = {"true": True, "false": False, "null": None, "none": None}
LONGEST_WORD = max(map(len, _WORDS))


def parse_value(text: str) -> Any:
    if text.lower() in _WORDS:  # models write Python's True and None as well
        return _WORDS[text.lower()]
    try:
        return json_value(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        pass
    if text[:1] not in ("[", "{"):
        return _UNREADABLE
    try:
        return json_value(ast.literal_eval(escaped_strays(text, PYTHON_ESCAPES)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _UNREADABLE


def escaped_strays(text: str, escapes: str) -> str:
    """The text with a second backslash before each that begins none of the `escapes` (`\\d` in a pattern, mostly)."""
    return BACKSLASH.sub(lambda match: match[0] if match[1] in escapes else "\\" + match[0], text)


def json_value(value: Any) -> Any:
    """The value if JSON can say it, with U+FFFD for halves of surrogate pairs, which no answer could carry.

    Raises ValueError for what is not finite (1e999 is read as infinity), TypeError, RecursionError.
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    clean = well_formed(text)
    return value if clean is text else json.loads(clean)


def resolve(schema: Any, root: Schema) -> Schema:
    """The schema that a $ref stands for, or itself; empty for what is none."""
    for _ in range(DEEPEST_REF):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(ref := schema.get("$ref"), str):
            return schema
        schema = root
        for key in unquote(ref.removeprefix("#/")).split("/"):
            key = key.replace("~1", "/").replace("~0", "~")  # as JSON Pointer spells them
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}
