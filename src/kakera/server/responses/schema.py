"""The body of POST /v1/responses. Input items and tools are judged by input.py."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from kakera.server.examples import RESPONSES, shown
from kakera.server.fields import MAX_STOPS, Body, Items, Pairs, RequestBody, StopString, refuse
from kakera.server.openai.schema import ChatBody

# What would need a store of former responses, which this server does not keep.
STORED = ("previous_response_id", "conversation", "prompt")


class ResponseTool(Body):
    """A function, a namespace of functions, or something that only OpenAI runs."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Items[ResponseTool] | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class TextConfig(Body):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(RequestBody):
    """`store` is accepted and nothing is stored; `include`, `service_tier` and the like are accepted and ignored."""

    model_config = shown(RESPONSES)
    passed = ChatBody.for_agents

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_in_thinking: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: Pairs[str] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    include: Items[str] | None = None
    prompt_cache_key: str | None = None
    cache: bool | None = None
    service_tier: str | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _nothing_is_stored(self) -> ResponsesBody:
        for name in STORED:
            if getattr(self, name) is not None:
                message = f"{name} is not supported: nothing is stored here; send the whole conversation as input"
                raise refuse(name, message)
        if self.background:
            raise refuse("background", "background is not supported: nothing is stored here; use stream")
        return self
