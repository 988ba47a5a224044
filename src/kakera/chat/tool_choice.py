"""Which tools the model is shown: what `tool_choice` asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kakera.errors import RequestRefused


def select_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> list[dict[str, Any]]:
    """The tools that the model is shown: all, none, or the named one. Raises RequestRefused for a wrong choice, and for
    a name that two of them have."""
    tools = tools or []
    if twice := [name for name, count in Counter(tool["function"]["name"] for tool in tools).items() if count > 1]:
        raise RequestRefused(f"several tools are named {twice[0]!r}; a call could mean any of them", param="tools")
    if choice == "none":
        return []
    if choice in (None, "auto", "required"):
        if choice == "required" and not tools:
            raise RequestRefused("tool_choice is 'required' but no tools are given", param="tool_choice")
        return tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise RequestRefused(
            "tool_choice must be none, auto, required or {'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise RequestRefused(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return named
