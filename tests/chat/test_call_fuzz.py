"""Drifting calls at random: cut anywhere, a text gives the same events and keeps its words, in linear time."""

import json
import re
import time

import pytest
from call_texts import call_text, events, parse
from drifts import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st

# Fuzz: whatever the text, cut anywhere, it gives the same events and keeps each of its words.

PIECES = [
    "<tool_call>", "\n</tool_call>", "<function=bash>", "<function=ping>", '<function="stop">', "<function=rm_all>",
    "<function= >", "\n</function>", "\n</parameter>", "<parameter=", ">", "<parameter name=", '"', "'", "\n", " ",
"\r\n", "\u00a0", "<", "</", "</para", "</func", "</tool", "<tool_response>", "</tool_response>",
    '{"name": "bash", ', '"arguments": {', '"command": "', '"}}', "{", "}", "[", "]", ",", ":", "\\", "bash",
    "</parameter >", "</ Param>", "</parameters>", "</command>", "</k1>", "<command>", "</function=bash>",
    "</ FUNCTION", "</toolcall>", "</Tool_calls >", "ping\n", "(", ")>", "`", '<tool_call>{"name": "ping"}', "日本",
    "😀", "```", "\n```xml\n", "~~~", "<tool_output>", "</tool_output>", "<result>", "</result>",
]  # fmt: skip


@st.composite
def soups(draw) -> tuple[str, list[str]]:
    """Text of tags and brackets, and the words in it, each of which is there once."""
    parts: list[str] = []
    words: list[str] = []
    for piece in draw(st.lists(st.sampled_from([*PIECES, "WORD", "WORD", "KEY", "CALL"]), max_size=16)):
        word = f"w{len(words)}w"
        if piece in ("WORD", "KEY", "CALL"):
            words.append(word)
        parts.append(
            {"WORD": word, "KEY": f"\n<parameter={word}>\n", "CALL": call_text("bash", **{f"k{len(words)}": word})}.get(
                piece, piece
            )
        )
    return "".join(parts), words


@pytest.mark.slow
@settings(max_examples=300)
@given(soups(), st.booleans(), st.data())
def test_no_cut_changes_the_events_and_no_word_is_lost(soup, truncated, data):
    text, words = soup
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = events([text], TOOLS[:-2], truncated)
    assert events(pieces, TOOLS[:-2], truncated) == events(list(text), TOOLS[:-2], truncated) == whole
    shown, calls = parse([text], TOOLS[:-2], truncated)
    if not calls:
        assert shown == text
    everything = shown + "".join(arguments for _, arguments in calls)
    if text.count('"command"') < 2:  # of two parameters of one name the second is left out
        assert all(everything.count(word) == 1 for word in words), everything
    if not truncated:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.lists(
    LETTERS
    | st.sampled_from(['"', "'", "</parameter>", "</ Parameters>", "<path>", "</path >", "</function>", "</toolcall>",
                       "<b>", "{", "}", "[", "\r\n", "\n", "\\", "😀", "</"]),
    max_size=8,
).map("".join)  # fmt: skip
PROSE = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12).map(lambda t: f"a{t}b")


# A closing tag with white space and the next one behind it, or a call's last tags.
ENDS_EARLY = re.compile(
    r"</(parameter| Parameters|path )>\s*(<parameter=|</function>|</tool_?call>)|</function>\s*</toolcall>"
)


def ends_early(value: str) -> bool:
    return ENDS_EARLY.search(f"{value}\n</function>") is not None


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(st.tuples(PROSE, st.lists(VALUES, min_size=1, max_size=2)), max_size=3), st.data())
def test_any_values_survive_any_cut(turns, data):
    text, expected = "", []
    for prose, values in turns:
        if any(map(ends_early, values)):
            continue
        given_values = dict(zip(("path", "content"), values, strict=False))
        text += f"{prose}\n{call_text('write', **given_values)}\n"
        expected += [prose, ["write", given_values]]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = events(pieces, TOOLS)
    assert events(list(text), TOOLS) == found
    assert [e if isinstance(e, str) else [e[0], json.loads(e[1])] for e in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "<tool_call>\n<function=write>\n<parameter=tags>\n[",
        "<tool_call>\n<function=write>\n<parameter=content>\n",
        '<tool_call>\n{"name": "write", "arguments": {"tags": [',
        "<tool_call>\n{'name': 'write', 'arguments': {'tags': [",
        "<tool_call>\nbash\n",
        '<function=bash(command="',
        "<tool_response>\n<tool_call>",
        "```\n<tool_call>",
        "So:\n```\n<tool_call>",
    ],
)
def test_a_long_value_takes_linear_time(start):
    pieces = [start, *['"abc < d", '] * 16_000]
    begun = time.process_time()
    parse(pieces, TOOLS)
    assert time.process_time() - begun < 5  # 0.1 to 0.9 s on one core; each token read again took 7 s and more
