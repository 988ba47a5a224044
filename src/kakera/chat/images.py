"""Images among a message's parts, in the spelling of every dialect, and the pictures that they are.

A part that is an image becomes {"type": "image", "url", "low", "at"}: templates look at the type, `picture_of` at the
rest, and `at` is the part's path in the body that the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from kakera.chat.parts import IMAGES, content_text, part_text
from kakera.errors import RequestRefused
from kakera.vision.picture import Picture

Sight = Callable[[str, bool], Picture]  # of an image's URL, and whether little of it is wanted
Content = str | list[dict[str, Any]]

SEEN_BY = ("user", "tool", "function")  # roles whose words may hold images
MOST_IMAGES = 64  # of a request: each costs tokens anyway


def content_with_images(content: Any, path: str, *, now: bool = False, joint: str = "") -> Content:
    """As `content_text`, where images stay parts and texts between them are one part each. Raises RequestRefused for
    an image in no form that is read."""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list) or not any(is_image(part) for part in parts):
        return content_text(content, path, now=now, joint=joint)
    read: list[str | dict[str, Any]] = []
    for i, part in enumerate(parts):
        at = f"{path}[{i}]" if parts is content else path
        read.append(image_part(part, at) if is_image(part) else part_text(part, at, now=now))
    return joined(read, joint)


def joined(parts: Sequence[str | dict[str, Any]], joint: str) -> Content:
    """Texts, and images as `image_part` gives them: texts alone as one, else texts between images as one part each."""
    found: list[dict[str, Any]] = []
    for images, group in groupby(parts, lambda part: isinstance(part, dict)):
        if images:
            found += [part for part in group if isinstance(part, dict)]
        elif text := joint.join(part for part in group if isinstance(part, str)):
            found.append({"type": "text", "text": text})
    if not any(part["type"] == "image" for part in found):
        return found[0]["text"] if found else ""
    return found


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGES


def image_part(part: dict[str, Any], path: str) -> dict[str, Any]:
    """OpenAI's image_url, as an object or a string, and input_image; Anthropic's image with its source; an image with
    its `url`, or its data URL as `image`. Raises RequestRefused naming what is there instead."""
    if _is_read(part):  # by a dialect that became a chat
        return part
    told = part.get("image_url", part.get("source", part.get("image", part.get("url"))))
    detail = part.get("detail")
    if isinstance(told, dict):
        detail = told.get("detail", detail)
        kind = told.get("type")
        if kind == "base64":
            told = f"data:;base64,{told.get('data')}" if isinstance(told.get("data"), str) else None
        elif kind in (None, "url"):
            told = told.get("url")
        else:
            raise RequestRefused(f"{path}.source has type {kind!r}; send base64 data", param=path)
    if not isinstance(told, str):
        stored = " (files are not kept here: send the image as a data URL)" if "file_id" in part else ""
        raise RequestRefused(f"{path} has type {part['type']!r} and holds no image{stored}", param=path)
    if detail not in (None, "auto", "low", "high", "original"):
        raise RequestRefused(f"{path}: detail is {str(detail)[:60]!r}; send auto, low or high", param=path)
    return {"type": "image", "url": told, "low": detail == "low", "at": path}


def _is_read(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "image", "url": str(), "low": bool(), "at": str(), **rest}:
            return not rest
    return False


def refuse_images(content: Any, path: str, role: str) -> None:
    """Raise RequestRefused for an image where the template has no place for one."""
    for i, part in enumerate(content if isinstance(content, list) else []):
        if is_image(part):
            at = f"{path}[{i}]"
            raise RequestRefused(f"{at} is an image in a message of the {role}: users and tools send them", param=at)


def images_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of messages made uniform, in their order. Raises RequestRefused for too many."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    found = [part for parts in contents for part in parts if part["type"] == "image"]
    if len(found) > MOST_IMAGES:
        at = found[MOST_IMAGES]["at"]
        raise RequestRefused(f"{at} is image {MOST_IMAGES + 1}; a request may have {MOST_IMAGES}", param=at)
    return found


def picture_of(part: dict[str, Any], sight: Sight) -> Picture:
    """Raises RequestRefused naming the part: an image that can not be read is never passed over, since an answer
    without it looks right."""
    try:
        return sight(part["url"], part["low"])
    except RequestRefused as error:
        code = "invalid_image" if error.status == 400 else error.code
        raise RequestRefused(f"{part['at']}: {error}", status=error.status, code=code, param=part["at"]) from None
