"""Chat messages as clients send them, made uniform: what every template can rely on.

After `normalise`: system messages at the start are one, later ones stand where the client put them, every content is a
string, every tool call's arguments are a mapping. What can not be served is refused with the path of the field.
"""

from __future__ import annotations

from typing import Any

from kakera.errors import RequestRefused
from kakera.text.json_size import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM = ("system", "developer")
TEXT_PARTS = ("text", "input_text", "output_text")


def normalise(messages: list[dict[str, Any]], late_system: bool = False) -> list[dict[str, Any]]:
    """`late_system`: the template knows system messages behind others; without that they become a user's, with a tag.

    They keep their place either way: moved to the top, a note that an agent adds on its way would make the whole
    prompt new, which is minutes of prefill where the cache could have served it, and it would speak of what comes next
    before anything was said. Raises RequestRefused (400, `param` set) for roles, parts and arguments that can not be
    rendered.
    """
    if not messages:
        raise RequestRefused("messages is empty; send at least one message", param="messages")
    system: list[str] = []
    others: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise RequestRefused(f"{path}.role is {role!r}; known roles: {', '.join(ROLES)}", param=f"{path}.role")
        content = _text(message.get("content"), f"{path}.content")
        if role not in SYSTEM:
            others.append(_message(message, content, path))
        elif not others:
            system.append(content)
        elif content:
            others.append({"role": "system", "content": content} if late_system else _reminder(content))
    merged = "\n\n".join(part for part in system if part)
    return ([{"role": "system", "content": merged}] if merged else []) + others


def _reminder(content: str) -> dict[str, Any]:
    """Agents' own spelling of a system message on the way."""
    return {"role": "user", "content": f"<system-reminder>\n{content}\n</system-reminder>"}


def _message(message: dict[str, Any], content: str, path: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message["role"], "content": content}
    if message["role"] != "assistant":
        return result
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        result["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{path} must be a string, null or a list of parts", param=path)
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(text := part.get("text"), str):
        return text
    if kind in TEXT_PARTS:
        raise RequestRefused(f"{path}.text must be a string", param=f"{path}.text")
    raise RequestRefused(f"{path} has type {kind!r}; this model reads text only", param=path)


def _call(call: dict[str, Any], path: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{path}.function needs a name", param=f"{path}.function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError of another kind
            raise RequestRefused(
                f"{path}: arguments are not JSON ({error})", param=f"{path}.function.arguments"
            ) from None
    if not isinstance(arguments, dict):
        raise RequestRefused(f"{path}: arguments must be a JSON object", param=f"{path}.function.arguments")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
