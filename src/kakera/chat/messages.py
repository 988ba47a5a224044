"""Chat messages as clients send them, made uniform: what every template can rely on.

After `normalise`: system messages at the start are one, later ones stand where the client put them, every content is a
string, or parts of text and images where it has some and the model sees, every tool call's arguments are a mapping.
What a request asks now and can not have is refused with the path of the field; what stands in its history is read as
well as possible (parts.py).
"""

from __future__ import annotations

from typing import Any

from kakera.chat.images import SEEN_BY, Content, content_with_images, refuse_images
from kakera.chat.parts import as_json, content_text, left_out
from kakera.errors import RequestRefused
from kakera.text.json_size import read_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM = ("system", "developer")
RAW = "arguments"  # the parameter under which the model is shown arguments that are no object
DEEP = 64  # levels of arguments that a template can walk through within Python's recursion limit


def normalise(messages: list[dict[str, Any]], late_system: bool = False, sees: bool = False) -> list[dict[str, Any]]:
    """`sees`: content with images stays a list of parts (`images.py`). `late_system`: the template knows system
    messages behind others; without that they become a user's, with a tag.

    They keep their place either way: moved to the top, a note that an agent adds on its way would make the whole
    prompt new, which is minutes of prefill where the cache could have served it, and it would speak of what comes next
    before anything was said. Raises RequestRefused (400, `param` set) for roles, for parts of a last message of the
    user that can not be rendered, and for images where they have no place.
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
        now = role == "user" and index == len(messages) - 1
        given, where = message.get("content"), f"{path}.content"
        if sees and role in SEEN_BY:
            others.append(_message(message, content_with_images(given, where, now=now)))
            continue
        if sees:
            refuse_images(given, where, role)
        content = content_text(given, where, now=now)
        if role not in SYSTEM:
            others.append(_message(message, content))
        elif not others:
            system.append(content)
        elif content:
            others.append({"role": "system", "content": content} if late_system else _reminder(content))
    merged = "\n\n".join(part for part in system if part)
    return ([{"role": "system", "content": merged}] if merged else []) + others


def _reminder(content: str) -> dict[str, Any]:
    """Agents' own spelling of a system message on the way."""
    return {"role": "user", "content": f"<system-reminder>\n{content}\n</system-reminder>"}


def _message(message: dict[str, Any], content: Content) -> dict[str, Any]:
    role = message["role"]
    result: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content}
    if role != "assistant":
        return result
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        result["reasoning_content"] = reasoning
    given = list(message.get("tool_calls") or ())
    if message.get("function_call"):  # its spelling before there were tools
        given.append({"function": message["function_call"]})
    if calls := [read for call in given if (read := _call(call)) is not None]:
        result["tool_calls"] = calls
    return result


def _call(call: Any) -> dict[str, Any] | None:
    """A call as templates read it; None if it calls nothing."""
    call = call if isinstance(call, dict) else {}
    kind = "custom" if call.get("type") == "custom" else "function"
    called = call.get(kind)
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        left_out("tool call without a name")
        return None
    arguments = {"input": called.get("input")} if kind == "custom" else call_arguments(called.get("arguments"))
    return {"id": call.get("id"), "type": "function", "function": {"name": called["name"], "arguments": arguments}}


def call_arguments(given: Any) -> dict[str, Any]:
    """Arguments of a call in a history as a mapping. A token limit or a stop string may have cut them, and clients
    write them as text, as JSON within JSON, as null; what is no object is shown to the model as it stands."""
    read = given
    for _ in range(2):
        if isinstance(read, str):
            try:
                read = read_json(read) if read.strip() else None
            except (ValueError, RecursionError):  # a number of 5,000 digits is a ValueError of another kind
                break
    if read is None or read == []:
        return {}
    deep = not _within(read, DEEP)
    if isinstance(read, dict) and not deep:
        return read
    if isinstance(given, str) or not deep:
        return {RAW: given}
    return {RAW: as_json(given)}


def _within(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in at most so many levels."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_within(item, levels - 1) for item in inner)
