"""What stands in a history never ends a session, in any dialect: a 400 is for what is asked now."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import start

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": CITY}
OFF = {"enable_thinking": False, "max_tokens": 8}
CALL = '<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo, "N"\n</parameter>\n</function>\n</tool_call>'
TEXTS = [{"match": "CALL-1", "text": "Look.\n\n" + CALL}, {"text": "Hello there."}]


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("histories") / "script.json", TEXTS, context=65536) as server:
        yield server


def prompt(live) -> str:
    return live.model.tokenizer.decode(live.engine.requests[-1].tokens)


# A dialect: its route, its fields, and the conversation as its list of messages.


def chat(messages, **more):
    tools = [{"type": "function", "function": FUNCTION}]
    return "/v1/chat/completions", {**OFF, "tools": tools, "messages": messages, **more}


def anthropic(messages, **more):
    tools = [{"name": "get_weather", "input_schema": CITY}]
    return "/v1/messages", {"max_tokens": 8, "tools": tools, "messages": messages, **more}


def responses(items, **more):
    tools = [{"type": "function", **FUNCTION}]
    fields = {"max_output_tokens": 8, "reasoning": {"effort": "none"}, "tools": tools}
    return "/v1/responses", {**fields, "input": items, **more}


DIALECTS = {"chat": chat, "messages": anthropic, "responses": responses}


def rendered(live, dialect, *history, **more) -> str:
    """The prompt of a conversation with this history, whole and streamed."""
    said = [{"role": "user", "content": "hi"}, *history, {"role": "user", "content": "go on"}]
    prompts = []
    for stream in (False, True):
        path, body = DIALECTS[dialect](said, **more)
        response = live.post(path, **body, stream=stream)
        assert response.status_code == 200, response.text
        prompts.append(prompt(live))
    assert prompts[0] == prompts[1] and "go on" in prompts[0]
    return prompts[0]


# A1: calls and their arguments

ARGUMENTS = ['{"city": "Os', "[1, 2]", "null", None, 5, ["a"], '{"city": "a\nb"}', '{"a": 1}{"b": 2}', "", "Oslo", True]


def a_call(dialect, arguments) -> list[dict]:
    result = "not run: arguments cut"
    function = {"name": "get_weather", "arguments": arguments}
    match dialect:
        case "chat":
            call = {"id": "c1", "type": "function", "function": function}
            return [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": result},
            ]
        case "messages":
            call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": arguments}
            return [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
            ]
    call = {"type": "function_call", "call_id": "c1", **function, "status": "incomplete"}
    return [call, {"type": "function_call_output", "call_id": "c1", "output": result}]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
def test_arguments_of_any_shape_are_shown_to_the_model(live, dialect, arguments):
    text = rendered(live, dialect, *a_call(dialect, arguments))
    assert "<function=get_weather>" in text and "not run: arguments cut" in text
    if arguments in ('{"city": "Os', "Oslo"):
        assert f"<parameter=arguments>\n{arguments}\n</parameter>" in text
    if isinstance(arguments, str) and "\n" in arguments:
        assert "<parameter=city>\na\nb\n</parameter>" in text


def nested(levels) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"type": "document", "source": {"type": "content", "content": [value]}}
    return value


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("levels", [10, 40, 150, 290])
def test_nesting_is_read_or_shown_at_any_depth_that_a_body_may_have(live, dialect, levels):
    deep = nested(levels)
    entries = a_call(dialect, deep) + a_call(dialect, json.dumps(deep))
    field = "output" if dialect == "responses" else "content"
    result = entries[1]["content"][0] if dialect == "messages" else entries[1]
    for content in (deep, [deep], {"a": deep}):
        result[field] = content
        rendered(live, dialect, *entries)


def own_answer(dialect, answer) -> list[dict]:
    """kakera's answer as clients put it into the next request, with a result for each call."""
    match dialect:
        case "chat":
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls", ())
            return [message, *({"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in calls)]
        case "messages":
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "r"} for call in calls]
            said = [{"role": "assistant", "content": answer["content"]}] if answer["content"] else []
            return [*said, *([{"role": "user", "content": results}] if results else [])]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    outputs = ({"type": "function_call_output", "call_id": call["call_id"], "output": "r"} for call in calls)
    return [*answer["output"], *outputs]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_own_answers_cut_anywhere_by_a_limit_or_a_stop_string_can_be_sent_back(live, dialect):
    limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
    stop = "stop_sequences" if dialect == "messages" else "stop"
    cuts = [{limit: size} for size in range(1, 40)]
    cuts += [{stop: [text], limit: 99} for text in ("Oslo", "lo, ", "<parameter=city>", "</parameter>", "weather")]
    for cut in cuts:
        path, body = DIALECTS[dialect]([{"role": "user", "content": "CALL-1"}], **cut)
        answer = live.post(path, **body)
        assert answer.status_code == 200, answer.text
        rendered(live, dialect, *own_answer(dialect, answer.json()))


# A2 and A3: blocks and items of tools that run elsewhere, and of kinds that nobody knows

TEXT = {"type": "text", "text": "found it"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SEARCH = {"type": "search_result", "source": "https://a.b", "title": "T", "content": [{"type": "text", "text": "S"}]}
SERVER_USES = [
    {"type": kind, "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    for kind in ("server_tool_use", "mcp_tool_use")
]
SERVER_RESULTS = [
    {"type": f"{kind}_tool_result", "tool_use_id": "srvtoolu_1", "content": content}
    for kind in ("web_search", "web_fetch", "code_execution", "bash_code_execution", "tool_search", "mcp")
    for content in ([], {"type": "error", "error_code": "x"}, None)
]
OTHER_BLOCKS = [{"type": "container_upload", "file_id": "f"}, {"type": "of-2031", "x": 1}, {}]


@pytest.mark.parametrize("block", [*SERVER_USES, *SERVER_RESULTS, *OTHER_BLOCKS, IMAGE], ids=str)
def test_blocks_that_ran_elsewhere_leave_the_words_beside_them(live, block):
    text = rendered(live, "messages", {"role": "assistant", "content": [block, TEXT]})
    assert "assistant\nfound it<|im_end|>" in text


@pytest.mark.parametrize("block", [*OTHER_BLOCKS, IMAGE, {"type": "thinking"}], ids=str)
def test_blocks_of_a_user_that_can_not_be_read_are_a_line_of_text(live, block):
    assert " left out: only text can be read here]\nfound it" in rendered(
        live, "messages", {"role": "user", "content": [block, TEXT]}, {"role": "assistant", "content": "ok"}
    )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "tool_reference", "tool_name": "TaskStop"}], "Tool: TaskStop"),
        ([SEARCH, TEXT], "T\nhttps://a.b\nS\nfound it"),
        ([IMAGE, TEXT], "[image left out: only text can be read here]\nfound it"),
        ({"type": "text", "text": "found it"}, "found it"),
        (None, ""),
        (5, "5"),
    ],
    ids=str,
)
def test_results_of_tools_are_read_as_well_as_possible_also_when_they_come_last(live, content, shown):
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}, IMAGE]}
    assert f"<tool_response>\n{shown}\n</tool_response>" in rendered(live, "messages", use, result)
    path, body = anthropic([{"role": "user", "content": "hi"}, use, result])
    assert live.post(path, **body).status_code == 200 and f"<tool_response>\n{shown}" in prompt(live)


def test_a_compaction_that_can_be_read_is(live):
    block = {"type": "compaction", "content": "We did this."}
    assert "We did this." in rendered(live, "messages", {"role": "assistant", "content": [block]})


SAYS_NOTHING = [
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "file_search_call", "id": "fs", "queries": ["x"], "results": None},
    {"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": []},
    {"type": "image_generation_call", "id": "ig", "result": "aGk="},
    {"type": "mcp_list_tools", "server_label": "s", "tools": []},
    {"type": "mcp_call", "name": "f", "arguments": "{}", "output": "x"},
    {"type": "compaction", "encrypted_content": "opaque"},
    {"type": "tool_search_call", "call_id": "alone", "arguments": {"query": "x"}},
    {"type": "local_shell_call_output", "id": "alone", "output": "x"},
    {"type": "ghost_snapshot", "ghost_commit": {}},
    {"type": "of-2031", "call_id": ["x"]},
    {"type": 5},
    {"type": "additional_tools", "tools": None},
    {"type": "additional_tools", "role": "developer", "tools": [{}, 5, {"type": "function"}, {"type": "web_search"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "opaque"},
]


@pytest.mark.parametrize("item", SAYS_NOTHING, ids=lambda item: str(item)[:40])
def test_items_that_say_nothing_here_are_left_out(live, item):
    assert rendered(live, "responses", item) == rendered(live, "responses")
    assert live.post("/v1/responses", input=[item], max_output_tokens=4).status_code == 200, "and alone"


@pytest.mark.parametrize(
    ("call", "output", "shown"),
    [
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "output": "a.txt"},
            ["<function=local_shell>", '<parameter=command>\n["ls"]', "a.txt"],
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "output": [{"stdout": "a.txt", "stderr": "", "outcome": {}}]},
            ["<function=shell>", '<parameter=commands>\n["ls"]', "a.txt"],
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "status": "completed"},
            ["<function=apply_patch>", "<parameter=path>\na", "<tool_response>\ncompleted"],
        ),
        (
            {"type": "tool_search_call", "arguments": {"query": "x"}},
            {"type": "tool_search_output", "tools": [{"type": "function", "name": "late"}]},
            ["<function=tool_search>", "<parameter=query>\nx", "Tool: late", '"name": "late"'],
        ),
        (
            {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "output": [{"type": "input_image", "image_url": "x"}]},
            ["<parameter=input>\n*** Begin", "[input_image left out"],
        ),
        (
            {"type": "of_2031_call", "arguments": "{"},
            {"type": "of_2031_call_output", "output": None},
            ["<function=of_2031>", "<parameter=arguments>\n{"],
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_pairs_that_the_client_ran_are_call_and_result(live, call, output, shown):
    text = rendered(live, "responses", {"call_id": "c", **call}, {"call_id": "c", **output})
    assert all(piece in text for piece in shown), text


@pytest.mark.parametrize("twice", [False, True])
def test_functions_that_an_item_declares_can_be_called(live, twice):
    late = {"type": "function", "name": "late", "parameters": CITY}
    items = [{"type": "additional_tools", "role": "developer", "tools": [late, {"type": "function", **FUNCTION}]}]
    path, body = responses([*items * (1 + twice), {"role": "user", "content": "hi"}], tool_choice="required")
    for tools in (body.pop("tools"), None):
        response = live.post(path, **body, **({"tools": tools} if tools else {}))
        assert response.status_code != 400, response.text  # the script may break the form, which is a 500
        assert prompt(live).count('"late"') == prompt(live).count('"get_weather"') == 1
        assert live.engine.requests[-1].sampling.constraint is not None


@pytest.mark.parametrize(
    "part", [{"type": "input_image", "image_url": "x"}, {"type": "input_file"}, {"type": "of-2031"}], ids=str
)
def test_parts_of_items_that_can_not_be_read_are_a_line_of_text(live, part):
    item = {"type": "message", "role": "user", "content": [part, {"type": "input_text", "text": "what?"}]}
    assert " left out: only text can be read here]\nwhat?" in rendered(
        live, "responses", item, {"role": "assistant", "content": "ok"}
    )


# A5: the spelling of before there were tools


def test_functions_are_tools(live):
    body = {**OFF, "max_tokens": 99, "functions": [FUNCTION], "messages": [{"role": "user", "content": "CALL-1"}]}
    answer = live.post("/v1/chat/completions", **body).json()["choices"][0]
    called = {"name": "get_weather", "arguments": '{"city": "Oslo, \\"N\\""}'}
    assert answer["finish_reason"] == "function_call" and answer["message"]["function_call"] == called
    assert answer["message"]["tool_calls"][0]["function"] == called and '"get_weather"' in prompt(live)
    chunks = live.events(live.post("/v1/chat/completions", **body, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    pieces = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert pieces[0]["name"] == "get_weather" and "".join(p["arguments"] for p in pieces) == called["arguments"]
    assert sum("name" in piece for piece in pieces) == 1 and choices[-1]["finish_reason"] == "function_call"
    message = answer["message"] | {"tool_calls": None}
    history = [message, {"role": "function", "name": "get_weather", "content": "sun"}]
    text = rendered(live, "chat", *history, tools=None, functions=[FUNCTION], function_call="auto")
    assert CALL in text and "<tool_response>\nsun\n</tool_response>" in text


@pytest.mark.parametrize(
    ("choice", "shown", "forced"),
    [("none", False, False), ("auto", True, False), ({"name": "get_weather"}, True, True)],
)
def test_function_call_is_the_choice_of_a_tool(live, choice, shown, forced):
    body = {**OFF, "functions": [FUNCTION], "messages": [{"role": "user", "content": "hi"}], "function_call": choice}
    live.post("/v1/chat/completions", **body)  # the script does not keep to a forced call
    constraint = live.engine.requests[-1].sampling.constraint
    assert ('"get_weather"' in prompt(live)) == shown and (constraint is not None and constraint.required) == forced


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]}, "functions"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "tool_choice"),
        ({"functions": [FUNCTION], "function_call": {}}, "function_call.name"),
    ],
    ids=str,
)
def test_wrong_functions_are_a_400(live, fields, param):
    response = live.post("/v1/chat/completions", **OFF, messages=[{"role": "user", "content": "hi"}], **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# All of it together: whatever agents put into a history, and whatever order a compaction leaves it in.


def chat_entries() -> list[dict]:
    """As Open WebUI, aider, Cline and opencode send them."""
    parts = [{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "file"}, TEXT, "s", {"type": "thinking"}]
    entries = [m for arguments in ARGUMENTS for m in a_call("chat", arguments)]
    entries += [{"role": role, "content": [part]} for role in ("user", "assistant", "tool", "system") for part in parts]
    entries += [{"role": role, "content": None} for role in ("user", "assistant", "system", "developer", "tool")]
    entries += [
        {"role": "function", "name": "f", "content": "x"},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{"}},
        {"role": "assistant", "content": "", "tool_calls": [{}], "reasoning_content": None, "annotations": []},
        {"role": "assistant", "content": "", "tool_calls": [], "refusal": None, "audio": {"id": "a"}},
        {"role": "assistant", "content": [None, 5, []], "tool_calls": [None, 5]},
        {"role": "tool", "tool_call_id": 5, "content": {"days": 1}},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
    ]
    return entries


def message_entries() -> list[dict]:
    """As Claude Code sends them."""
    blocks = [TEXT, IMAGE, SEARCH, *SERVER_USES, *SERVER_RESULTS, *OTHER_BLOCKS]
    blocks += [
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "redacted_thinking", "data": "x"},
    ]
    blocks += [{"type": "thinking", "thinking": "x", "signature": ""}, {"type": "tool_use"}, {"type": "tool_result"}]
    entries = [m for arguments in ARGUMENTS for m in a_call("messages", arguments)]
    entries += [{"role": role, "content": [block]} for role in ("user", "assistant", "system") for block in blocks]
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True}
    entries += [{"role": "user", "content": [{**result, "content": [block]}]} for block in blocks]
    return [*entries, *({"role": "assistant", "content": content} for content in ([], None, ""))]


def response_entries() -> list[dict]:
    """As Codex sends them."""
    parts = [
        {"type": "input_image"},
        {"type": "input_file"},
        {"type": "refusal", "refusal": "x"},
        {"type": "new"},
        TEXT,
    ]
    entries = [m for arguments in ARGUMENTS for m in a_call("responses", arguments)]
    entries += [
        {"type": "message", "role": role, "content": [part]}
        for role in ("user", "assistant", "developer", "tool")
        for part in parts
    ]
    entries += [{"type": "function_call_output", "call_id": "c", "output": [part]} for part in parts]
    entries += [
        {"type": "function_call", "name": "f", "namespace": 5},
        {"type": "function_call"},
        {"type": "function_call_output"},
    ]
    return [*entries, *SAYS_NOTHING]


ENTRIES = {"chat": chat_entries(), "messages": message_entries(), "responses": response_entries()}
MEDIA_TYPES = ("image_url", "file", "image", "input_image", "input_file")


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_history_of_an_agent_is_refused_twice(live, dialect, data):
    entries = data.draw(st.lists(st.sampled_from(ENTRIES[dialect]), max_size=8))
    path, body = DIALECTS[dialect](entries or [{"role": "user", "content": "hi"}])
    response = live.post(path, **body)
    if response.status_code != 200:  # only for media that the user asks about now
        assert response.status_code == 400 and "this model reads " in response.text, response.text
        assert entries[-1]["role"] == "user" and entries[-1]["content"][0]["type"] in MEDIA_TYPES
    path, body = DIALECTS[dialect]([*entries, {"role": "user", "content": "go on"}])
    response = live.post(path, **body)
    assert response.status_code == 200, (json.dumps(entries), response.text)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_entry_alone_is_accepted(live, dialect):
    for entry in ENTRIES[dialect]:
        rendered(live, dialect, entry)
