"""Shapes of what the Anthropic Messages routes answer."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.server.http.openapi import closed


@closed
class ThinkingTokens(TypedDict):
    thinking_tokens: int


@closed
class MessageUsage(TypedDict):
    """The three kinds of input tokens add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


@closed
class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@closed
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


@closed
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@closed
class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


@closed
class TokenCount(TypedDict):
    input_tokens: int
