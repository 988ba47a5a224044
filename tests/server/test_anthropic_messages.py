"""Anthropic Messages through the real anthropic client: text, thinking, tools, stops, counting, errors, leaving."""

import pytest
from live_server import start
from pydantic import BaseModel
from test_chat import ARGUMENTS, CALLS

from lazily import lazily

anthropic = lazily("anthropic")
USER = [{"role": "user", "content": "hi"}]
THINK = {"type": "enabled", "budget_tokens": 1024}
TOOLS = [
    {
        "name": "weather",
        "description": "Tells the weather",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
        "cache_control": {"type": "ephemeral"},
    }
]
TEXTS = [
    {"match": "fox", "pieces": ["The quick br", "own", " f", "ox", " jumps"]},
    {"match": "ponder", "text": "I should greet.\n</think>\n\nHello!"},
    {"match": "letters", "pieces": list("Let me see.\n</think>\n\nLook.\n\n" + CALLS)},
    {"match": "obey", "text": CALLS[: CALLS.index("</tool_call>") + len("</tool_call>")]},  # nothing else is allowed
    {"match": "call", "text": "Look.\n\n" + CALLS},
    {"match": "JSON-1", "text": '{"city": "Oslo", "days": 2}'},
    {"match": "endless-1", "text": "on and on " * 20},
    {"match": "slow", "text": "word " * 2000, "delay_ms": 5},
    {"text": "Hello there."},
]


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("messages") / "script.json", TEXTS) as server:
        yield server


@pytest.fixture(scope="module")
def client(live):
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ask(client, text="hi", **more):
    more.setdefault("max_tokens", 1000)
    more.setdefault("messages", [{"role": "user", "content": text}])
    return client.messages.create(model="mini", **more)


def streamed(client, text="hi", **more):
    """(the client's final message, all raw events)"""
    more.setdefault("messages", [{"role": "user", "content": text}])
    with client.messages.stream(model="mini", max_tokens=more.pop("max_tokens", 1000), **more) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def both(client, text, **more):
    """Whole and streamed answers must be the same message."""
    whole, (final, _) = ask(client, text, **more), streamed(client, text, **more)
    shown = [
        message.model_dump(include={"content", "stop_reason", "stop_sequence", "usage"}) for message in (whole, final)
    ]
    ids = [[block.id for block in message.content if block.type == "tool_use"] for message in (whole, final)]
    for message in shown:
        for block in message["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
    assert shown[0] == shown[1] and all(len(set(i)) == len(i) for i in ids)
    return whole


def prompt(live) -> str:
    return live.model.tokenizer.decode(live.engine.requests[-1].tokens)


def test_an_answer_and_its_usage(live, client):
    message = both(client, "hi")
    assert [block.text for block in message.content] == ["Hello there."]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "mini")
    assert message.id.startswith("msg_")
    assert client.messages.create(model="default", max_tokens=5, messages=USER).model == "default"
    usage = message.usage
    assert usage.cache_read_input_tokens == 7 and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + 7 == len(live.engine.requests[-1].tokens) and usage.output_tokens > 1


def test_events_come_in_order_and_each_block_is_opened_and_closed(client):
    with client.messages.create(
        model="mini",
        max_tokens=999,
        stream=True,
        thinking=THINK,
        messages=[{"role": "user", "content": "letters"}],
        tools=TOOLS,
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    opened = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use", "tool_use"]
    open_block = None
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
        assert event.index == open_block
        if event.type == "content_block_stop":
            open_block = None
    assert open_block is None


def test_thinking_is_a_block_of_its_own_when_asked_for(client):
    message = both(client, "ponder", thinking=THINK)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("I should greet.", "Hello!")
    assert message.content[0].signature
    _, events = streamed(client, "ponder", thinking=THINK)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas.index("signature_delta") == deltas.count("thinking_delta")


@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "disabled"}}])
def test_without_thinking_the_prompt_closes_it(live, client, fields):
    assert ask(client, "hi", **fields).content[0].type == "text"
    assert prompt(live).endswith("</think>\n\n")


def test_tool_calls(client):
    message = both(client, "call", tools=TOOLS)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in message.content[1:]] == ARGUMENTS
    assert message.content[1].name == "weather" and message.stop_reason == "tool_use"


def test_a_call_that_a_limit_cuts_off_is_not_offered_to_run(client):
    message = ask(client, "letters", tools=TOOLS, thinking=THINK, max_tokens=len("Let me see.Look.") + 60)
    assert message.stop_reason == "max_tokens" and [block.type for block in message.content] == ["thinking", "text"]


def test_a_conversation_with_results_and_thinking_is_replayed(live, client):
    first, _ = streamed(client, "letters", tools=TOOLS, thinking=THINK)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "is_error": True,
            "content": [{"type": "text", "text": "fog"}],
        },
        {"type": "text", "text": "Go on."},
    ]
    history = [
        {"role": "user", "content": "letters"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    ask(client, tools=TOOLS, thinking=THINK, messages=history)
    text = prompt(live)
    assert CALLS in text and "<tool_response>\nsun\n" in text and "<tool_response>\nError: fog\n" in text
    assert text.index("fog") < text.index("Go on.")
    ask(client, tools=TOOLS, thinking=THINK, messages=[*history[:2], {"role": "user", "content": results[:2]}])
    assert "<think>\nLet me see.\n</think>\n\nLook." in prompt(live)  # still the same turn: its reasoning stays


@pytest.mark.parametrize(
    ("choice", "shown"),
    [("auto", True), ("any", True), ("none", False), ("tool", True)],
)
def test_tool_choices(live, client, choice, shown):
    name = {"name": "weather"} if choice == "tool" else {}
    message = ask(client, "obey", tools=TOOLS, tool_choice={"type": choice, **name})
    assert (message.stop_reason == "tool_use") == shown
    assert ("Tells the weather" in prompt(live)) == shown


def test_one_call_at_a_time_can_be_enforced(live, client):
    grammars = []
    for alone in (False, True):
        choice = {"type": "any", "disable_parallel_tool_use": alone}
        assert ask(client, "obey", tools=TOOLS, tool_choice=choice).stop_reason == "tool_use"
        grammars.append(live.engine.requests[-1].sampling.constraint.grammar)
    assert grammars[0] != grammars[1]


class Trip(BaseModel):
    city: str
    days: int


def test_an_answer_in_the_form_of_a_schema(live, client):
    messages = [{"role": "user", "content": "JSON-1"}]
    message = client.messages.parse(model="mini", max_tokens=200, messages=messages, output_format=Trip)
    assert message.parsed_output == Trip(city="Oslo", days=2)
    assert live.engine.requests[-1].sampling.constraint is not None


def test_a_thinking_budget_is_kept(live, client):
    message = ask(client, "endless-1", thinking={"type": "enabled", "budget_tokens": 8}, max_tokens=40)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert 8 <= message.usage.output_tokens_details.thinking_tokens <= 10
    ask(client, "ponder", thinking={"type": "adaptive"}, extra_body={"output_config": {"effort": "low"}})
    assert live.engine.requests[-1].sampling.thinking.tokens == 1024


def test_stop_sequences_and_limits_say_what_happened(client):
    message = both(client, "fox", stop_sequences=["zzz", "own fox"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "The quick br",
        "stop_sequence",
        "own fox",
    )
    assert both(client, "fox", max_tokens=2).stop_reason == "max_tokens"
    assert ask(client, "fox", stop_sequences=["The"]).content == []
    cut = ask(client, "call", tools=TOOLS, stop_sequences=["slo"])  # in the second call, which is left out
    assert [block.type for block in cut.content] == ["text", "tool_use"] and cut.stop_reason == "stop_sequence"


def test_a_full_context_has_its_own_stop_reason(live, client):
    room = 4096 - client.messages.count_tokens(model="mini", messages=USER).input_tokens
    text = "hi" + " x" * (room - 3)
    message = ask(client, text, max_tokens=1000)
    assert message.stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 4096 tokens"):
        ask(client, text * 2)


def test_sampling_fields_reach_the_engine(live, client):
    fields = {"temperature": 0.3, "top_p": 0.5, "top_k": 3}  # no arguments of the client any more, but still sent
    ask(client, max_tokens=17, metadata={"user_id": "u"}, extra_body=fields)
    sampling = live.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.3, 0.5, 3, 17)


def test_count_tokens_is_what_the_engine_gets(live, client):
    fields = {"system": "Be brief.", "tools": TOOLS, "thinking": THINK, "messages": USER}
    counted = client.messages.count_tokens(model="mini", **fields).input_tokens
    ask(client, **fields)
    assert counted == len(live.engine.requests[-1].tokens)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_billing_line_that_changes_does_not_change_the_prompt(live, client, blocks):
    prompts = []
    for cch in ("fa690", "0aaa9"):
        line = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};"
        parts = [line, "You are an agent.", "Rules: x-anthropic-version: 1"]
        system = [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in parts]
        ask(client, system=system if blocks else "\n".join(parts))
        prompts.append(prompt(live))
    assert prompts[0] == prompts[1] and "billing" not in prompts[0]
    assert "You are an agent." in prompts[0] and "Rules: x-anthropic-version: 1" in prompts[0]


def test_a_system_message_on_the_way_keeps_its_place_and_the_prefix(live, client):
    history = [*USER, {"role": "assistant", "content": "Hello there."}]
    ask(client, system="Be brief.", messages=[*history, {"role": "user", "content": "fox"}])
    before = prompt(live)
    late = [{"role": "system", "content": "The mode is now: plan."}, {"role": "user", "content": "fox"}]
    ask(client, system="Be brief.", messages=[*history, *late])
    assert prompt(live).startswith(before[: before.index("<|im_start|>user\nfox")])
    assert "Hello there.<|im_end|>\n<|im_start|>system\nThe mode is now: plan.<|im_end|>" in prompt(live)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": 5}, "system"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"output_config": {"effort": "herculean"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            "output_config.format",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_field_is_a_400_naming_it_in_anthropics_shape(live, fields, param):
    body = {"model": "mini", "max_tokens": 10, "messages": USER, **fields}
    response = live.post("/v1/messages", **{key: value for key, value in body.items() if value is not None})
    assert response.status_code == 400 and response.json()["type"] == "error", response.text
    error = response.json()["error"]
    assert (error["type"], error.get("param")) == ("invalid_request_error", param), error
    assert param.partition("[")[0].partition(".")[0] in error["message"]


def test_errors_have_the_clients_own_types(serve, client):
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(model="claude", max_tokens=5, messages=USER)
    server = serve([{"text": "x"}], max_waiting=0, keys=("secret",), body_limit=1000)
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as other:
        with pytest.raises(anthropic.RateLimitError) as full:
            ask(other)
        with pytest.raises(anthropic.APIStatusError) as long:
            ask(other, "x" * 2000)
    assert full.value.body["error"]["type"] == "rate_limit_error"
    assert (long.value.status_code, long.value.body["error"]["type"]) == (413, "request_too_large")
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        ask(other)


def test_unknown_fields_betas_and_thinking_types_are_accepted(client):
    message = client.beta.messages.create(
        model="mini",
        max_tokens=50,
        betas=["context-management-2025-06-27", "never-heard-of-2030-01-01"],
        context_management={"edits": []},
        thinking={"type": "adaptive"},
        extra_body={"shiny": 1},
        messages=[{"role": "user", "content": "ponder"}],
    )
    assert message.content[-1].text == "Hello!"


def test_a_dead_engine_ends_a_started_stream_with_an_error_event(serve):
    server = serve(TEXTS)
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        with (
            pytest.raises(anthropic.APIStatusError) as caught,
            client.messages.stream(
                model="mini", max_tokens=2000, messages=[{"role": "user", "content": "slow"}]
            ) as stream,
        ):
            for _ in stream.text_stream:
                server.engine.dead = True
        assert caught.value.body["error"]["type"] == "api_error" and "engine died" in caught.value.message
        with pytest.raises(anthropic.InternalServerError) as caught:
            ask(client)
        assert caught.value.status_code == 503


def test_leaving_stops_the_request(live):
    body = {"model": "mini", "max_tokens": 3000, "messages": [{"role": "user", "content": "slow"}]}
    before = len(live.engine.aborted)
    with live.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    live.wait_until(lambda: len(live.engine.aborted) == before + 1)
    live.leave("/v1/messages", body)
    live.wait_until(lambda: len(live.engine.aborted) == before + 2)


def test_a_long_prefill_sends_pings(serve, monkeypatch):
    monkeypatch.setattr("kakera.server.http.sse.HEADERS_AFTER_SECONDS", 0.05)
    monkeypatch.setattr("kakera.server.http.sse.PING_SECONDS", 0.05)
    server = serve(TEXTS)
    server.engine.prefill_seconds = 0.5
    response = server.post("/v1/messages", max_tokens=50, messages=USER, stream=True)
    assert response.text.startswith('event: ping\ndata: {"type": "ping"}\n\n') and "message_stop" in response.text
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        assert streamed(client)[0].content[0].text == "Hello there."
