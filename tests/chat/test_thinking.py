"""Reasoning is split from content, whatever the chunks; off means off."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.chat.thinking import ThinkSplitter, thinking_switch

JSON_CALL = '<tool_call>\n{ "name": "f"}\n</tool_call>'
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


def split(pieces, **options) -> tuple[str, str]:
    splitter = ThinkSplitter(**options)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    return tuple("".join(p.text for p in parts if p.kind == kind) for kind in ("reasoning", "content"))


CASES = [
    ("plan\n</think>\n\nAnswer", {"inside": True}, ("plan", "Answer")),
    ("<think>\nplan\n</think>\n\nAnswer", {"inside": True}, ("plan", "Answer")),
    ("<think>\nplan\n</think>\n\nAnswer", {"inside": False}, ("plan", "Answer")),
    ("\n</think>\n\nAnswer", {"inside": True}, ("", "Answer")),
    ("Answer with < and <thin", {"inside": False}, ("", "Answer with < and <thin")),
    ("  Answer", {"inside": False}, ("", "  Answer")),
    ("never closed </thin", {"inside": True}, ("never closed </thin", "")),
    ("plan " + CALL, {"inside": True, "calls": True}, ("plan", CALL)),
    ("plan " + CALL + "\n</think>\n\nok", {"inside": True, "calls": True}, ("plan", CALL + "\n</think>\n\nok")),
    ("I know <tool_call> tags.\n</think>\nok", {"inside": True, "calls": True}, ("I know <tool_call> tags.", "ok")),
    ("plan " + CALL, {"inside": True}, ("plan " + CALL, "")),
    ("plan " + JSON_CALL, {"inside": True, "calls": True}, ("plan", JSON_CALL)),
    ('a <tool_call> {"x"}\n</think>ok', {"inside": True, "calls": True}, ('a <tool_call> {"x"}', "ok")),
    ("", {"inside": True}, ("", "")),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_whole_and_letter_by_letter_agree(text, options, expected):
    assert split([text], **options) == expected
    assert split(list(text), **options) == expected


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "<function=", '{"name"', "{", '"', "a", " ", "\n", "<", "/"]
        ),
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_chunking_never_matters(atoms, inside, calls, data):
    text = "".join(atoms)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options = {"inside": inside, "calls": calls}
    assert split(pieces, **options) == split(list(text), **options)


@pytest.mark.parametrize(
    ("kwargs", "effort", "expected"),
    [
        ({"enable_thinking": False}, None, False),
        ({"enable_thinking": "false"}, None, False),
        ({"enable_thinking": "True"}, None, True),
        ({}, "none", False),
        ({}, "high", None),
        ({"enable_thinking": True}, "none", True),
        ({"enable_thinking": None}, None, None),
    ],
)
def test_the_switch_understands_what_clients_send(kwargs, effort, expected):
    assert thinking_switch(kwargs, effort).get("enable_thinking") is expected
