"""The tags of the Qwen XML dialect: how they are spelled, how they are misspelled, and where a value ends.

A tag may be cut anywhere while it streams, and the last one of an answer may stay torn (`</param`). So beside each
pattern that says "this is it" stands one, `..._BEGUN`, that says "this may still become it".
"""

from __future__ import annotations

import re

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
END_TAGS = (PARAMETER_END, FUNCTION_END, CLOSE)
LONGEST_NAME = 256  # characters between `=` and `>`; what is longer is no name, and nothing waits for its end


def beginning(tag: str, least: int = 0) -> str:
    """A pattern for `tag` and for every beginning of it of at least `least` letters, the longest first."""
    rest = ""
    for letter in reversed(tag[least:]):
        rest = f"(?:{re.escape(letter)}{rest})?"
    return re.escape(tag[:least]) + rest


def head(tag: str) -> str:
    """`<tag=NAME>`, `<tag = "NAME">`, `<tag name='NAME'>`; a blank NAME is none. The group is NAME with its quotes."""
    return rf"<{tag}(?:[ \t]*=|[ \t]+name[ \t]*=)(?![\s\"']*>)([^>\n]{{1,{LONGEST_NAME}}})>"


def head_begun(tag: str) -> str:
    named = rf"<{tag}(?:[ \t]*=|[ \t]+name[ \t]*=)[^>\n]{{0,{LONGEST_NAME}}}"
    return rf"(?:{named}|<{tag}[ \t]+{beginning('name')}[ \t]*|{beginning(f'<{tag}')})"


FUNCTION_HEAD, FUNCTION_BEGUN = re.compile(head("function")), re.compile(head_begun("function") + r"\Z")
PARAMETER_HEAD, PARAMETER_BEGUN = re.compile(head("parameter")), re.compile(head_begun("parameter") + r"\Z")
# `<function=bash(command="ls")>`, on one line, up to a `)>` that ends it.
PYTHON_HEAD = re.compile(r"<function[ \t]*=[ \t]*[\"']?([^\s()<>\"'=]+)\(")

# Closing tags, of which each may be torn where the next one makes sure of it: `</parameter\n</function>`.
_FUNCTION_END = rf"(?:</function>|{beginning(FUNCTION_END, 3)}(?=\s*</tool_call>))"
_CLOSE = rf"(?:</tool_call>|{beginning(CLOSE, 3)}(?=\s*<tool_call>))"
_TORN = rf"(?:{beginning(PARAMETER_END, 3)}\s*)?"
CALL_END = re.compile(rf"{_FUNCTION_END}|{_CLOSE}")
# Where the stream ends: any of them, each whole or torn; `<` alone is torn on a line of its own.
_LAST = (
    rf"(?:{beginning(PARAMETER_END, 3)}\s*)?(?:{beginning(FUNCTION_END, 3)}\s*)?(?:{beginning(CLOSE, 3)}\s*)?"
    r"(?:</\s*|(?:(?<=\n)|(?<=</parameter>)|(?<=</function>)|(?<=</tool_call>))<\s*)?"
)
LAST_TAGS = re.compile(rf"{_LAST}\Z")
CALL_END_BEGUN = re.compile(
    rf"(?:{_LAST}|{beginning(FUNCTION_END)}|{beginning(CLOSE)}|{beginning(CLOSE, 3)}\s*{beginning(OPEN)})\Z"
)
# At the `<` where a value ends, in the middle of a stream. A call that lacks closing tags is ended by those that it
# has, if the call's own end or the next call follows; else they are part of the value.
VALUE_END = re.compile(
    rf"</parameter>(?=\s*(?:{_FUNCTION_END}|{_CLOSE}|<tool_call>|{head('parameter')}))"
    rf"|{_TORN}(?={_FUNCTION_END}\s*(?:{_CLOSE}|<tool_call>)|{_CLOSE}\s*<tool_call>)"
)
VALUE_END_BEGUN = re.compile(
    rf"(?:</parameter>\s*(?:{beginning(FUNCTION_END)}|{beginning(CLOSE)}|{beginning(OPEN)}|{head_begun('parameter')})"
    rf"|{_TORN}(?:{beginning(FUNCTION_END, 3)}\s*)?(?:{beginning(CLOSE, 3)}\s*)?{beginning(OPEN)}"
    rf"|{_TORN}(?:{beginning(FUNCTION_END, 3)}\s*)?{beginning(CLOSE)}"
    rf"|{_TORN}{beginning(FUNCTION_END)}|{beginning(PARAMETER_END)}|{_LAST})\Z"
)
