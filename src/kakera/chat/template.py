"""Chat templates: messages and tools to prompt tokens, and the places where messages end.

The template is run as transformers runs it. Texts that spell a token of the tokenizer carry a mask character through
the rendering; whatever spelling is found without the mask was written by the template itself and is the token.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kakera.chat.images import Sight, images_of, picture_of
from kakera.chat.messages import normalise
from kakera.chat.sandbox import Sandbox
from kakera.chat.template_files import DEFAULT, WITH_TOOLS, find_templates
from kakera.contract.images import ImageSpan
from kakera.contract.request import Boundary, packed
from kakera.errors import CheckpointError, RequestRefused
from kakera.text.tokenizer import AddedToken, Tokenizer, Watch, after, unwatched
from kakera.vision.picture import Picture

# Some templates, Qwen3.5's own among them, refuse a conversation without a user's message, which is what an agent has
# left after it has compacted a long turn.
STAND_IN = {"role": "user", "content": "Continue."}
MASKS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # noncharacters: no text means them


@dataclass(frozen=True)
class Prompt:
    """`opens_thinking`: the prompt ends inside `<think>`, so the answer begins with reasoning."""

    tokens: array[int]  # packed
    boundaries: tuple[Boundary, ...]
    opens_thinking: bool
    images: tuple[ImageSpan, ...] = ()


class ChatTemplate:
    """One model's template, bound to its tokenizer. Thread-safe."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        ends: Collection[int] = (),
        with_tools: str | None = None,
    ):
        """`ends`: end tokens beside the tokenizer's own; `with_tools`: the source for requests with tools, if that is
        another one. Raises CheckpointError if it is not Jinja."""
        self._tokenizer = tokenizer
        self._ends = tuple(t for t in tokenizer.added.values() if t.id in (tokenizer.eos, *ends))
        try:
            self._template = Sandbox().from_string(source)
            self._with_tools = Sandbox().from_string(source if with_tools is None else with_tools)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from None
        self._late_system = self._knows_late_system()
        self._image: AddedToken | None = None  # what stands for an image

    @staticmethod
    def load(directory: Path, tokenizer: Tokenizer, ends: Collection[int] = ()) -> ChatTemplate | None:
        """None of a base model. Raises CheckpointError."""
        found = find_templates(directory)
        return ChatTemplate(found[DEFAULT], tokenizer, ends, found.get(WITH_TOOLS)) if found else None

    def with_images(self, token: int) -> ChatTemplate:
        """The same, where that token stands for an image, if the template has a place for one."""
        image = next((each for each in self._tokenizer.added.values() if each.id == token), None)
        found = copy.copy(self)
        found._image = image if image is not None and self._shows_images(image) else None
        return found

    @property
    def shows_images(self) -> bool:
        return self._image is not None

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        watch: Watch = unwatched,
        sight: Sight | None = None,
    ) -> Prompt:
        """Render and tokenise; takes half a second for 200K new tokens, so keep it off the event loop.

        `variables` are the template's own, such as enable_thinking. `watch` may end the work early. `sight` looks at
        images; without it, or if the template shows none, they are refused or left out as `chat/parts.py` says. Raises
        RequestRefused for messages that the template does not accept.
        """
        sees = sight is not None and self.shows_images
        try:
            uniform = normalise(messages, self._late_system, sees)
            pictures = _pictures(uniform, sight, watch) if sight is not None and sees else []
            return self._prompt(uniform, tools, variables, watch, pictures)
        except RecursionError:
            raise RequestRefused("the messages or tools are nested too deeply", param="messages") from None

    def _prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any] | None,
        watch: Watch,
        pictures: Sequence[Picture],
    ) -> Prompt:
        shown = [_without_sources(m) for m in messages]
        mask = _unused_mask(shown, tools, variables)
        masked = [self._masked(m, mask, control_only=m["role"] == "assistant") for m in shown]
        text = self._render_history(masked, self._masked(tools, mask), self._masked(variables or {}, mask))
        tokens, ends, images = self._tokenise(text, mask, watch, pictures)
        boundaries = [Boundary(end, "message") for end in ends if end < len(tokens)]
        if boundaries and (tools or messages[0]["role"] == "system"):
            boundaries[0] = Boundary(boundaries[0].position, "system")
        return Prompt(tokens, (*boundaries, Boundary(len(tokens), "prompt")), self._opens_thinking(text), images)

    def _render_history(self, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str:
        """With a stand-in for the user behind the system message if the template does not go without. Raises
        RequestRefused with the template's words if that does not help."""
        try:
            return self._render(messages, tools, variables)
        except RequestRefused as refusal:
            head = 1 if messages[0]["role"] == "system" else 0
            try:
                return self._render([*messages[:head], STAND_IN, *messages[head:]], tools, variables)
            except RequestRefused:
                raise refusal from None

    def _render(self, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str:
        known = {"messages": messages, "tools": tools or None, "add_generation_prompt": True}
        try:
            return (self._with_tools if tools else self._template).render({**variables, **known})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            message = f"the chat template does not accept these messages: {error}"
            raise RequestRefused(message, param="messages") from None

    def _knows_late_system(self) -> bool:
        """Whether a system message behind others is rendered, once and in its place, as one. Some templates of this
        family refuse it, some leave it out."""
        said = [{"role": role, "content": f"{role}-{i}"} for i, role in enumerate(("user", "system", "user"))]
        try:
            parts = self._render(said, None, {}).partition("system-1")
        except RequestRefused:
            return False
        return "user-0" in parts[0] and "user-2" in parts[2] and "system" in parts[0].partition("user-0")[2]

    def _shows_images(self, image: AddedToken) -> bool:
        """Whether an image of a user's leaves its token in a prompt, once."""
        said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        try:
            return self._render(said, None, {}).count(image.text) == 1
        except RequestRefused:
            return False

    def _masked(self, value: Any, mask: str, control_only: bool = False) -> Any:
        if isinstance(value, str):
            return self._tokenizer.hide_markers(value, mask, control_only)
        if isinstance(value, dict):
            return {self._masked(k, mask, control_only): self._masked(v, mask, control_only) for k, v in value.items()}
        if isinstance(value, list):
            return [self._masked(item, mask, control_only) for item in value]
        return value

    def _tokenise(
        self, text: str, mask: str, watch: Watch, pictures: Sequence[Picture]
    ) -> tuple[array[int], list[int], tuple[ImageSpan, ...]]:
        """Token ids, the positions after each end-of-turn token and the white space that belongs to it, and where the
        pictures' tokens lie, of which the template has written one each."""
        watch(self._tokenizer.least_tokens(text, mask))
        tokens = packed(())
        ends: list[int] = []
        images: list[ImageSpan] = []
        turn_ended = False
        for piece in self._tokenizer.split(text):
            if self._image is not None and piece is self._image and pictures:
                if len(images) == len(pictures):
                    raise _other_images(len(pictures))
                seen = pictures[len(images)]
                images.append(ImageSpan(len(tokens), seen.rows, seen.columns, seen.digest, seen.pixels))
                tokens.extend([self._image.id] * seen.tokens)
            elif isinstance(piece, AddedToken):
                tokens.append(piece.id)
                turn_ended = piece in self._ends
                if turn_ended:
                    ends.append(len(tokens))
            else:
                watch(len(tokens))
                words = piece.replace(mask, "")
                tokens.extend(self._tokenizer.encode_segment(words, after(len(tokens), watch)))
                if turn_ended and piece.isspace():
                    ends[-1] = len(tokens)
        if len(images) != len(pictures):
            raise _other_images(len(pictures))
        return tokens, ends, tuple(images)

    def _opens_thinking(self, text: str) -> bool:
        tail = text[max([0, *(text.rfind(end.text) for end in self._ends)]) :]
        return tail.rfind("<think>") > tail.rfind("</think>")


def _pictures(messages: list[dict[str, Any]], sight: Sight, watch: Watch) -> list[Picture]:
    """Of all images, in their order; what they have of tokens counts before they are rendered."""
    found: list[Picture] = []
    for part in images_of(messages):
        found.append(picture_of(part, sight))
        watch(sum(picture.tokens for picture in found))
    return found


def _without_sources(message: dict[str, Any]) -> dict[str, Any]:
    """Templates look at a part's type: megabytes of base64 are none of their business."""
    if not isinstance(message["content"], list):
        return message
    parts = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": parts}


def _other_images(sent: int) -> RequestRefused:
    words = f"the chat template shows another number of images than the {sent} that were sent"
    return RequestRefused(words, status=500, code="template_error", param="messages")


def _unused_mask(*values: Any) -> str:
    mask = next((m for m in MASKS if not _contains(values, m)), None)
    if mask is None:
        raise RequestRefused("the messages use all of U+FDD0..U+FDEF, which are not characters", param="messages")
    return mask


def _contains(value: Any, mask: str) -> bool:
    """Whether any text in it, keys included, has the character."""
    if isinstance(value, str):
        return mask in value
    if isinstance(value, dict):
        return any(_contains(key, mask) or _contains(item, mask) for key, item in value.items())
    return isinstance(value, list | tuple) and any(_contains(item, mask) for item in value)
