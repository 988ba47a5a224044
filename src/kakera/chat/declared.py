"""The tools of a request as calls need them: which names there are, which parameters, of which types."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kakera.chat.schema_types import Schema, declared_types, resolve, typed_json

QUOTES = "\"'"


class Declared:
    """Names that nobody declared are no calls. Another case is repaired where one name alone can be meant."""

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self._schemas: dict[str, Schema] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._folded: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._schemas:
            self._folded[name.casefold()].append(name)

    def function(self, written: Any) -> str | None:
        """The name that is meant: as it is written, without quotes, or in another case."""
        if not isinstance(written, str):
            return None
        for name in (written, written.strip(), written.strip().strip(QUOTES).strip()):
            if name in self._schemas:
                return name
        alike = self._folded.get(written.strip().strip(QUOTES).strip().casefold(), ())
        return alike[0] if len(alike) == 1 else None

    def may_become(self, written: str) -> bool:
        """Whether a function's name begins so."""
        return any(name.startswith(written.casefold()) for name in self._folded)

    def parameter(self, function: str, written: str) -> str:
        """A parameter's name without the quotes around it, unless it is declared with them."""
        plain = written.strip()
        bare = plain.strip(QUOTES).strip()
        whole = plain[0] in QUOTES and plain[-1] == plain[0]
        return (
            bare if plain not in self.properties(function) and (whole or bare in self.properties(function)) else plain
        )

    def properties(self, function: str) -> Schema:
        properties = resolve(self._schemas[function], self._schemas[function]).get("properties")
        return properties if isinstance(properties, dict) else {}

    def takes_any(self, function: str) -> bool:
        """Whether the function may be given anything: not without a schema, nor where that forbids all."""
        root = self._schemas[function]
        return bool(self.properties(function)) or bool(root and root.get("additionalProperties") is not False)

    def needs_none(self, function: str) -> bool:
        """Whether a call without arguments can be meant."""
        return not self._schemas[function].get("required")

    def types(self, function: str, key: str) -> frozenset[str]:
        """Names of the JSON types of a parameter; a parameter that nobody declared is a string."""
        properties = self.properties(function)
        return declared_types(properties[key], self._schemas[function]) if key in properties else frozenset(["string"])

    def typed(self, function: str, arguments: dict[str, Any]) -> str:
        """JSON text of arguments that came as values; of a function without parameters none are kept."""
        if not self.takes_any(function):
            return "{}"
        properties = self.properties(function)
        typed = {
            key: typed_json(value, self.types(function, key)) if key in properties else value
            for key, value in arguments.items()
        }
        return json.dumps(typed, ensure_ascii=False)
