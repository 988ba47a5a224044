"""What /openapi.json says of all routes: errors, streams, and how the shapes in each answers.py are declared.

Every shape is closed: what an answer has, its shape names. A test holds the answers of a running server to them.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

Responses = dict[int | str, dict[str, Any]]
closed = with_config(ConfigDict(extra="forbid", protected_namespaces=()))


@closed
class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@closed
class ErrorAnswer(TypedDict):
    error: ErrorFields


@closed
class AnthropicErrorFields(TypedDict):
    type: str
    message: str
    param: NotRequired[str]


@closed
class AnthropicErrorAnswer(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorFields


@closed
class ReasoningTokens(TypedDict):  # of responses
    reasoning_tokens: int


def streams(shape: Any, events: str) -> Responses:
    """A whole answer, or with `stream` its events."""
    description = f"The answer; with `stream`: {events}."
    return {200: {"model": shape, "content": {"text/event-stream": {}}, "description": description}}


def refusals(shape: Any) -> Responses:
    return {
        "4XX": {"model": shape, "description": "Refused; the message says which field or limit, and what to do."},
        "5XX": {"model": shape, "description": "The engine failed, hangs, or is stopping."},
    }


ERRORS = refusals(ErrorAnswer)
ANTHROPIC_ERRORS = refusals(AnthropicErrorAnswer)
# of a route whose answers are no JSON; the errors are, all the same
JSON_ERRORS: Responses = {
    status: {
        "description": error["description"],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
    }
    for status, error in ERRORS.items()
}
