"""The tags of the Qwen XML dialect: how they are spelled, how they are misspelled, and where a value ends.

A tag may be cut anywhere while it streams, and the last one of an answer may stay torn (`</param`). So beside each
pattern that says "this is it" stands one, `..._BEGUN`, that says "this may still become it".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
END_TAGS = (PARAMETER_END, FUNCTION_END, CLOSE)
# Names that closing tags are given, in any case.
PARAMETER_NAMES = ("param", "params", "parameter", "parameters")
FUNCTION_NAMES = ("function", "functions")
CALL_NAMES = ("toolcall", "toolcalls", "tool_call", "tool_calls")
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


# Within closing tags: few spaces, since what is held is looked at again with each letter; and a name as heads have it.
_GAP = r"[ \t]{0,8}"
_OWN_NAME = rf"(?:[ \t]{{1,8}}name)?{_GAP}(?:={_GAP}[\"']?[^\s<>\"']{{0,{LONGEST_NAME}}}[\"']?{_GAP})?"


def closing(names: Sequence[str]) -> str:
    """A whole closing tag, however it is spelled: `</NAME>`, `</ Name >`, `</NAME="x">`, `</NAME name=x>`."""
    return rf"(?i:</{_GAP}(?:{'|'.join(map(re.escape, names))}){_OWN_NAME}>)"


def torn(names: Sequence[str]) -> str:
    """The same, or a beginning of it that ends within the name or behind it."""
    longest_first = sorted(names, key=len, reverse=True)
    return rf"(?i:</{_GAP}(?:{'|'.join(beginning(name, 1) for name in longest_first)})(?:{_OWN_NAME}>?)?)"


def closing_begun(names: Sequence[str]) -> str:
    """What may still become a whole closing tag, from `<` on."""
    begun = "|".join(map(beginning, names))
    return rf"(?i:<(?:/{_GAP}(?:{begun})(?:[ \t]{{1,8}}{beginning('name')})?{_OWN_NAME}>?)?)"


FUNCTION_HEAD, FUNCTION_BEGUN = re.compile(head("function")), re.compile(head_begun("function") + r"\Z")
_PARAMETER_HEAD, _PARAMETER_BEGUN = f"(?i:{head('parameter')})", f"(?i:{head_begun('parameter')})"
PARAMETER_HEAD, PARAMETER_BEGUN = re.compile(_PARAMETER_HEAD), re.compile(_PARAMETER_BEGUN + r"\Z")
# `<function=bash(command="ls")>`, on one line, up to a `)>` that ends it.
PYTHON_HEAD = re.compile(r"<function[ \t]*=[ \t]*[\"']?([^\s()<>\"'=]+)\(")

# Closing tags, of which each may be torn where the next one makes sure of it: `</parameter\n</function>`.
_FUNCTION_END, _CLOSE = closing(FUNCTION_NAMES), closing(CALL_NAMES)
_FUNCTION_TORN, _CALL_TORN = torn(FUNCTION_NAMES), torn(CALL_NAMES)
_FUNCTION_SURE = rf"(?:{_FUNCTION_END}|{_FUNCTION_TORN}(?=\s*{_CLOSE}))"
_CLOSE_SURE = rf"(?:{_CLOSE}|{_CALL_TORN}(?=\s*<tool_call>))"
_CLOSING_BEGUN = rf"(?:{closing_begun(FUNCTION_NAMES)}|{closing_begun(CALL_NAMES)})"
CALL_CLOSE, CALL_CLOSE_BEGUN = re.compile(_CLOSE), re.compile(rf"{closing_begun(CALL_NAMES)}\Z")
CALL_END = re.compile(rf"(?P<function>{_FUNCTION_SURE})|{_CLOSE_SURE}")
# What ends a call in which nothing is torn.
WHOLE_END, WHOLE_END_BEGUN = re.compile(rf"{_FUNCTION_END}|{_CLOSE}"), re.compile(rf"{_CLOSING_BEGUN}\Z")


def _last(names: Sequence[str], begun: bool = False) -> str:
    """Where the stream ends: any of them, each whole or torn; `<` alone is torn on a line of its own. What may still
    become that ends in any `<`."""
    alone = r"</?\s*" if begun else r"</\s*|(?:(?<=\n)|(?<=</parameter>)|(?<=</function>)|(?<=</tool_call>))<\s*"
    return rf"(?:{torn(names)}\s*)?(?:{_FUNCTION_TORN}\s*)?(?:{_CALL_TORN}\s*)?(?:{alone})?"


LAST_TAGS = re.compile(rf"{_last(PARAMETER_NAMES)}\Z")
CALL_END_BEGUN = re.compile(rf"(?:{_last(PARAMETER_NAMES, True)}|{_CLOSING_BEGUN}|{_CALL_TORN}\s*{beginning(OPEN)})\Z")


def undecided(text: str, begun: re.Pattern[str]) -> int:
    """Where a tag has begun that the text's end cuts; else the text's end."""
    at = text.rfind("<")
    return at if at >= 0 and begun.match(text, at) else len(text)


@dataclass(frozen=True)
class ValueTags:
    """Patterns at the `<` where a value may end.

    `whole`: its closing tag, in any spelling. `end`: what ends it in the middle of a stream. `begun`: what may still
    become that. `last`: what ends it with the stream. A value may hold elements of its parameter's name: `opened` and
    `own` are their tags. A call that lacks closing tags is ended by those that it has, if the call's own end or the
    next call follows; else they are part of the value.
    """

    whole: re.Pattern[str]
    end: re.Pattern[str]
    begun: re.Pattern[str]
    last: re.Pattern[str]
    opened: re.Pattern[str]
    own: re.Pattern[str]


@lru_cache(maxsize=256)
def value_tags(key: str) -> ValueTags:
    """The tags of the parameter `key`, whose name closes it as `parameter` does."""
    named = bool(key) and key.casefold() not in (*PARAMETER_NAMES, *FUNCTION_NAMES, *CALL_NAMES)
    names = (*PARAMETER_NAMES, key) if named else PARAMETER_NAMES
    whole = closing(names)
    before, any_before = rf"(?:{torn(PARAMETER_NAMES)}\s*)?", rf"(?:{torn(names)}\s*)?"
    function, call = rf"(?:{_FUNCTION_TORN}\s*)?", rf"(?:{_CALL_TORN}\s*)?"
    opened = rf"(?i:{beginning(f'<{key}')})|" if named else ""
    return ValueTags(
        whole=re.compile(whole),
        end=re.compile(
            rf"{whole}(?=\s*(?:{_FUNCTION_SURE}|{_CLOSE_SURE}|<tool_call>|{_PARAMETER_HEAD}))"
            rf"|{before}(?={_FUNCTION_SURE}\s*(?:{_CLOSE_SURE}|<tool_call>)|{_CLOSE_SURE}\s*<tool_call>)"
        ),
        begun=re.compile(
            rf"(?:{opened}{whole}\s*(?:{_CLOSING_BEGUN}|{beginning(OPEN)}|{_PARAMETER_BEGUN})"
            rf"|{any_before}{function}{call}{beginning(OPEN)}|{any_before}{function}{closing_begun(CALL_NAMES)}"
            rf"|{any_before}{closing_begun(FUNCTION_NAMES)}|{closing_begun(names)}|{_last(names, True)})\Z"
        ),
        last=re.compile(rf"{_last(names)}\Z"),
        opened=re.compile(rf"(?i:<{re.escape(key)}(?=[\s>]))" if named else "(?!)"),
        own=re.compile(closing([key]) if named else "(?!)"),
    )
