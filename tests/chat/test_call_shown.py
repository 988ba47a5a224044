"""Calls that are only shown: in results that a model invents, in code fences, in prose."""

import pytest
from call_texts import call_text, parse
from drifts import BASH, HEAD, LS, REST, TOOLS, read


def test_a_response_that_is_only_mentioned_hides_no_call():
    assert read(f"In a <tool_response> tag. {BASH}") == ("In a <tool_response> tag. ", [LS])
    assert read(f"<tool_response>\n{BASH}\n</tool_response>\n{BASH}")[1] == [LS]


RESULTS = ("tool_response", "tool_output", "tool_result", "tool_results", "function_result", "function_results",
           "TOOL_RESULT", "function_response", "tool_call_output")  # fmt: skip


@pytest.mark.parametrize("name", [*RESULTS, "result", "output"])
def test_a_call_in_an_invented_result_is_text(name):
    for head in (f"<{name}>", f'<{name} id="1">'):
        for before in ("", "So:\n", " \n"):
            shown = f"{before}{head}\n{BASH}\n</{name}>"
            assert read(shown) == (shown, [])
            assert read(f"{shown}\n{BASH}") == (shown, [LS])
        assert read(f"{BASH}\n{head}\n{BASH}\n</{name}>") == (f"{head}\n{BASH}\n</{name}>", [LS])
    unclosed = f"<{name}>\n{BASH}"
    assert read(unclosed) == ((f"<{name}>\n", [LS]) if name in ("result", "output") else (unclosed, []))
    assert parse([f"In a <{name}> tag. {BASH}"], TOOLS)[0].rstrip() == f"In a <{name}> tag."
    if name in ("result", "output"):
        assert read(f"In <{name}>{BASH}</{name}>") == (f"In <{name}></{name}>", [LS])


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["```", "~~~~", "  ```"])
def test_a_call_in_a_code_fence_is_text(mark):
    for head in (f"{mark}xml\n", f"{mark}\n", f"{mark} xml\nls\n", mark):
        for call in (BASH, "<function=bash>" + REST, "<tool_call>\n<function=bash>\n...", f"{BASH}\n{BASH}"):
            shown = f"To call a tool, write\n{head}{call}\n{mark}"
            assert read(shown) == (shown, [])
            assert read(f"{shown} \n\nSo.\n{BASH}") == (f"{shown} \n\nSo.", [LS])
            fence_first = f"{head}{call}\n{mark}\nThat is how."
            assert read(fence_first) == (fence_first, [])


def test_a_fence_that_is_the_answer_and_holds_nothing_but_calls():
    for head in ("```xml\n", "\n```\n", "~~~tool_call\n", "```"):
        for end in ("\n```", "```", "\n```\n\n", "\n"):
            assert read(f"{head}{BASH}{end.replace('```', head.strip()[:3])}") == ("", [LS])
        assert read(f"{head}{BASH}\n{BASH}") == ("", [LS, LS])
    for inner in (BASH.replace("=bash", "=rm_all"), f"{BASH} and", HEAD, f"# call\n{BASH}"):
        shown = f"```xml\n{inner}\n```"
        assert read(shown) == (shown, [])
    assert parse([f"```xml\n{BASH}\n```"], TOOLS, truncated=True) == (f"```xml\n{BASH}\n```", [])


def test_a_call_in_backticks_behind_words_is_text():
    for call in (BASH, BASH.replace("\n", ""), "<tool_call>...</tool_call>"):
        for shown in (f"The form is `{call}` here.", f"- A call, ``{call}``", f"A `x` and\n1. `{call}`"):
            assert read(shown) == (shown, [])
            assert read(f"{shown}\n{BASH}") == (shown, [LS])
    for tag in ("`<tool_call>`", "`<tool_call>` and `</tool_call>`"):
        assert read(f"Begin with {tag}.\n{BASH}") == (f"Begin with {tag}.", [LS])
        assert read(f"Begin with {tag}.\n<function=bash>{REST}") == (f"Begin with {tag}.", [LS])
    for alone in (f"`{BASH}`", f"Now:\n`{BASH}`"):  # words about nothing: the model's own marks
        assert read(alone)[1] == [LS]
    assert read(f"I run `ls`: {BASH}") == ("I run `ls`:", [LS])


def test_a_fence_that_is_never_closed_hides_no_call():
    assert read(f"Run\n```bash\nls\n{BASH}") == ("Run\n```bash\nls\n", [LS])
    assert read(f"Run\n```bash\nls\n```\n{BASH}") == ("Run\n```bash\nls\n```", [LS])
    assert read(f"Some ``` marks\n{BASH}") == ("Some ``` marks", [LS])
    assert read(f"``` `a` \n{BASH}") == ("``` `a`", [LS])
    value = "# A\n```bash\nls\n```\n"
    assert read(call_text("bash", command=value)) == ("", [("bash", {"command": value})])
