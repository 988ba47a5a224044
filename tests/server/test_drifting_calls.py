"""Calls that a model misspells, through the dialects: each gives the same call or the same text, streamed and whole."""

import json

import pytest
from live_server import start

STRING = {"type": "string"}
SCHEMAS = {
    "bash": {"type": "object", "properties": {"command": STRING}, "required": ["command"]},
    "write": {"type": "object", "properties": {"path": STRING, "content": STRING}},
    "ping": None,
}
LS = ("bash", {"command": "ls"})
VALUE = "\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
BASH = f"<tool_call>\n<function=bash>{VALUE}"
SED = "sed -i 's|</parameter>|X|' f.xml\nrm -rf build"
PROSE = "To call a tool write <function=bash> and then the rest. That is all I know."
# What the model says, the text and the calls that clients see. Chat, Messages and Responses are asked for each.
STREAMS = {
    "torn-one": (BASH.removesuffix(">\n</function>\n</tool_call>"), "", [LS]),
    "torn-two": (BASH.replace("</parameter>", "</parameter"), "", [LS]),
    "tag-inside": (BASH.replace("\nls\n", f"\n{SED}\n"), "", [("bash", {"command": SED})]),
    "quoted": (BASH.replace("=bash", '="bash"').replace("=command", ' name="command"'), "", [LS]),
    "python": ('Now. <tool_call>\n<function=bash(command="ls")>\n</function>\n</tool_call>', "Now.", [LS]),
    "prose": (PROSE, PROSE, []),
    "invented": (f"So:\n<tool_response>\n{BASH}\n</tool_response>", None, []),
    "bare-name": ('<tool_call>\n{"name": bash, "arguments": {"command": "ls"}}\n</tool_call>', "", [LS]),
    "several": ('<tool_call>\n[{"name": "bash", "arguments": {"command": "ls"}}, {"name": "ping"}]\n</tool_call>', "",
                [LS, ("ping", {})]),
    "lines": ("<tool_call>\nbash\nls\n</tool_call>", "", [LS]),
    "other-case": (BASH.replace("=bash", "=Bash"), "", [LS]),
    "nobody": (BASH.replace("=bash", "=rm_all"), None, []),
    "blank": (BASH.replace("=bash", "=\u00a0"), None, []),
    "twice": ("<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=path>\nb\n</parameter>\n"
              "<parameter=content>\ny\n</parameter>\n</function>\n</tool_call>", "",
              [("write", {"path": "a", "content": "y"})]),
    "nothing": ("<tool_call>\n<function=ping>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", "",
                [("ping", {})]),
}  # fmt: skip


@pytest.fixture(scope="module")
def drifting(model, tmp_path_factory):
    streams = [{"match": f"{key} letters", "pieces": list(text)} for key, (text, _, _) in STREAMS.items()]
    streams += [{"match": f"{key} tokens", "text": text} for key, (text, _, _) in STREAMS.items()]
    with start(model, tmp_path_factory.mktemp("drifting") / "script.json", streams) as server:
        yield server


def functions() -> list[dict]:
    return [{"name": name} | ({"parameters": schema} if schema else {}) for name, schema in SCHEMAS.items()]


def chat(server, prompt: str) -> tuple[str, list]:
    tools = [{"type": "function", "function": function} for function in functions()]
    choice = server.chat(prompt, tools=tools).json()["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    return choice["message"]["content"] or "", [(call["name"], call["arguments"]) for call in calls]


def chat_streamed(server, prompt: str) -> tuple[str, list]:
    tools = [{"type": "function", "function": function} for function in functions()]
    text, calls = "", []
    for event in server.events(server.chat(prompt, tools=tools, stream=True)):
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append((call["function"]["name"], ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + (call["function"].get("arguments") or ""))
    return text, calls


def messages(server, prompt: str) -> tuple[str, list]:
    tools = [{"name": name, "input_schema": schema or {"type": "object"}} for name, schema in SCHEMAS.items()]
    asked = [{"role": "user", "content": prompt}]
    answer = server.post("/v1/messages", model="mini", max_tokens=900, messages=asked, tools=tools).json()
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return text, [(b["name"], json.dumps(b["input"])) for b in answer["content"] if b["type"] == "tool_use"]


def responses(server, prompt: str) -> tuple[str, list]:
    tools = [{"type": "function", **function} for function in functions()]
    options = {"tools": tools, "reasoning": {"effort": "none"}}
    output = server.post("/v1/responses", model="mini", input=prompt, **options).json()["output"]
    parts = [part for item in output if item["type"] == "message" for part in item["content"]]
    calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    return "".join(part["text"] for part in parts), calls


@pytest.mark.parametrize("cut", ["letters", "tokens"])
@pytest.mark.parametrize("ask", [chat, chat_streamed, messages, responses])
@pytest.mark.parametrize("key", STREAMS)
def test_a_drifting_call_is_the_same_everywhere(drifting, key, ask, cut):
    said, text, calls = STREAMS[key]
    shown, found = ask(drifting, f"{key} {cut}")
    if ask is messages and key == "nothing":  # there a tool always has a schema, and this one takes anything
        calls = [("ping", {"x": "1"})]
    assert shown == (said if text is None else text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
