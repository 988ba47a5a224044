"""Odd message lists: a documented rendering or a 400 that names the field."""

import pytest

from kakera.chat.messages import normalise
from kakera.errors import RequestRefused

USER = {"role": "user", "content": "hi"}


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_system_and_developer_messages_at_the_start_become_one():
    messages = [said("system", "a"), said("developer", ""), said("developer", "b"), USER]
    for late_system in (False, True):
        assert normalise(messages, late_system) == [said("system", "a\n\nb"), USER]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_later_ones_keep_their_place(role):
    messages = [said("system", "a"), USER, said(role, "b"), said(role, ""), said("assistant", "c"), said(role, "d")]
    assert normalise(messages, True) == [
        said("system", "a"),
        USER,
        said("system", "b"),
        said("assistant", "c"),
        said("system", "d"),
    ]
    tagged = [said("user", f"<system-reminder>\n{text}\n</system-reminder>") for text in "bd"]
    assert normalise(messages) == [said("system", "a"), USER, tagged[0], said("assistant", "c"), tagged[1]]
    assert normalise(messages[1:3]) == [USER, tagged[0]], "none is moved to an empty top"


def test_content_null_and_text_parts_become_strings():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalise([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([USER, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        *(
            (
                [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}],
                "messages[0].tool_calls[0].function.arguments",
            )
            for text in ("{", "[1]", "9" * 5000, "[" * 100_000)
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_what_can_not_be_rendered_is_refused_by_name(messages, param):
    with pytest.raises(RequestRefused) as refusal:
        normalise(messages)
    assert refusal.value.status == 400 and refusal.value.param == param


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_as_text_and_as_mapping_are_the_same(arguments):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = normalise([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_empty_arguments_are_an_empty_mapping():
    [message] = normalise([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}
