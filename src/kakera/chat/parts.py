"""Parts of a message's content as text, in the spelling of every dialect.

What is asked now and can not be read is refused by name. What stands in a history can not be changed by the client any
more, so a refusal would be the answer to each later turn: there the model is told in a line what it does not see.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from kakera.errors import RequestRefused

log = logging.getLogger(__name__)
NAME_LETTERS = 100  # of a type that a client invents, in a log line or a prompt
MOST_NAMES = 256  # that are logged, each once; who invents types must not fill the log

TEXT = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}  # fmt: skip
IMAGES = ("image_url", "input_image", "image", "computer_screenshot")
MEDIA = frozenset(
    (
        *(*IMAGES, "document", "file", "input_file"),
        *("audio", "audio_url", "input_audio", "video", "video_url", "input_video"),
    )
)


def content_text(content: Any, path: str, *, now: bool = False, joint: str = "") -> str:
    """The text of a string, of null, or of a list of parts. `now`: it is what the user asks with this request; then
    RequestRefused (400) names the part that can not be read."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return joint.join(part_text(part, f"{path}[{i}]", now=now) for i, part in enumerate(content))
    if now:
        raise RequestRefused(f"{path} must be a string, null or a list of parts", param=path)
    if isinstance(content, dict) and "type" in content:
        return part_text(content, path)
    return as_json(content)  # a tool's result as it came


def part_text(part: Any, path: str, *, now: bool = False) -> str:
    """As `content_text`, of one part."""
    if isinstance(part, str):
        return part
    kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
    if kind in TEXT:
        if isinstance(text := part.get(TEXT[kind]), str):
            return text
        if now:
            raise RequestRefused(f"{path}.{TEXT[kind]} must be a string", param=f"{path}.{TEXT[kind]}")
        return ""
    if isinstance(part, dict) and (text := _reference(kind, part)) is not None:
        return text
    if kind in MEDIA and now:
        reads = "text only" if kind in IMAGES else "no documents, audio or video"  # a model that sees may be asked
        raise RequestRefused(f"{path} has type {kind!r}; this model reads {reads}", param=path)
    return left_out(kind)


def _reference(kind: str, part: dict[str, Any]) -> str | None:
    """Text that stands deeper in a part: documents of text, what a search has found, tools that it has loaded, what a
    command has printed."""
    match kind:
        case "document" if isinstance(source := part.get("source"), dict) and source.get("type") in ("text", "content"):
            found = _inner(source.get("data") or source.get("content"))
        case "search_result":
            found = _inner(part.get("content"))
        case "tool_reference":
            return f"Tool: {part.get('tool_name')}"
        case _ if "stdout" in part or "stderr" in part:
            return "".join(text for name in ("stdout", "stderr") if isinstance(text := part.get(name), str))
        case _:
            return None
    head = [text for name in ("title", "source", "context") if isinstance(text := part.get(name), str) and text]
    return "\n".join([*head, *found])


def _inner(content: Any) -> list[str]:
    """Texts of a part within a part, and no deeper: who nests them must not exhaust the stack."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return left_out("value that is nested too deeply")


_logged: set[str] = set()


def left_out(kind: str) -> str:
    """Logs once a type that something in a history has no place in a prompt; returns the line that tells the model."""
    kind = kind[:NAME_LETTERS]
    if kind not in _logged and len(_logged) < MOST_NAMES:
        _logged.add(kind)
        log.warning("a history has something of type %r, which can not be read here and is left out", kind)
    return f"[{kind} left out: only text can be read here]"
