"""Calls as models of few bits misspell them: read where one reading is left, text otherwise, and no word lost."""

import json
import re

import pytest
from call_texts import call_text, events, parse, tool
from drifts import BASH, HEAD, LS, REST, STRING, TOOLS, read

from kakera.chat.drifted_json import drifted_json


@pytest.mark.parametrize("before", ["\n", "", " \n"])
@pytest.mark.parametrize(
    "torn",
    [
        *("</parameter>"[:size] for size in range(3, 13)),
        *("</function>"[:size] for size in range(3, 12)),
        *("</tool_call>"[:size] for size in range(3, 13)),
        "</parameter>\n</fun",
        "</parameter>\n</function>\n</tool",
        "</parameter>\n</function>\n</",
        "</parameter\n</function>\n</tool_call>",
        "</parameter</function></tool_call>",
        "</parameter>\n</function\n</tool_call>",
        "</param\n</function\n</tool_call",
        "</parameter>\n</tool_call>",
        "</function\n</tool_call>\n",
        "</PARAM", "</ para", "</parameter=x", "</comm", "</command", "</parameters>\n</Func", "</ function>\n</toolc",
    ],
)  # fmt: skip
def test_a_torn_closing_tag_is_no_part_of_the_value(torn, before):
    value = "ls" + before.removesuffix("\n")
    assert read(HEAD + before + torn) == ("", [("bash", {"command": value})])


def test_a_bracket_alone_is_a_torn_tag_on_a_line_of_its_own():
    assert read(f"{HEAD}\n<") == read(f"{HEAD}\n</") == read(f"{HEAD}</") == ("", [LS])
    assert read(f"{HEAD}<") == ("", [("bash", {"command": "ls<"})])


SPELLED = {
    "parameter": ["</parameter >", "</ parameter>", "</parameters>", "</parameter=x>", '</parameter="command">',
                  "</PARAMETER>", "</parameter name=x>", "</command>", "</Command >", "</param>", "</Params>"],
    "function": ["</ function>", "</function=bash>", "</FUNCTION>", "</function >", "</functions>"],
    "call": ["</tool_calls>", "</toolcall>", "</ tool_call>", "</TOOL_CALL>", "</tool_call >", "</ToolCalls>"],
}  # fmt: skip


@pytest.mark.parametrize(
    "tags",
    [(each, "</function>", "</tool_call>") for each in SPELLED["parameter"]]
    + [("</parameter>", each, "</tool_call>") for each in SPELLED["function"]]
    + [("</parameter>", "</function>", each) for each in SPELLED["call"]]
    + [("</command>", "</function=bash>", "</toolcall>"), ("</ param >", "", "</TOOL_CALLS>")],
)
def test_closing_tags_of_other_spellings(tags):
    parameter, function, call = tags
    assert read(f"{HEAD}\n{parameter}\n{function}\n{call}\nDone.") == ("Done.", [LS])
    assert read(f"{HEAD}{parameter}{function}{call}{BASH}") == ("", [LS, LS])
    assert read(f"{HEAD}\n{parameter}") == read(f"{HEAD}\n{parameter}\n{function}") == ("", [LS])
    if function:
        assert read(f"{HEAD}\n{function}\n{call}") == ("", [LS])  # the value's own tag is missing
    for begin in ("<tool_call>\n{name: bash, arguments: {command: ls}}", "<tool_call>\nbash\nls"):
        assert read(f"{begin}\n{call}\nDone.") == ("Done.", [LS])
    assert read(f'<tool_call>\n<function=bash>\n{{"command": "ls"}}{function}{call}') == ("", [LS])
    foreign = f"<tool_call>\n<function=rm_all>\nx\n{function or call}"
    assert read(f"{foreign}<function=bash>{REST}") == (foreign, [LS])
    path = f"<tool_call>\n<function=write>\n<parameter=path>\na\n{re.sub('command', 'path', parameter, flags=re.I)}"
    values = {"path": "a", "lines": 3}
    assert read(f"{path}\n<PARAMETER=lines>\n3\n</parameter>{function}{call}") == ("", [("write", values)])


def test_a_value_may_hold_tags_of_other_spellings_and_of_its_own_name():
    for tag in (each for spelled in SPELLED.values() for each in spelled):
        for value in (f"sed -i 's|{tag}|X|' f.xml\nrm -rf build", tag, f"a{tag}\n<b>", f"{tag} {tag[:-1]}"):
            text = call_text("bash", command=value)
            assert events([text], TOOLS) == events(list(text), TOOLS) == [["bash", json.dumps({"command": value})]]
    for value in ("<command>ls</command>", "<command a='b'>\n<command>x</command>\n</command>"):
        for end in ("\n</function>\n</tool_call>", "\n</function>", ""):
            text = f"<tool_call>\n<function=bash>\n<parameter=command>\n{value}{end}"
            assert read(text) == ("", [("bash", {"command": value})]), text


def test_torn_tags_between_calls():
    assert read(f"{BASH}</para</") == ("", [LS])
    for end in ("</parameter\n</function>\n</tool_call>\n", "</parameter>\n</function>\n</tool_call\n", "</tool_call>"):
        assert read(f"{HEAD}\n{end}{BASH}") == ("", [LS, LS]), end


@pytest.mark.parametrize(
    "value",
    [
        "sed -i 's|</parameter>|X|' f.xml\nrm -rf build",
        "</parameter>",
        "a</parameter> b </function> c </tool_call> d",
        "echo '</function>'\n</function>\nls",
        "</function> </tool_call",
        "</param",
        "<parameter=command>\n</parameter> <parameter",
        "</parameter>\n<parameter= >",
        "</parameter>\n<b>",
        "<tool_response>x</tool_response>",
        "\r\n</parameter>\r\n;",
    ],
)
def test_a_tag_inside_a_value_is_part_of_it(value):
    assert read(call_text("bash", command=value)) == ("", [("bash", {"command": value})])


def test_line_breaks_of_windows():
    text = call_text("write", path="a\nb", content="x").replace("\n", "\r\n")
    assert read(text) == ("", [("write", {"path": "a\r\nb", "content": "x"})])


@pytest.mark.parametrize(
    "head",
    ['<function="bash">', "<function='bash'>", '<function name="bash">', "<function name='bash'>", "<function = bash >",
     "<function name=bash>", "<function=bash>", '<function="bash>', "<function=Bash>", '<function="BASH">'],
)  # fmt: skip
@pytest.mark.parametrize("first", ["<tool_call>\n", ""])
def test_a_name_in_quotes_or_another_case(head, first):
    assert read(f"{first}{head}{REST}") == ("", [LS])


@pytest.mark.parametrize("name", ['="command"', "='command'", ' name="command"', " name='command'", "= command "])
def test_a_parameter_in_quotes(name):
    assert read(f"<tool_call>\n<function=bash>{REST}".replace("=command", name)) == ("", [LS])


def test_quotes_that_are_declared_are_the_name():
    tools = [tool("f", {'"x"': STRING, "y": STRING})]
    assert read('<function=f>\n<parameter="x">\n1\n</parameter>\n<parameter="y">\n2', tools)[1] == [
        ("f", {'"x"': "1", "y": "2"})
    ]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('<function=bash(command="ls")>', LS),
        ('<function=bash(command="ls")>\n</function>\n</tool_call>', LS),
        ("<function=bash('ls')></function>", LS),
        ('<function=bash(command="ls > (a)>b")>', ("bash", {"command": "ls > (a)>b"})),
        ('<function=write(path="a", content="b\\n", lines=3, tags=["x"])>',
         ("write", {"path": "a", "content": "b\n", "lines": 3, "tags": ["x"]})),
        ("<function=bash(command='grep \\d')>", ("bash", {"command": "grep \\d"})),
        ("<function=ping()>", ("ping", {})),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", ["<tool_call>\n", ""])
def test_a_call_in_the_head(text, call, first):
    assert read(first + text) == ("", [call])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": bash, "arguments": {"command": "ls"}}', [LS]),
        ('{name: "bash", arguments: {command: "ls"}}', [LS]),
        ("{name: bash, arguments: {command: ls}}", [LS]),
        ('{"name": "Bash", "arguments": {"command": "ls"}}', [LS]),
        ('{"name": "bash", "arguments": {"command": "echo "hi" there"}}', [("bash", {"command": 'echo "hi" there'})]),
        ('{"name": "bash", "arguments": {"command": "echo 5" wide"}}', [("bash", {"command": 'echo 5" wide'})]),
        ('{"name": "bash", "arguments": {"command": "x = {"a": "b"}"}}', [("bash", {"command": 'x = {"a": "b"}'})]),
        ('{"name": "bash", "arguments": {"command": "echo "a", "b": "c""}}',
         [("bash", {"command": 'echo "a", "b": "c"'})]),
        ('{"name": "write", "arguments": {"path": "a", "content": "say "hi" now", "tags": ["x"]}}',
         [("write", {"path": "a", "content": 'say "hi" now', "tags": ["x"]})]),
        ('{"name": write, "arguments": {"path": "a", "content": "b", "tags": ["x", "y"]}}',
         [("write", {"path": "a", "content": "b", "tags": ["x", "y"]})]),
        ('{"name": "bash", "arguments": {"command": "grep \\d "x""}}', [("bash", {"command": 'grep \\d "x"'})]),
        ('{"name": "bash", "arguments": {"command": "echo </tool_call>"}}',
         [("bash", {"command": "echo </tool_call>"})]),
        ('{"name": "bash", "arguments": {"command": "a\nb"}}', [("bash", {"command": "a\nb"})]),
        ('{"name": "bash", "command": "ls"}', [LS]),
        ('{"type": "function", "function": {"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}}', [LS]),
        ('{"name": "ping", "arguments": null}', [("ping", {})]),
        ('{"name": "bash", "arguments": {"command": "ls"}}}', [LS]),
        ('[{"name": "bash", "arguments": {"command": "ls"}}]\n}]', [LS]),
        ('{"name": "bash", "input": {"command": "ls"}}', [LS]),
        ('{"function": "bash", "arguments": {"command": "ls"}}', [LS]),
        ('{"tool": "bash", "args": {"command": "ls"}}', [LS]),
        ('{"tool_name": "Bash", "command": "ls"}', [LS]),
        ('<function=bash>\n{"command": "ls"}\n</function>', [LS]),
        ("<function=bash>{command: ls}</function>", [LS]),
        ('<function=bash>\n{"command": "a</function>\\n</tool_call>b"}',
         [("bash", {"command": "a</function>\n</tool_call>b"})]),
        ('<function=ping>\n{}\n</function>\n<function=bash>{"command": "ls"}', [("ping", {}), LS]),
        ('[{"name": "bash", "arguments": {"command": "ls"}}, {"name": "ping"}]', [LS, ("ping", {})]),
        ("[{name: bash, arguments: {command: ls}}, {name: ping}]", [LS, ("ping", {})]),
        ('{"name": "ping"}\n{"name": "bash", "arguments": {"command": "ls"}}', [("ping", {}), LS]),
        ("bash\nls", [LS]),
        ("bash\n\nls\n", [LS]),
        ('bash\n{"command": "ls"}', [LS]),
        ('bash(command="ls")', [LS]),
        ("bash\n<parameter=command>\nls\n</parameter>\n</function>", [LS]),
        ("ping\n", [("ping", {})]),
        ("stop\n3", [("stop", {"code": 3})]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n</tool_call>", "</tool_call>\nDone.", ""])
def test_drifts_to_json(text, calls, end):
    assert read(f"<tool_call>\n{text}{end}") == ("Done." if "Done" in end else "", calls)


@pytest.mark.parametrize(
    "text",
    [
        "To call a tool write <function=bash> and then the rest. That is all I know.",
        "To call a tool write <tool_call><function=bash> and then </function></tool_call> behind it.",
        "Write <function=bash></function>, or <function=bash>",
        "It is `<function=bash><parameter=command>ls</parameter></function>`.",
        "<tool_call>\n<function=bash>\n",
        "Use </tool_call> and <function=bash>\n\nand </parameter>.",
        f"<tool_response>\n{BASH}\n</tool_response>",
        f"See <tool_response>{BASH}</tool_response> there",
        f"So:\n<tool_response>\n{BASH}",
        *(f"<tool_call>\n<function={name}>{REST}" for name in ("rm_all", "ba", "bash2", "STOP", "bash;", "ba sh")),
        *(f"{first}<function={name}>{REST}" for first in ("", "<tool_call>") for name in
          (" ", "\t", "\u00a0", "", '""', "ba\nsh", "\nbash")),
        *(f"<tool_call>\n<function=bash>\n<parameter={name}>\nls\n</parameter>\n</function>\n</tool_call>" for name in
          (" ", "\t", "\u00a0", "", '" "', "com\nmand")),
        *(f'<tool_call>\n{{"name": {name}, "arguments": {{"command": "ls"}}}}\n</tool_call>' for name in
          ('" "', '""', "null", '"\\t"', '"\u00a0"', '"rm_all"', '"STOP"', "5", '["bash"]')),
        '<tool_call>\n[{"name": "bash", "arguments": {"command": "ls"}}, {"name": "rm_all"}]\n</tool_call>',
        '<tool_call>\n[]\n</tool_call>',
        '<tool_call>\n{"tool": "bash", "function": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}, "input": {}}\n</tool_call>',
        '<tool_call>\n<function=bash>\n{"cmd": "ls"}\n</function>\n</tool_call>',
        'Then `<function=bash>{"command": "ls"}</function>`, and so on.',
        '<tool_call>\n{"name": "write", "arguments": {"tags": ["a "x"", "b"]}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {}, "parameters": {}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}, "note": "keep"}\n</tool_call>',
        "<tool_call>\nwrite\na.txt\nhello\n</tool_call>",
        "<tool_call>\nbash\n</tool_call>",
        "<tool_call>\nbash is a tool\n</tool_call>",
        "<tool_call>\nrm_all\nls\n</tool_call>",
        "<function=bash(command=ls)>",
        "<function=bash(command='a', command='b')>",
        "<function=bash(\ncommand='ls')>",
        f"<tool_call>\n<function=rm_all>\n<parameter=x>\n<function=bash>{REST[:-13]}",
    ],
)  # fmt: skip
def test_what_is_no_call_comes_out_as_it_went_in(text):
    assert read(text) == (text, [])


def test_brackets_that_close_nothing_are_text_where_no_tag_follows():
    written = '<tool_call>\n{"name": "ping"}'
    assert read(written + "} and {}\n</tool_call>")[0].startswith("} and {}")
    assert read('<function=bash>{"command": "ls"}</function>') == ("", [LS])


def test_a_parameter_is_given_once_and_stays_as_it_was_first():
    text = call_text("write", path="a", content="x")
    twice = text.replace("<parameter=content>", "<parameter=path>\nb\n</parameter>\n<parameter=content>")
    [(name, arguments)] = parse([twice], TOOLS)[1]
    assert (name, arguments) == ("write", '{"path": "a", "content": "x"}')
    assert read(twice)[1] == [("write", {"path": "a", "content": "x"})]
    written = '<tool_call>{"name": "write", "arguments": {"path": "a", "path": "b", "content": "x"}}</tool_call>'
    assert read(written)[1] == [("write", {"path": "a", "content": "x"})]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "additionalProperties": False}, "absent"])
def test_a_tool_without_parameters_is_given_none(parameters):
    function = {"name": "f"} | ({} if parameters == "absent" else {"parameters": parameters})
    tools = [{"type": "function", "function": function}]
    for text in (call_text("f"), call_text("f", x="1"), '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'):
        assert read(text, tools) == ("", [("f", {})])


def test_a_value_that_lacks_its_last_tag_ends_at_the_next_parameter():
    text = call_text("write", path="a", content="b <parameter=path>\n<parameter=path>\nc")
    assert read(text.replace("a\n</parameter>", "a"))[1] == [
        ("write", {"path": "a", "content": "b <parameter=path>\n<parameter=path>\nc"})
    ]


@pytest.mark.parametrize(
    ("schema", "pieces", "shown"),
    [
        (STRING, ["a", "b\n", "c"], '"ab\\nc'),
        ({"type": ["string", "null"]}, ["n", "o", " ", "b"], '"no b'),
        ({"anyOf": [STRING, {"type": "integer"}]}, ["12", " b"], '"12 b'),
        ({"anyOf": [STRING, {"type": "integer"}]}, ["12", " "], ""),
        ({"type": ["string", "null"]}, ["[1"], '"[1'),
        ({"type": ["string", "array"]}, ["[1"], ""),
        ({}, ["text"], '"text'),
        ({}, ['"text'], ""),
        ({"type": "integer"}, ["12"], ""),
    ],
)
def test_text_streams_as_soon_as_it_can_be_nothing_else(schema, pieces, shown):
    start = "<tool_call>\n<function=f>\n<parameter=x>\n"
    _, [(_, arguments)] = parse([start, *pieces], [tool("f", {"x": schema})], truncated=True, finish=False)
    assert arguments.removeprefix('{"x": ') == shown


def test_what_a_limit_cuts_is_not_lost():
    start = "<tool_call>\n<function=f>\n<parameter=x>\n"
    for schema, text, shown in (
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": ["string", "null"]}, "nul", '"nul'),
        (STRING, "ls\n</para", '"ls'),
        ({"type": "integer"}, "12\n", "12"),
        ({"type": "integer"}, "12\n</parameter>\n", "12"),
        (STRING, "ls\n</parameter>\n</fun", '"ls"'),
        (STRING, "ls\n</parameter>", '"ls"'),
    ):
        assert parse([start + text], [tool("f", {"x": schema})], truncated=True)[1] == [("f", '{"x": ' + shown)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{a: b}", [{"a": "b"}]),
        ('{"a": "b", e: [1, -2.5, true, None, x],}', [{"a": "b", "e": [1, -2.5, True, None, "x"]}]),
        ("['a', \"b\"]", [["a", "b"]]),
        ('{"a": "\\n\\"x" y"}', [{"a": '\n"x" y'}]),
        ('{"a": "b", "c": "d" e"}', [{"a": "b", "c": 'd" e'}, {"a": 'b", "c": "d" e'}]),
        ("{a: b c}", []),
        ('{"a": "b', []),
        ("", []),
        ("{", []),
        ("{a: 1, a: 2}", []),
        ("[" * 5000, []),
        ('["' + 'a "b", "' * 300 + '"]', []),  # 2 ** 300 readings
    ],
)
def test_what_broken_json_may_mean(text, values):
    assert drifted_json(text) == values
