"""Parts of a message's content as text, in the spelling of every dialect.

What is asked now and can not be read is refused by name. What stands in a history can not be changed by the client any
more, so a refusal would be the answer to each later turn: there the model is told in a line what it does not see.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from kakera.errors import RequestRefused

log = logging.getLogger(__name__)
NAME_LETTERS = 100  # of a type that a client invents, in a log line or a prompt

TEXT = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}  # fmt: skip
MEDIA = frozenset(
    (
        *("image", "image_url", "input_image", "computer_screenshot", "document", "file", "input_file"),
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
    return part_text(content, path)


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
        raise RequestRefused(f"{path} has type {kind!r}; this model reads text only", param=path)
    return left_out(kind)


def _reference(kind: str, part: dict[str, Any]) -> str | None:
    """Text that stands deeper in a part: documents of text, what a search has found, tools that it has loaded, what a
    command has printed."""
    match kind:
        case "document" if isinstance(source := part.get("source"), dict) and source.get("type") in ("text", "content"):
            found = content_text(source.get("data") or source.get("content"), "source", joint="\n")
        case "search_result":
            found = content_text(part.get("content"), "content", joint="\n")
        case "tool_reference":
            return f"Tool: {part.get('tool_name')}"
        case _ if "stdout" in part or "stderr" in part:
            return "".join(text for name in ("stdout", "stderr") if isinstance(text := part.get(name), str))
        case _:
            return None
    head = (part.get(name) for name in ("title", "source", "context"))
    return "\n".join([*(text for text in head if isinstance(text, str) and text), found])


@lru_cache(maxsize=256)  # and so logged once a type
def left_out(kind: str) -> str:
    """Logs that a history's item or part has no place in a prompt; returns the line that tells the model."""
    kind = kind[:NAME_LETTERS]
    log.warning("a history has something of type %r, which can not be read here and is left out", kind)
    return f"[{kind} left out: only text can be read here]"
