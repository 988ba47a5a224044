"""A Responses body as a chat body: input items to messages."""

from __future__ import annotations

from typing import Any

from kakera.chat.images import Content, content_with_images, refuse_images
from kakera.chat.messages import ROLES
from kakera.chat.parts import content_text, left_out
from kakera.errors import RequestRefused
from kakera.server.agents.translate import chat_body, names_of, string
from kakera.server.openai.schema import ChatBody
from kakera.server.responses.schema import ResponsesBody
from kakera.server.responses.tools import ToolNames, function_tools, later_tools, tool_choice

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
PIECES = ("content", "reasoning_content")
PAYLOADS = ("arguments", "action", "operation", "input")  # of calls, by their kind
Message = dict[str, Any]


def responses_chat(body: ResponsesBody, sees: bool = False) -> tuple[ChatBody, ToolNames, list[str]]:
    """Chat body, names, and the types of tools that were left out. `sees`: parts with images are kept. Raises
    RequestRefused (400) naming the field."""
    names = ToolNames()
    unknown: list[str] = []
    tools = function_tools(body.tools or [], "tools", None, names, unknown)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    tools += later_tools(items, {tool["function"]["name"] for tool in tools}, names, unknown)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += input_messages(items, names, sees)
    fields = {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": tool_choice(body.tool_choice, names),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": body.text.format if body.text else None,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "stop": body.stop,
        "stop_in_thinking": body.stop_in_thinking,
        "cache": body.cache,
    }
    return chat_body(fields, names_of(body, NAMES), body.passed_on), names, unknown


def response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Chat completions puts a schema one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form.keys() - {"type"}}}


def input_messages(items: list[dict[str, Any]], names: ToolNames, sees: bool = False) -> list[Message]:
    """Reasoning, words and calls that follow one another were one answer, and become one message again. Items that say
    nothing here are left out."""
    messages: list[Message] = []
    paired = called_and_answered(items)
    for index, item in enumerate(items):
        path = f"input[{index}]"
        ran = isinstance(call_id := item.get("call_id"), str) and call_id in paired  # by the client
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                if sees:
                    refuse_images(item.get("content"), f"{path}.content", "assistant")
                _answer(messages)["content"].append(content_text(item.get("content"), f"{path}.content"))
            case "message":
                messages.append(said(item, path, index == len(items) - 1, sees))
            case "reasoning":
                if text := reasoning_text(item, path):
                    _answer(messages).setdefault("reasoning_content", []).append(text)
            case "function_call" | "custom_tool_call" as kind:
                _answer(messages).setdefault("tool_calls", []).append(call_object(item, kind, names))
            case "function_call_output" | "custom_tool_call_output":
                messages.append({"role": "tool", "content": output_of(item, path, sees)})
            case str(kind) if ran and kind.endswith("_call"):
                called = {"call_id": call_id, "name": kind.removesuffix("_call"), "arguments": payload(item)}
                _answer(messages).setdefault("tool_calls", []).append(call_object(called, kind, names))
            case str(kind) if ran and kind.endswith("_output"):
                messages.append({"role": "tool", "content": output_of(item, path, sees)})
            case "item_reference":
                words = f"{path} is an item_reference: nothing is stored here; send the item itself (store: false)"
                raise RequestRefused(words, param=path)
            case "additional_tools":
                pass
            case kind:
                left_out(str(kind))
    for message in messages:
        if message["role"] == "assistant":
            message |= {name: "".join(message[name]) for name in PIECES if name in message}
    return messages or ([{"role": "user", "content": ""}] if items else [])


def called_and_answered(items: list[dict[str, Any]]) -> set[str]:
    """Ids of calls whose results stand in the input as well."""
    named = [(str(item.get("type")), call_id) for item in items if isinstance(call_id := item.get("call_id"), str)]
    calls = {call_id for kind, call_id in named if kind.endswith("_call")}
    return calls & {call_id for kind, call_id in named if kind.endswith("_output")}


def said(item: dict[str, Any], path: str, last: bool, sees: bool = False) -> Message:
    """A message of anyone but the model. Raises RequestRefused for roles that are not known."""
    role = string(item, "role", path)
    if role not in ROLES:
        raise RequestRefused(f"{path}.role is {role!r}, which is not known", param=f"{path}.role")
    where = f"{path}.content"
    if sees and role == "user":
        return {"role": role, "content": content_with_images(item.get("content"), where, now=last, joint="\n")}
    if sees:
        refuse_images(item.get("content"), where, role)
    return {"role": role, "content": content_text(item.get("content"), where, now=last and role == "user", joint="\n")}


def _answer(messages: list[Message]) -> Message:
    """The open message of the assistant, whose texts are pieces yet: growing strings would copy them each time."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def reasoning_text(item: dict[str, Any], path: str) -> str:
    """The text itself, or what the client kept of it; encrypted content was written elsewhere and says nothing here."""
    content = content_text(item.get("content"), f"{path}.content")
    return content or content_text(item.get("summary"), f"{path}.summary", joint="\n")


def call_object(item: dict[str, Any], kind: str, names: ToolNames) -> dict[str, Any]:
    arguments = {"input": item.get("input")} if kind == "custom_tool_call" else item.get("arguments")
    name, namespace = item.get("name"), item.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = names.join(namespace, name)
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def payload(item: dict[str, Any]) -> Any:
    return next((item[name] for name in PAYLOADS if item.get(name) is not None), None)


def output_of(item: dict[str, Any], path: str, sees: bool = False) -> Content:
    """What a call gave: its text, with images if they are seen, the tools that it has loaded, or how it ended."""
    output = item.get("output")
    if output is None and isinstance(tools := item.get("tools"), list):
        output = "\n".join(f"Tool: {tool.get('name')}" for tool in tools if isinstance(tool, dict))
    read = content_with_images if sees else content_text
    return read(output, f"{path}.output", joint="\n") or str(item.get("status") or "")
