"""Pieces of grammar text: literals, tokens, JSON schemas, and whole grammars put together."""

from __future__ import annotations

import json
from typing import Any

from kakera.constrain.one_of import with_any_of
from kakera.constrain.schema import check_schema
from kakera.errors import RequestRefused
from kakera.text.tokenizer import Tokenizer

LONGEST_GRAMMAR = 512 * 1024  # characters; 60 tools of 12 parameters are 77,000 and compile in 0.1 s
# JSON comes on one line, with a space or none behind commas and colons: where any white space is allowed, small models
# go on writing it (mini spent 200 tokens on three fields). What a schema says about "lenient" is overruled: a keyword
# that can not be enforced is an error.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": False}


def literal(text: str) -> str:
    """As Lark's strings are JSON's, but for U+007F, which its lexer takes only escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
    return "%json " + json.dumps({**with_any_of(schema), "x-guidance": JSON_OPTIONS})


def grammar(start: str, rules: str, nested: dict[str, str] | None = None) -> str:
    """A grammar whose text is `start`, a right side made of `rules` and of `@name` for `nested` grammars."""
    main = {"lark_grammar": f"start: {start}\n{rules}"}
    return json.dumps(
        {"grammars": [main, *({"name": name, "lark_grammar": text} for name, text in (nested or {}).items())]}
    )
