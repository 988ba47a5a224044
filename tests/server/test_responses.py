"""OpenAI Responses through the real openai client: text, reasoning, calls, replay, usage, errors, leaving."""

import json

import pytest
from live_server import start
from test_anthropic_messages import TEXTS, Trip
from test_chat import ARGUMENTS, CALLS

from lazily import lazily

openai = lazily("openai")

OFF = {"effort": "none"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("responses") / "script.json", TEXTS) as server:
        yield server


def ask(live, text="hi", **more):
    more.setdefault("reasoning", OFF)
    return live.client.responses.create(model="mini", input=text, **more)


def streamed(live, text="hi", **more):
    more.setdefault("reasoning", OFF)
    with live.client.responses.stream(model="mini", input=text, **more) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def shape(response) -> list:
    """The output without ids."""
    ids = {"id", "call_id", "parsed", "parsed_arguments"}
    items = [item.model_dump(exclude_none=True) for item in response.output]
    contents = [{k: v for k, v in part.items() if k not in ids} for item in items for part in item.get("content", [])]
    return [contents, *({k: v for k, v in item.items() if k not in {*ids, "content"}} for item in items)]


def both(live, text, **more):
    """Whole and streamed answers must be the same response."""
    whole, events = ask(live, text, **more), streamed(live, text, **more)
    last = events[-1].response
    assert shape(whole) == shape(last) and whole.usage == last.usage and whole.status == last.status
    assert events[-1].type == f"response.{whole.status}"
    assert [event.item.id for event in events if event.type == "response.output_item.done"] == [
        i.id for i in last.output
    ]
    return whole, events


def prompt(live) -> str:
    return live.model.tokenizer.decode(live.engine.requests[-1].tokens)


def test_an_answer_its_events_and_its_usage(live):
    response, events = both(live, "hi")
    assert response.output_text == "Hello there." and response.status == "completed" and response.store is False
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    usage = response.usage
    assert usage.input_tokens == len(live.engine.requests[-1].tokens)
    assert usage.input_tokens_details.cached_tokens == 7 and usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_reasoning_is_an_item_of_its_own_and_counted(live):
    response, events = both(live, "ponder", reasoning={"effort": "medium"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "I should greet." and response.output_text == "Hello!"
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "I should greet."
    before = len(live.model.tokenizer.encode("I should greet.\n"))
    assert 0 < before <= response.usage.output_tokens_details.reasoning_tokens <= before + 2


def test_reasoning_is_on_unless_switched_off(live):
    ask(live, "ponder", reasoning=None)
    assert prompt(live).endswith("<think>\n")
    ask(live, "hi")
    assert prompt(live).endswith("</think>\n\n")


def test_function_calls(live):
    response, events = both(live, "call", tools=[WEATHER])
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    calls = response.output[1:]
    assert [json.loads(call.arguments) for call in calls] == ARGUMENTS
    assert len({call.call_id for call in calls}) == 2 and {call.name for call in calls} == {"weather"}
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == [item.type for item in response.output]
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(arguments) for arguments in done] == ARGUMENTS


def test_a_conversation_with_reasoning_and_results_is_replayed(live):
    first = ask(live, "letters", tools=[WEATHER], reasoning=None)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = first.output[2:]
    history = [
        {"role": "user", "content": "letters"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "fog"}],
        },
    ]
    ask(live, history, tools=[WEATHER], instructions="Be brief.", reasoning=None)
    text = prompt(live)
    assert "<think>\nLet me see.\n</think>\n\nLook.\n\n" + CALLS in text
    assert "<tool_response>\nsun\n</tool_response>\n<tool_response>\nfog" in text and "Be brief." in text


def test_tools_that_only_openai_runs_are_left_out_and_logged_once(live, caplog):
    others = [
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ]
    for _ in range(2):
        ask(live, "call", tools=[*others, WEATHER])
    assert "Tells the weather" in prompt(live) and "apply_patch" not in prompt(live)
    assert '"strict"' not in prompt(live)
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(lines) == 3 and "'web_search'" in lines[0]


def test_functions_in_a_namespace_are_called_by_both_names(serve):
    call = "<tool_call>\n<function=mcp__sky__weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    server = serve([{"text": call}])
    space = {"type": "namespace", "name": "mcp__sky__", "description": "Skies", "tools": [WEATHER]}
    item = ask(server, "x", tools=[space]).output[0]
    assert (item.name, item.namespace, json.loads(item.arguments)) == ("weather", "mcp__sky__", {"city": "Oslo"})
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
    ask(server, [{"role": "user", "content": "x"}, item.model_dump(exclude_none=True), output], tools=[space])
    assert call in prompt(server)


def test_custom_calls_of_another_model_can_be_replayed(live):
    items = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    ask(live, items, tools=[WEATHER])
    assert "<parameter=input>\n*** Begin\n</parameter>" in prompt(live) and "done" in prompt(live)


def test_a_limit_makes_the_response_incomplete(live):
    response, _ = both(live, "fox", max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.output_text


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "name": "weather"}])
def test_tool_choices(live, choice):
    response = ask(live, "obey", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["message" if choice == "none" else "function_call"]
    assert ("Tells the weather" in prompt(live)) == (choice != "none")
    assert response.parallel_tool_calls is False and response.tools[0].name == "weather"


def test_an_answer_in_the_form_of_a_schema(live):
    answer = live.client.responses.parse(model="mini", input="JSON-1", text_format=Trip, reasoning=OFF)
    assert answer.output_parsed == Trip(city="Oslo", days=2)
    assert answer.text.format.type == "json_schema"
    form = {"format": {"type": "json_object"}}
    answer = live.client.responses.create(model="mini", input="JSON-1", text=form, reasoning=OFF)
    assert json.loads(answer.output_text)["days"] == 2
    assert live.engine.requests[-1].sampling.constraint is not None


def test_effort_is_a_thinking_budget(live):
    ask(live, "ponder", reasoning={"effort": "low"})
    assert live.engine.requests[-1].sampling.thinking.tokens == 1024


def test_sampling_fields_reach_the_engine_and_come_back(live):
    response = ask(live, temperature=0.3, top_p=0.5, max_output_tokens=17, store=True, metadata={"a": "b"})
    sampling = live.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.5, 17)
    assert (response.temperature, response.top_p, response.metadata) == (0.3, 0.5, {"a": "b"})
    assert response.store is False


def test_what_coding_agents_send_by_default_is_accepted(live):
    body = {
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [WEATHER],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    response = live.post("/v1/responses", model="mini", **body)
    assert response.status_code == 200 and "response.completed" in response.text
    assert "You are an agent.\n\nRules." in prompt(live)


def test_a_developer_message_on_the_way_keeps_its_place(live):
    items = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "developer", "user")]
    ask(live, items, instructions="Be brief.")
    text = prompt(live)
    assert "Be brief.\n\ndeveloper" in text and "assistant<|im_end|>\n<|im_start|>system\ndeveloper<|im_end|>" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "word " * 5000}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"tool_choice": {"type": "function", "name": "f", "namespace": ["n"]}}, "tool_choice.namespace"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}}, "text.format"),
        ({"reasoning": {"effort": "herculean"}}, "reasoning.effort"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_field_is_a_400_naming_it(live, fields, param):
    body = {"model": "mini", "input": "hi", **fields}
    response = live.post("/v1/responses", **{key: value for key, value in body.items() if value is not None})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error


def test_refusals_have_their_own_status_on_streams_too(serve):
    server = serve(TEXTS, max_waiting=0)
    with pytest.raises(openai.RateLimitError):
        ask(server, stream=True)
    with pytest.raises(openai.NotFoundError):
        server.client.responses.create(model="gpt-9", input="x")


def test_a_dead_engine_ends_a_started_stream_with_response_failed(serve):
    server = serve(TEXTS)
    with server.client.responses.create(model="mini", input="slow", reasoning=OFF, stream=True) as stream:
        events = []
        for event in stream:
            events.append(event)
            server.engine.dead = True
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "engine_died" and last.response.output[0].status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.InternalServerError):
        ask(server)


def test_a_failure_before_the_first_token_is_told_after_the_headers(serve, monkeypatch):
    monkeypatch.setattr("kakera.server.http.sse.HEADERS_AFTER_SECONDS", 0.05)
    server = serve(TEXTS)
    server.engine.prefill_seconds = 30
    with server.client.responses.create(model="mini", input="x", stream=True) as stream:
        server.engine.dead = True
        kinds = [event.type for event in stream]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


def test_a_long_prefill_shows_life_in_events(serve, monkeypatch):
    """Codex counts events alone, and gives up when they rest."""
    monkeypatch.setattr("kakera.server.http.sse.HEADERS_AFTER_SECONDS", 0.05)
    monkeypatch.setattr("kakera.server.http.sse.PING_SECONDS", 0.05)
    server = serve(TEXTS)
    server.engine.prefill_seconds = 0.5
    events = streamed(server)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds.count("response.created") == 1
    assert kinds[1:4] == ["response.in_progress"] * 3, "one with the first, two while nothing else came"
    assert events[-1].response.output_text == "Hello there."


def test_leaving_stops_the_request(live):
    body = {"model": "mini", "input": "slow", "reasoning": OFF}
    before = len(live.engine.aborted)
    with live.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
    live.wait_until(lambda: len(live.engine.aborted) == before + 1)
    live.leave("/v1/responses", body)
    live.wait_until(lambda: len(live.engine.aborted) == before + 2)
