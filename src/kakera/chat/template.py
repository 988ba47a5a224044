"""Chat templates: messages and tools to prompt tokens, and the places where messages end.

The template is run as transformers runs it. Texts that spell a token of the tokenizer carry a mask character through
the rendering; whatever spelling is found without the mask was written by the template itself and is the token.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kakera.chat.messages import normalise
from kakera.chat.sandbox import Sandbox
from kakera.chat.template_files import DEFAULT, WITH_TOOLS, find_templates
from kakera.contract.request import Boundary, packed
from kakera.errors import CheckpointError, RequestRefused
from kakera.text.tokenizer import AddedToken, Tokenizer, Watch, after, unwatched

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


class ChatTemplate:
    """One model's template, bound to its tokenizer. Thread-safe."""

    def __init__(self, source: str, tokenizer: Tokenizer, ends: Collection[int] = (), with_tools: str | None = None):
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

    @staticmethod
    def load(directory: Path, tokenizer: Tokenizer, ends: Collection[int] = ()) -> ChatTemplate | None:
        """None of a base model. Raises CheckpointError."""
        found = find_templates(directory)
        return ChatTemplate(found[DEFAULT], tokenizer, ends, found.get(WITH_TOOLS)) if found else None

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        watch: Watch = unwatched,
    ) -> Prompt:
        """Render and tokenise; takes half a second for 200K new tokens, so keep it off the event loop.

        `variables` are the template's own, such as enable_thinking. `watch` may end the work early. Raises
        RequestRefused for messages that the template does not accept.
        """
        try:
            return self._prompt(normalise(messages, self._late_system), tools, variables, watch)
        except RecursionError:
            raise RequestRefused("the messages or tools are nested too deeply", param="messages") from None

    def _prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any] | None,
        watch: Watch,
    ) -> Prompt:
        mask = _unused_mask(messages, tools, variables)
        masked = [self._masked(m, mask, control_only=m["role"] == "assistant") for m in messages]
        text = self._render_history(masked, self._masked(tools, mask), self._masked(variables or {}, mask))
        tokens, ends = self._tokenise(text, mask, watch)
        boundaries = [Boundary(end, "message") for end in ends if end < len(tokens)]
        if boundaries and (tools or messages[0]["role"] == "system"):
            boundaries[0] = Boundary(boundaries[0].position, "system")
        return Prompt(tokens, (*boundaries, Boundary(len(tokens), "prompt")), self._opens_thinking(text))

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

    def _masked(self, value: Any, mask: str, control_only: bool = False) -> Any:
        if isinstance(value, str):
            return self._tokenizer.hide_markers(value, mask, control_only)
        if isinstance(value, dict):
            return {self._masked(k, mask, control_only): self._masked(v, mask, control_only) for k, v in value.items()}
        if isinstance(value, list):
            return [self._masked(item, mask, control_only) for item in value]
        return value

    def _tokenise(self, text: str, mask: str, watch: Watch) -> tuple[array[int], list[int]]:
        """Token ids, and the positions after each end-of-turn token and the white space that belongs to it."""
        watch(self._tokenizer.least_tokens(text, mask))
        tokens = packed(())
        ends: list[int] = []
        turn_ended = False
        for piece in self._tokenizer.split(text):
            if isinstance(piece, AddedToken):
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
        return tokens, ends

    def _opens_thinking(self, text: str) -> bool:
        tail = text[max([0, *(text.rfind(end.text) for end in self._ends)]) :]
        return tail.rfind("<think>") > tail.rfind("</think>")


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
