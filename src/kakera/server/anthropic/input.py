"""An Anthropic body as a chat body: content blocks to messages, system, tools and the thinking switch.

Nothing here reads `cache_control`: every prefix is cached anyway.
"""

from __future__ import annotations

import re
from typing import Any

from kakera.chat.images import content_with_images, image_part, is_image, joined, refuse_images
from kakera.chat.parts import content_text, left_out, part_text
from kakera.errors import RequestRefused
from kakera.server.agents.translate import chat_body, names_of
from kakera.server.anthropic.schema import AnthropicTool, AnthropicToolChoice, CountBody, Message, MessagesBody
from kakera.server.openai.schema import ChatBody

# Agents begin their system prompt with a line about billing whose hash changes with every request. It says nothing to
# the model, and left in place it would make every prompt new from its first tokens on.
ATTRIBUTION = re.compile(r"\A(x-anthropic-[\w-]+:[^\n]*(\n+|\Z))+")
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}


def messages_chat(body: CountBody, sees: bool = False) -> ChatBody:
    """`sees`: blocks with images are kept. Raises RequestRefused (400) naming the field or block that can not be
    served."""
    system = system_text(body.system)
    messages = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body.messages):
        messages += chat_messages(message, f"messages[{index}]", index == len(body.messages) - 1, sees)
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": [function_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        "tool_choice": tool_choice(body.tool_choice),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "enable_thinking": body.thinking is not None and body.thinking.type != "disabled",
        "thinking_budget": body.thinking.budget_tokens if body.thinking else None,
    }
    form = body.output_format
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if form is not None and body.output_config.format is not None:
            raise RequestRefused("output_format and output_config.format say the same; send one", param="output_format")
        form = form or body.output_config.format
    fields["response_format"] = form and form.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stop_in_thinking": body.stop_in_thinking,
            "cache": body.cache,
        }
    return chat_body(fields, names_of(body, NAMES), body.passed_on)


def system_text(system: str | list[dict[str, Any]] | None) -> str:
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [part_text(block, f"system[{i}]", now=True) for i, block in enumerate(system or [])]
    return "\n\n".join(text for text in (ATTRIBUTION.sub("", text) for text in texts) if text)


def chat_messages(message: Message, path: str, last: bool, sees: bool = False) -> list[dict[str, Any]]:
    """One message of theirs is several of a chat's where it holds tool results. `last`: of the conversation."""
    if message.content is None or isinstance(message.content, str):
        return [{"role": message.role, "content": message.content or ""}]
    path += ".content"
    if sees and message.role != "user":
        refuse_images(message.content, path, message.role)
    if message.role == "assistant":
        return [assistant_message(message.content, path)]
    if message.role == "system":
        return [{"role": "system", "content": content_text(message.content, path, joint="\n\n")}]
    asked = last and all(block.get("type") != "tool_result" for block in message.content)
    return user_messages(message.content, path, asked, sees)


def user_messages(blocks: list[dict[str, Any]], path: str, now: bool, sees: bool = False) -> list[dict[str, Any]]:
    """`now`: the user wrote this for the request; what stands beside results of tools, the client did."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        if block.get("type") == "tool_result":
            messages.append(tool_message(block, at, sees))
            continue
        part = image_part(block, at) if sees and is_image(block) else part_text(block, at, now=now)
        if not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": []})
        messages[-1]["content"].append(part)
    for message in messages:
        if message["role"] == "user":  # joined last: a growing string would be copied each time
            message["content"] = joined(message["content"], "\n")
    return messages or [{"role": "user", "content": ""}]


def tool_message(block: dict[str, Any], path: str, sees: bool = False) -> dict[str, Any]:
    read = content_with_images if sees else content_text
    content = read(block.get("content"), f"{path}.content", joint="\n")
    if block.get("is_error"):  # the template has no other place to say so
        error = "Error: "
        content = error + content if isinstance(content, str) else [{"type": "text", "text": error}, *content]
    return {"role": "tool", "content": content}


def assistant_message(blocks: list[dict[str, Any]], path: str) -> dict[str, Any]:
    """Blocks of tools that ran at Anthropic are left out: the words behind them say what was found."""
    text, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "text" | "search_result":
                text += part_text(block, f"{path}[{index}]")
            case "compaction":  # what a former model kept of all that stood before
                text += content_text(block.get("content"), f"{path}[{index}].content")
            case "thinking" if isinstance(thought := block.get("thinking"), str):
                reasoning += thought
            case "redacted_thinking":
                pass  # only who wrote it can read it
            case "tool_use":
                calls.append(call_object(block))
            case kind:
                left_out(str(kind))
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call_object(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def function_tool(tool: AnthropicTool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestRefused(
            f"{path}.type is {tool.type!r}, a tool that runs at Anthropic or has a schema known only there; "
            "send tools with an input_schema, which the client runs",
            param=f"{path}.type",
        )
    if tool.input_schema is None:
        raise RequestRefused(f"{path}.input_schema is missing", param=f"{path}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def tool_choice(choice: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise RequestRefused("tool_choice.name is missing", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
