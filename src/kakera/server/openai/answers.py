"""Shapes of what the OpenAI chat and completion routes answer."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.server.http.openapi import closed


@closed
class CachedTokens(TypedDict):
    cached_tokens: int


@closed
class ReasoningTokens(TypedDict):
    reasoning_tokens: int


@closed
class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@closed
class ChatUsage(CompletionUsage):
    completion_tokens_details: ReasoningTokens


@closed
class CalledFunction(TypedDict):
    name: str
    arguments: str


@closed
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@closed
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@closed
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@closed
class ChosenTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


@closed
class ChatLogprobs(TypedDict):
    content: list[ChosenTokenLogprob]
    refusal: None


@closed
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


@closed
class ChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


@closed
class TextLogprobs(TypedDict):
    """Lists of the same length, an entry a token. The first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


@closed
class CompletionAnswer(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
