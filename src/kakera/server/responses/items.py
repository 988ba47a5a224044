"""Blocks of an answer as output items of a response, and as the events in which they grow."""

from __future__ import annotations

from typing import Any

from kakera.server.agents.blocks import Block, Step
from kakera.server.responses.tools import ToolNames

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
Payload = dict[str, Any]


class Items:
    """`key` makes the ids of one response's items its own."""

    def __init__(self, key: str, names: ToolNames):
        self._key = key
        self._names = names

    def item(self, block: Block, status: str, text: str | None = None) -> Payload:
        """The item with the block's text, or with another one."""
        text = block.text if text is None else text
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            called = self._names.fields(block.name)
            return {**head, "type": "function_call", "call_id": block.id, **called, "arguments": text}
        content = [part(block, text)] if text else []
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def events(self, step: Step, status: str) -> list[Payload]:
        """`status` is the item's when it closes."""
        block = step.block
        at = {"item_id": self._id(block), "output_index": block.index}
        part_at = at if block.kind == "call" else {**at, "content_index": 0}
        if step.what == "grow":
            return [{"type": f"{STEMS[block.kind]}.delta", **part_at, "delta": step.text, **logprobs(block)}]
        if step.what == "open":
            item = self.item(block, "in_progress", text="")
            added = {"type": "response.output_item.added", "output_index": block.index, "item": item}
            if block.kind == "call":
                return [added]
            return [added, {"type": "response.content_part.added", **part_at, "part": part(block, "")}]
        item = self.item(block, status)
        done = {"type": "response.output_item.done", "output_index": block.index, "item": item}
        stem = f"{STEMS[block.kind]}.done"
        if block.kind == "call":
            return [{"type": stem, **part_at, "name": item["name"], "arguments": block.text}, done]
        return [
            {"type": stem, **part_at, "text": block.text, **logprobs(block)},
            {"type": "response.content_part.done", **part_at, "part": part(block, block.text)},
            done,
        ]

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._key}_{block.index}"


STEMS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def part(block: Block, text: str) -> Payload:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def logprobs(block: Block) -> Payload:
    """Clients expect the field with text; there are none to give."""
    return {"logprobs": []} if block.kind == "text" else {}
