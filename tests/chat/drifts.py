"""What tests of drifting calls read with: tools, a call as it should be, and the parser fed letter by letter."""

import json

from call_texts import call_text, events, parse, tool

STRING = {"type": "string"}
TOOLS = [
    tool("bash", {"command": STRING}, required=["command"]),
    tool("write", {"path": STRING, "content": STRING, "lines": {"type": "integer"}, "tags": {"type": "array"}},
         required=["path", "content"]),
    tool("stop", {"code": {"type": "integer"}}),
    tool("Stop", {}),
    {"type": "function", "function": {"name": "ping"}},
]  # fmt: skip
LS = ("bash", {"command": "ls"})
HEAD = "<tool_call>\n<function=bash>\n<parameter=command>\nls"
REST = "\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
BASH = call_text("bash", command="ls")


def read(text: str, tools=TOOLS) -> tuple[str, list]:
    """Text and calls with their arguments as values: the same whole, letter by letter, and cut once.

    At every third place; at which depends on the text's length, so that texts of a kind are cut everywhere.
    test_call_fuzz.py cuts anywhere, and several times.
    """
    whole = events([text], tools)
    assert events(list(text), tools) == whole
    for cut in range(1 + len(text) % 3, len(text), 3):
        assert events([text[:cut], text[cut:]], tools) == whole, text[:cut]
    words, calls = parse([text], tools)
    return words, [(name, json.loads(arguments)) for name, arguments in calls]
