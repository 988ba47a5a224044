"""A Responses body as a chat body: input items to messages, tools to functions under names the model can call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kakera.errors import RequestRefused
from kakera.server.agents.translate import chat_body, kind_of, names_of, string, text_of
from kakera.server.openai.schema import ChatBody
from kakera.server.responses.schema import ResponsesBody, ResponseTool
from kakera.text.json_size import read_json

TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
PIECES = ("content", "reasoning_content")
Message = dict[str, Any]


@dataclass
class ToolNames:
    """The model calls functions by one name; clients group them in namespaces, which calls must name again."""

    _split: dict[str, tuple[str, str]] = field(default_factory=dict)

    def join(self, namespace: str | None, name: str) -> str:
        if not namespace:
            return name
        joined = namespace + ("" if namespace.endswith("_") else "__") + name
        self._split[joined] = (namespace, name)
        return joined

    def fields(self, joined: str) -> dict[str, str]:
        """A call's `name`, and its `namespace` if it has one."""
        if joined not in self._split:
            return {"name": joined}
        namespace, name = self._split[joined]
        return {"name": name, "namespace": namespace}


def responses_chat(body: ResponsesBody) -> tuple[ChatBody, ToolNames, list[str]]:
    """Chat body, names, and the types of tools that were left out. Raises RequestRefused (400) naming the field."""
    names = ToolNames()
    left_out: list[str] = []
    tools = function_tools(body.tools or [], "tools", None, names, left_out)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += input_messages(body.input, names)
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
        "cache": body.cache,
    }
    return chat_body(fields, names_of(body, NAMES), body.passed_on), names, left_out


def function_tools(
    tools: list[ResponseTool], path: str, namespace: str | None, names: ToolNames, left_out: list[str]
) -> list[dict[str, Any]]:
    """Coding agents send tools of OpenAI's own along and do without them, so those are left out and not refused."""
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        at = f"{path}[{index}]"
        if tool.type not in ("function", "namespace"):
            left_out.append(tool.type)
        elif not tool.name:
            raise RequestRefused(f"{at}.name is missing", param=f"{at}.name")
        elif tool.type == "namespace":
            functions += function_tools(tool.tools or [], f"{at}.tools", tool.name, names, left_out)
        else:
            function: dict[str, Any] = {"name": names.join(namespace, tool.name), "parameters": tool.parameters or {}}
            given = {"description": tool.description, "strict": tool.strict or None}  # false would only cost tokens
            function |= {name: value for name, value in given.items() if value is not None}
            functions.append({"type": "function", "function": function})
    return functions


def tool_choice(choice: str | dict[str, Any] | None, names: ToolNames) -> Any:
    """As chat completions writes it. A word or a function that is not known is left for the chat path to refuse."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = choice.get("type")
        message = f"tool_choice of type {kind!r} is not supported; send none, auto, required or a function"
        raise RequestRefused(message, param="tool_choice")
    name = names.join(namespace_of(choice, "tool_choice"), string(choice, "name", "tool_choice"))
    return {"type": "function", "function": {"name": name}}


def input_messages(items: str | list[dict[str, Any]], names: ToolNames) -> list[Message]:
    """Reasoning, words and calls that follow one another were one answer, and become one message again."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = "message" if item.get("type") is None else kind_of(item, path)
        match kind:
            case "message" if item.get("role") == "assistant":
                _answer(messages)["content"].append(text_of(item.get("content"), f"{path}.content", TEXT))
            case "message":
                role = string(item, "role", path)
                if role not in ("user", "system", "developer"):
                    raise RequestRefused(f"{path}.role is {role!r}, which is not known", param=f"{path}.role")
                content = text_of(item.get("content"), f"{path}.content", TEXT, "\n")
                messages.append({"role": role, "content": content})
            case "reasoning":
                if text := reasoning_text(item, path):
                    _answer(messages).setdefault("reasoning_content", []).append(text)
            case "function_call" | "custom_tool_call":
                _answer(messages).setdefault("tool_calls", []).append(call_object(item, path, names))
            case "function_call_output" | "custom_tool_call_output":
                content = text_of(item.get("output"), f"{path}.output", TEXT, "\n")
                messages.append({"role": "tool", "tool_call_id": string(item, "call_id", path), "content": content})
            case _:
                raise RequestRefused(
                    f"{path} has type {kind!r}, which can not be read here; known types: message, reasoning, "
                    "function_call, function_call_output, custom_tool_call, custom_tool_call_output",
                    param=path,
                )
    for message in messages:
        if message["role"] == "assistant":
            message |= {name: "".join(message[name]) for name in PIECES if name in message}
    return messages


def _answer(messages: list[Message]) -> Message:
    """The open message of the assistant, whose texts are pieces yet: growing strings would copy them each time."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def reasoning_text(item: dict[str, Any], path: str) -> str:
    """The text itself, or what the client kept of it; encrypted content was written elsewhere and says nothing here."""
    content = text_of(item.get("content"), f"{path}.content", TEXT)
    return content or text_of(item.get("summary"), f"{path}.summary", TEXT, "\n")


def call_object(item: dict[str, Any], path: str, names: ToolNames) -> dict[str, Any]:
    if item["type"] == "custom_tool_call":  # its input is free text
        arguments: Any = {"input": string(item, "input", path)}
    else:
        try:
            arguments = read_json(string(item, "arguments", path) or "{}")
        except (ValueError, RecursionError) as error:
            message = f"{path}.arguments is not JSON ({error})"
            raise RequestRefused(message, param=f"{path}.arguments") from None
        if not isinstance(arguments, dict):
            raise RequestRefused(f"{path}.arguments must be a JSON object", param=f"{path}.arguments")
    function = {"name": names.join(namespace_of(item, path), string(item, "name", path)), "arguments": arguments}
    return {"id": string(item, "call_id", path), "type": "function", "function": function}


def namespace_of(item: dict[str, Any], path: str) -> str | None:
    return None if item.get("namespace") is None else string(item, "namespace", path)
