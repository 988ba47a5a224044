"""Shapes of what the Responses route answers."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.server.http.openapi import ReasoningTokens, closed


@closed
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@closed
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


Status = Literal["in_progress", "completed", "incomplete", "failed"]


@closed
class ReasoningItem(TypedDict):
    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


@closed
class MessageItem(TypedDict):
    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


@closed
class FunctionCallItem(TypedDict):
    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


@closed
class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Literal[0]


@closed
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@closed
class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


@closed
class ResponseAnswer(TypedDict):
    """Beside the answer, the request's settings as they are in force."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
