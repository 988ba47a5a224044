"""Bodies that /docs offers to try, small ones of every kind. A test sends each of them."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
FORM = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["legs"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}

CHAT: list[dict[str, Any]] = [
    {"messages": ASKED, "max_tokens": 16},
    {"messages": ASKED, "max_tokens": 16, "enable_thinking": False, "n": 2, "logprobs": True, "top_logprobs": 2},
    {"messages": ASKED, "max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}},
    {
        "messages": ASKED,
        "enable_thinking": False,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    {
        "messages": ASKED,
        "enable_thinking": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": FORM}},
    },
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Once", "max_tokens": 8},
    {"prompt": ["Once", "upon"], "max_tokens": 8, "echo": True, "logprobs": 2},
    {"prompt": [5, 6, 7], "max_tokens": 8, "stream": True},
]
MESSAGES: list[dict[str, Any]] = [
    {"messages": ASKED, "max_tokens": 16},
    {"messages": ASKED, "max_tokens": 16, "thinking": {"type": "enabled", "budget_tokens": 4}, "stream": True},
    {
        "messages": ASKED,
        "max_tokens": 200,
        "tools": [{"name": "weather", "input_schema": PARAMETERS, "strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
]
COUNT: list[dict[str, Any]] = [{"messages": ASKED, "system": "Be brief."}]
RESPONSES: list[dict[str, Any]] = [
    {"input": "Hi", "max_output_tokens": 16},
    {"input": ASKED, "max_output_tokens": 16, "reasoning": {"effort": "none"}, "stream": True},
    {
        "input": "Hi",
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    {
        "input": "Hi",
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "json_schema", "name": "animal", "schema": FORM}},
    },
]
TOKENIZE: list[dict[str, Any]] = [{"prompt": "Hi"}, {"messages": ASKED}]
DETOKENIZE: list[dict[str, Any]] = [{"tokens": [5, 6, 7]}]


def shown(examples: list[dict[str, Any]]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": examples})  # type: ignore[dict-item]  # JSON all through
