"""Tool calls: typed by the schema, streamed in pieces that join to JSON, no tags in the content."""

import json

import pytest
from call_texts import call_text, parse, tool
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.chat.tools import CallDelta, ToolCallParser


def arguments(schema, text: str, root: dict | None = None):
    tools = [tool("f", {"x": schema}, **(root or {}))]
    whole = parse([call_text("f", x=text)], tools)
    assert whole == parse(list(call_text("f", x=text)), tools)
    return json.loads(whole[1][0][1])["x"]


NULLABLE_INT = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
NULLABLE_STRING = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, 'say "hi"\n\\ </p> 😀\ttab', 'say "hi"\n\\ </p> 😀\ttab'),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "\n  indented\n", "\n  indented\n"),
        ({"type": "integer"}, "10", 10),
        ({"type": "integer"}, "10.0", 10),
        ({"type": "integer"}, "ten", "ten"),
        ({"type": "number"}, "10", 10),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "null", None),
        ({"type": "array"}, '[1, "2"]', [1, "2"]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": {"b": [null]}}', {"a": {"b": [None]}}),
        (NULLABLE_INT, "null", None),
        (NULLABLE_INT, "5", 5),
        (NULLABLE_STRING, "null", None),
        (NULLABLE_STRING, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "x1", "x1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({"type": "number"}, "NaN", "NaN"),
    ],
)
def test_values_have_the_declared_type(schema, text, value):
    result = arguments(schema, text)
    assert result == value and type(result) is type(value)


def test_references_into_the_schema_are_followed():
    assert arguments({"$ref": "#/$defs/Count"}, "7", {"$defs": {"Count": {"type": "integer"}}}) == 7
    assert arguments({"$ref": "#/$defs/A"}, "7", {"$defs": {"A": {"$ref": "#/$defs/A"}}}) == 7
    for ref in ("#/$defs/a~1b~01", "#/%24defs/a%7E1b~01", "#/$defs/a%2Fb~01"):  # a name with what pointers escape
        found = arguments({"$ref": ref}, "7", {"$defs": {"a/b~1": {"type": "string"}}})
        assert found == (7 if "%2F" in ref else "7")


@pytest.mark.parametrize("schema", [{"type": [{}, "integer"]}, {"enum": 5}, {"anyOf": [None, 3]}, {"$ref": 5}, 7, None])
def test_broken_schemas_do_no_harm(schema):
    assert arguments(schema, "7") in (7, "7")


def test_undeclared_parameters_are_strings():
    assert parse([call_text("f", y="5")], [tool("f")])[1] == [("f", '{"y": "5"}')]


def test_two_calls_and_the_words_before_them():
    text = "Let me look.\n\n" + call_text("f", a="1") + "\n" + call_text("g") + "\n"
    expected = ("Let me look.", [("f", '{"a": "1"}'), ("g", "{}")])
    tools = [tool("f"), tool("g")]
    assert parse([text], tools) == parse(list(text), tools) == expected


def test_strings_stream_while_they_are_written():
    parser = ToolCallParser([tool("write", {"text": {"type": "string"}})])
    parser.feed("<tool_call>\n<function=write>\n<parameter=text>\n")
    assert parser.feed("Hello wor") == [CallDelta(0, '"Hello wor')]
    assert parser.feed("ld") == [CallDelta(0, "ld")]


@settings(max_examples=200)
@given(st.text(max_size=30).filter(lambda t: "</parameter>" not in t), st.data())
def test_any_string_survives_any_chunking(value, data):
    text = "a " + call_text("f", s=value, n="3")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    words, [(_, joined)] = parse(pieces, [tool("f", {"s": {"type": "string"}, "n": {"type": "integer"}})])
    assert words == "a" and json.loads(joined) == {"s": value, "n": 3}


def test_an_unclosed_call_is_closed_at_the_end_and_left_open_at_a_limit():
    text = "<tool_call>\n<function=f>\n<parameter=s>\nhel"
    tools = [tool("f", {"s": {"type": "string"}})]
    assert parse([text], tools)[1] == [("f", '{"s": "hel"}')]
    assert parse([text], tools, truncated=True)[1] == [("f", '{"s": "hel')]
    assert parse([text + "\n</parameter>\n"], tools)[1] == [("f", '{"s": "hel"}')]


@pytest.mark.parametrize("text", ["a < b", "<tool", "<tool_call>{}", "<tool_call>\nno function", "x\n\n"])
def test_what_is_no_call_stays_text(text):
    assert parse([text], [tool("f")]) == parse(list(text), [tool("f")]) == (text, [])


TYPED = [
    tool("f", {"s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "l": {"type": "array"}}),
    tool("g"),
]
F, G = ("f", {"s": "x", "n": 3}), ("g", {})
JSON_F = '{"name": "f", "arguments": {"s": "x", "n": 3}}'
XML_F = call_text("f", s="x", n="3")
LIST_CALL = '<tool_call>{"name": "g", "arguments": [1]}</tool_call>'
DRIFT = [
    (f"<tool_call>\n{JSON_F}\n</tool_call>", "", [F]),
    (f"<tool_call>{JSON_F}", "", [F]),
    (f"<tool_call>{JSON_F[:-1]}</tool_call>", "", [F]),  # a brace is missing
    (f"<tool_call>{JSON_F[:-2]}", "", [F]),
    (f"<tool_call>{JSON_F}</tool_call>\n{XML_F} and", "and", [F, F]),
    ('<tool_call>{"name": "f", "parameters": {"n": "3", "s": 7, "b": "true", "l": "[1]", "z": "3"}}</tool_call>', "",
     [("f", {"n": 3, "s": "7", "b": True, "l": [1], "z": "3"})]),
    ('<tool_call>{"type": "function", "function": {"name": "g", "arguments": "{}"}}</tool_call>', "", [G]),
    ("<tool_call>{'name': 'g', 'arguments': {}}</tool_call>", "", [G]),
    (LIST_CALL, LIST_CALL, []),
    (f"<tool_call>{{bad}}</tool_call> {XML_F}", "<tool_call>{bad}</tool_call>", [F]),
    (f"Now.\n{XML_F.removeprefix('<tool_call>')}", "Now.", [F]),  # the first tag is missing
    ("A <function=unknown> is words.", "A <function=unknown> is words.", []),
    (XML_F.removesuffix("</tool_call>"), "", [F]),
    (XML_F.removesuffix("</function>\n</tool_call>"), "", [F]),
    (XML_F.replace("\n</parameter>\n</function>", "\n</function>"), "", [F]),
    (call_text("f", s="x").replace("\n</parameter>\n</function>", "</function>"), "", [("f", {"s": "x"})]),
    (XML_F.replace("</function>\n</tool_call>", "") + XML_F, "", [F, F]),  # the next call ends the one before
    (XML_F.replace("</tool_call>", "") + XML_F, "", [F, F]),
    (call_text("f", wrong="3", n="4"), "", [("f", {"wrong": "3", "n": 4})]),
    (call_text("f", n="1e999"), "", [("f", {"n": "1e999"})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "calls"), DRIFT)
def test_drift_is_understood(text, words, calls):
    whole = parse([text], TYPED)
    assert (whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]) == (words, calls)
    assert parse(list(text), TYPED) == whole


TAGS = ["<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "</function>", "<parameter=s>", "<parameter=n>",
        "</parameter>", "\n", " ", "3", "x", "<", JSON_F, "{", "}", '"', "[1]"]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.sampled_from(TAGS), max_size=14), st.booleans(), st.data())
def test_no_chunking_changes_what_is_understood(parts, truncated, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], TYPED, truncated)
    assert parse(pieces, TYPED, truncated) == parse(list(text), TYPED, truncated) == whole
    if not truncated:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])
