"""Which tools the model is shown."""

import pytest
from call_texts import tool

from kakera.chat.tool_choice import select_tools
from kakera.errors import RequestRefused

TOOLS = [tool("f"), tool("g")]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["f", "g"]),
        ("auto", ["f", "g"]),
        ("required", ["f", "g"]),
        ("none", []),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
    ],
)
def test_tool_choice_decides_which_tools_are_shown(choice, names):
    assert [t["function"]["name"] for t in select_tools(TOOLS, choice)] == names


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "h"}}, {"type": "function"}, "maybe"])
def test_a_wrong_tool_choice_is_refused(choice):
    with pytest.raises(RequestRefused) as refusal:
        select_tools(TOOLS, choice)
    assert refusal.value.param == "tool_choice"


def test_required_needs_tools():
    with pytest.raises(RequestRefused):
        select_tools(None, "required")
