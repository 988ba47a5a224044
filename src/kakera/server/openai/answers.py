"""Shapes of what OpenAI's classic routes answer, and their usage."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.contract.events import Usage
from kakera.server.http.openapi import closed


@closed
class CachedTokens(TypedDict):
    """`image_tokens`: of a prompt with images, how many of its tokens stand for them."""

    cached_tokens: int
    image_tokens: NotRequired[int]


@closed
class PredictedTokens(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@closed
class ChatDetails(PredictedTokens):
    reasoning_tokens: int


@closed
class PromptUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@closed
class CompletionUsage(PromptUsage):
    completion_tokens_details: PredictedTokens


@closed
class ChatUsage(PromptUsage):
    completion_tokens_details: ChatDetails


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
    function_call: NotRequired[CalledFunction]  # beside them, where the request had `functions`


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
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]


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


@closed
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    input_modalities: NotRequired[list[Literal["text", "image"]]]  # of a model that reads images


@closed
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@closed
class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


@closed
class Text(TypedDict):
    prompt: str


def chat_usage(usage: Usage, reasoning_tokens: int, image_tokens: int = 0) -> ChatUsage:
    """Reasoning tokens are among the completion tokens, those of images among the prompt's."""
    found = _counted(usage)
    if image_tokens:
        found["prompt_tokens_details"]["image_tokens"] = image_tokens
    details: ChatDetails = {"reasoning_tokens": reasoning_tokens, **_predicted(usage)}
    return {**found, "completion_tokens_details": details}


def usage_object(usage: Usage) -> CompletionUsage:
    return {**_counted(usage), "completion_tokens_details": _predicted(usage)}


def _counted(usage: Usage) -> PromptUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _predicted(usage: Usage) -> PredictedTokens:
    """Of drafts. Accepted ones are among the completion tokens, rejected ones are not."""
    return {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
