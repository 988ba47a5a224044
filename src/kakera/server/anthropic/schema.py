"""The body of POST /v1/messages. Content blocks are judged by input.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kakera.server.examples import COUNT, MESSAGES, shown
from kakera.server.fields import MANY, MAX_STOPS, Body, Items, RequestBody, StopString
from kakera.server.openai.schema import ChatBody

Blocks = Items[dict[str, Any]]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks | None = None


class AnthropicTool(Body):
    """`type` is absent or "custom" for a tool that the client runs; anything else runs at Anthropic."""

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Any type but "disabled" switches it on; `display` is accepted, and thinking always shown."""

    type: str
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputConfig(Body):
    """How hard to think, and a form that the answer must have."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(RequestBody):
    """What makes the prompt; all of the body of /v1/messages/count_tokens."""

    model_config = shown(COUNT)
    passed = ChatBody.for_agents

    messages: Items[Message]
    system: str | Blocks | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its name while it was a beta
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesBody(CountBody):
    model_config = shown(MESSAGES)

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MANY)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_in_thinking: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    cache: bool | None = None
