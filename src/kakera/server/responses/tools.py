"""Tools of a Responses body as functions, under names that the model can call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from kakera.chat.parts import left_out
from kakera.errors import RequestRefused
from kakera.server.agents.translate import string
from kakera.server.responses.schema import ResponseTool

TOOL_LISTS = ("additional_tools", "tool_search_output")  # items that declare functions on the way


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


def function_tools(
    tools: list[ResponseTool], path: str, namespace: str | None, names: ToolNames, unknown: list[str]
) -> list[dict[str, Any]]:
    """Coding agents send tools of OpenAI's own along and do without them, so those are left out and not refused."""
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        at = f"{path}[{index}]"
        if tool.type not in ("function", "namespace"):
            unknown.append(tool.type)
        elif not tool.name:
            raise RequestRefused(f"{at}.name is missing", param=f"{at}.name")
        elif tool.type == "namespace":
            functions += function_tools(tool.tools or [], f"{at}.tools", tool.name, names, unknown)
        else:
            function: dict[str, Any] = {"name": names.join(namespace, tool.name), "parameters": tool.parameters or {}}
            given = {"description": tool.description, "strict": tool.strict or None}  # false would only cost tokens
            function |= {name: value for name, value in given.items() if value is not None}
            functions.append({"type": "function", "function": function})
    return functions


def later_tools(
    items: list[dict[str, Any]], declared: set[str], names: ToolNames, unknown: list[str]
) -> list[dict[str, Any]]:
    """Functions that items of the history declare, each name once: agents load tools on the way."""
    functions: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") not in TOOL_LISTS or not isinstance(tools := item.get("tools"), list):
            continue
        for tool in tools:
            try:
                found = function_tools([ResponseTool.model_validate(tool)], "tools", None, names, unknown)
            except (ValidationError, RequestRefused):
                left_out("tool declared without a type or a name")
                continue
            functions += [f for f in found if f["function"]["name"] not in declared]
            declared |= {f["function"]["name"] for f in found}
    return functions


def tool_choice(choice: str | dict[str, Any] | None, names: ToolNames) -> Any:
    """As chat completions writes it. A word or a function that is not known is left for the chat path to refuse."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = choice.get("type")
        message = f"tool_choice of type {kind!r} is not supported; send none, auto, required or a function"
        raise RequestRefused(message, param="tool_choice")
    namespace = None if choice.get("namespace") is None else string(choice, "namespace", "tool_choice")
    name = names.join(namespace, string(choice, "name", "tool_choice"))
    return {"type": "function", "function": {"name": name}}
