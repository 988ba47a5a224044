"""Odd message lists: a documented rendering, or a 400 that names the field where it is asked now."""

import json

import pytest

from kakera.chat import parts
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
    ],
)
def test_what_can_not_be_rendered_is_refused_by_name(messages, param):
    with pytest.raises(RequestRefused) as refusal:
        normalise(messages)
    assert refusal.value.status == 400 and refusal.value.param == param


def called(arguments) -> dict:
    """What a template is given of a call in a history."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message, _] = normalise([{"role": "assistant", "content": None, "tool_calls": [call]}, USER])
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, json.dumps('{"a": 1}'), ' {"a": 1}\n'])
def test_arguments_as_text_and_as_mapping_are_the_same(arguments):
    assert called(arguments) == {"a": 1}


@pytest.mark.parametrize("arguments", ["", " ", None, "null", "{}", {}, [], "[]"])
def test_empty_arguments_are_an_empty_mapping(arguments):
    assert called(arguments) == {}


def test_a_raw_line_break_in_a_string_is_one():
    assert called('{"text": "a\nb\tc"}') == {"text": "a\nb\tc"}


WHOLE = '{"city": "Os\\"lo", "days": [1, {"a": null}]}'
NEST = '{"a": ' * 300 + "1" + "}" * 300


@pytest.mark.parametrize(
    "text", [*(WHOLE[:n] for n in range(1, len(WHOLE))), '{"a": 1}{"b": 2}', "9" * 5000, "[" * 100_000, NEST]
)
def test_arguments_that_are_no_object_are_shown_as_they_stand(text):
    assert called(text) == {"arguments": text}


@pytest.mark.parametrize("value", [5, 0.5, True, [1, 2], ["a"]])
def test_values_that_are_no_object_stay_values(value):
    assert called(value) == {"arguments": value}


def test_arguments_nested_too_deeply_for_a_template_are_text():
    assert json.loads(called(json.loads(NEST))["arguments"]) == json.loads(NEST)


def test_a_call_of_nothing_is_left_out():
    calls = [{}, None, 5, {"function": None}, {"function": {"name": 5}}, {"type": "custom", "custom": {}}]
    [message, _] = normalise([{"role": "assistant", "content": "a", "tool_calls": calls}, USER])
    assert message == said("assistant", "a")


def test_custom_calls_have_their_text_as_input():
    call = {"id": "x", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    [message, _] = normalise([{"role": "assistant", "tool_calls": [call]}, USER])
    assert message["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}


def test_functions_of_before_there_were_tools_are_translated():
    asked = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    [call, result] = normalise([asked, {"role": "function", "name": "f", "content": "done"}])
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert result == said("tool", "done")


MEDIA = [{"type": kind} for kind in ("image_url", "input_audio", "file", "video_url", "document")]


@pytest.mark.parametrize("part", [*MEDIA, {"type": "wizardry"}, {}, 5, None], ids=str)
@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
def test_parts_that_can_not_be_read_are_told_to_the_model_in_a_history(role, part):
    [message, _] = normalise([{"role": role, "content": ["a", part, {"type": "text", "text": "b"}]}, USER])
    assert message["content"].startswith("a[") and message["content"].endswith(
        " left out: only text can be read here]b"
    )


@pytest.mark.parametrize("part", MEDIA, ids=str)
def test_media_that_are_asked_about_now_are_refused(part):
    asked = [said("assistant", "a"), {"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    with pytest.raises(RequestRefused, match=r"reads (text only|no documents, audio or video)$") as refusal:
        normalise(asked)
    assert refusal.value.param == "messages[1].content[1]"
    assert len(normalise([*asked, USER])) == 3


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "refusal", "refusal": "No."}, "No."),
        ({"type": "text", "text": None}, ""),
        ({"type": "tool_reference", "tool_name": "TaskStop"}, "Tool: TaskStop"),
        (
            {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]},
            "t\nu\nfound",
        ),
        ({"type": "document", "title": "t", "source": {"type": "text", "data": "words"}}, "t\nwords"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "w"}]}}, "w"),
        ({"stdout": "out\n", "stderr": "err", "outcome": {"type": "exit", "exit_code": 1}}, "out\nerr"),
    ],
    ids=str,
)
def test_text_that_stands_deeper_in_a_part_is_read(part, text):
    assert normalise([{"role": "tool", "content": [part]}, USER])[0] == said("tool", text)


def test_results_of_tools_as_objects_are_shown_as_json():
    assert normalise([{"role": "tool", "content": {"days": [1, "ü"]}}, USER])[0] == said("tool", '{"days": [1, "ü"]}')
    assert normalise([{"role": "tool", "content": {"type": "text", "text": "a"}}, USER])[0] == said("tool", "a")


def test_a_type_is_logged_once_whatever_it_says(caplog, monkeypatch):
    monkeypatch.setattr(parts, "_logged", set())
    for kind in ("new\nline" * 50, "new\nline" * 50, *map(str, range(1000))):
        normalise([{"role": "assistant", "content": [{"type": kind}]}, USER])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == parts.MOST_NAMES and all("\n" not in line and len(line) < 250 for line in lines)
