"""Structured output, enforced tool choices, thinking budgets and the loop guard, through the real openai client.

The model is a script that fails where it would have to break the grammar, so an answer shows
that the grammar allows it.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel
from test_chat import CALLS, OFF, TOOLS, ask, streamed

from lazily import lazily

openai = lazily("openai")

ONE_CALL = CALLS[: CALLS.index("</tool_call>") + len("</tool_call>")]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
BODY = '{"city": "Oslo", "days": 2}'


class Plan(BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    from live_server import start

    streams = [
        {"match": "JSON-1", "text": BODY},
        {"match": "DOTS-1", "pieces": ["some words", " and more", ".", "7-"]},
        {"match": "PONDER-1", "text": "Let me see.\n</think>\n\n" + BODY},
        {"match": "ONE-1", "text": ONE_CALL},
        {"match": "BOTH-1", "text": CALLS},
        {"match": "THOUGHT-1", "text": "I see.\n</think>\n\n" + ONE_CALL},
        {"match": "MUSING-1", "text": "I see. " + ONE_CALL},
        {"match": "LONG-1", "text": "one two three four five six seven eight nine ten"},
        {"text": "Plain words."},
    ]
    with start(model, tmp_path_factory.mktemp("structured") / "script.json", streams) as server:
        yield server


def schema(**more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "plan", "strict": True, "schema": Plan.model_json_schema()}}


def refused(live, **more) -> openai.BadRequestError:
    before = len(live.engine.requests)
    with pytest.raises(openai.BadRequestError) as error:
        ask(live, "JSON-1", **more)
    assert len(live.engine.requests) == before, "it reached the engine"
    return error.value


def extra(**fields) -> dict:
    return {"extra_body": {**OFF, **fields}}


def test_parse_with_a_pydantic_model(live):
    messages = [{"role": "user", "content": "JSON-1"}]
    make = live.client.chat.completions.parse
    answer = make(model="mini", messages=messages, response_format=Plan, extra_body=OFF)
    assert answer.choices[0].message.parsed == Plan(city="Oslo", days=2)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": schema()},
        extra(response_format={"type": "regex", "regex": r"\{.*\}"}),
        extra(response_format={"type": "grammar", "grammar": 'start: "{" /[^}]+/ "}"'}),
        extra(guided_json=Plan.model_json_schema()),
        extra(guided_choice=["nothing", BODY]),
        extra(guided_grammar='root ::= "{" [^}]+ "}"'),
        extra(structured_outputs={"regex": r"\{.*\}"}),
    ],
)
def test_every_spelling_is_enforced(live, fields):
    assert ask(live, "JSON-1", **fields).choices[0].message.content == BODY
    with pytest.raises(openai.InternalServerError, match="not allowed here"):
        ask(live, "words", **fields)


def test_a_text_completion_is_held_to_its_form(live):
    make = live.client.completions.create
    form = {"response_format": schema()}
    assert make(model="mini", prompt="JSON-1", extra_body=form).choices[0].text == BODY
    with pytest.raises(openai.InternalServerError, match="not allowed here"):
        make(model="mini", prompt="words", extra_body=form)


def test_the_form_begins_behind_the_reasoning(live):
    choice = ask(live, "PONDER-1", response_format=schema(), extra_body={}).choices[0]
    assert json.loads(choice.message.content) == json.loads(BODY)
    assert choice.message.reasoning_content == "Let me see."


BAD = [
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}),
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"schema": {"items": [{}]}}}),
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}}),
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"schema": {"maxItems": 10**9}}}),
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}),
    (
        "response_format.json_schema.schema",
        {
            "type": "json_schema",
            "json_schema": {"schema": {"items": {"properties": {f"p{i}": {} for i in range(600)}}}},
        },
    ),
    ("response_format.json_schema", {"type": "json_schema"}),
    ("response_format.regex", {"type": "regex", "regex": "(?=a)b"}),
    ("response_format.regex", {"type": "regex"}),
    ("response_format.grammar", {"type": "grammar", "grammar": "start: nowhere"}),
    ("response_format.type", {"type": "xml"}),
]


@pytest.mark.parametrize(("param", "wish"), BAD)
def test_what_can_not_be_enforced_is_refused_before_it_is_queued(live, param, wish):
    if wish.get("json_schema"):
        wish["json_schema"]["schema"] = {"type": "array", **wish["json_schema"]["schema"]}
        if "pattern" in wish["json_schema"]["schema"]:
            wish["json_schema"]["schema"]["type"] = "string"
    assert refused(live, response_format=wish).param == param
    assert ask(live, "hi").choices[0].message.content == "Plain words."


@pytest.mark.parametrize(("kind", "wish"), [("json", "[" * 100_000), ("grammar", "\ud800")])
def test_text_that_can_not_be_read_is_refused(live, kind, wish):
    body = json.dumps({"prompt": "x", "max_tokens": 1, "structured_outputs": {kind: wish}})
    response = live.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == f"structured_outputs.{kind}"


def test_a_grammar_that_is_too_large_is_refused_with_its_limit(live):
    error = refused(live, **extra(guided_choice=["x" * 600_000]))
    assert error.param == "guided_choice" and "524288" in error.message


NO_END = 'start: "{" start'
MANY = range(2_100)  # rules that may begin at one place; nobody looks there before the first "."
LATE = f"""start: /[a-z ]+/ "." x
x: {" | ".join(f"x{i}" for i in MANY)}
""" + "\n".join(f'x{i}: "{i}" "-"' for i in MANY)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("grammar", [NO_END, "root ::= a\na ::= a"])
def test_a_grammar_without_an_end_is_refused_before_it_is_queued(live, grammar, stream):
    error = refused(live, stream=stream, **extra(response_format={"type": "grammar", "grammar": grammar}))
    assert error.param == "response_format.grammar" and error.code == "invalid_grammar" and "itself" in error.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_on_the_way_is_the_requests_fault_and_nobody_elses(live, stream):
    wish = {"prompt": "DOTS-1", "guided_grammar": LATE, "stream": stream}
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(live.chat, "hi") for _ in range(3)]
        response = live.post("/v1/completions", **wish)
    events = response.text.removeprefix("data: ").strip().split("\n\ndata: ")
    assert (response.status_code, len(events) > 1) == ((200, True) if stream else (400, False))
    assert not stream or json.loads(events[0])["choices"][0]["text"] == "some"
    error = json.loads(events[-1])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_grammar")
    assert "beyond token" in error["message"] and "more than 2,000 alternatives" in error["message"]
    assert all(other.result().json()["choices"][0]["message"]["content"] == "Plain words." for other in others)


def test_a_schema_that_is_only_itself_says_so(live):
    wish = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    error = refused(live, response_format=wish)
    assert error.param == "response_format.json_schema.schema" and "$ref that leads to itself" in error.message


def test_two_forms_at_once_are_refused(live):
    assert refused(live, response_format={"type": "json_object"}, **extra(guided_regex="a")).param == "guided_regex"


def test_a_pattern_with_an_escaped_mark_is_enforced(live):
    wish = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": r"^hello\!$"}}}
    with pytest.raises(openai.InternalServerError) as error:
        ask(live, "JSON-1", response_format=wish)
    assert "not allowed here" in str(error.value)


@pytest.mark.parametrize("tools", [TOOLS, STRICT])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_is_made(live, tools, choice):
    message = ask(live, "ONE-1", tools=tools, tool_choice=choice).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "123", "days": 2}
    with pytest.raises(openai.InternalServerError, match="not allowed here"):
        ask(live, "words", tools=tools, tool_choice=choice)


def test_one_call_at_most(live):
    options = {"tools": TOOLS, "tool_choice": "required"}
    assert len(ask(live, "BOTH-1", **options).choices[0].message.tool_calls) == 2
    assert len(ask(live, "ONE-1", parallel_tool_calls=False, **options).choices[0].message.tool_calls) == 1
    with pytest.raises(openai.InternalServerError, match="does not follow"):
        ask(live, "THOUGHT-1", extra_body={}, **options | {"tools": [tool("other")]})


def tool(name: str, **parameters) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_tools_of_one_name_are_refused(live):
    for choice in ("none", "auto", "required"):
        error = refused(live, tools=[tool("a"), tool("b"), tool("a", type="object")], tool_choice=choice)
        assert error.param == "tools" and "several tools are named 'a'" in error.message


@pytest.mark.parametrize("text", ["THOUGHT-1", "MUSING-1"])
def test_a_demanded_call_may_follow_or_end_the_reasoning(live, text):
    content, reasoning, finish, _ = streamed(live, text, tools=TOOLS, tool_choice="required", extra_body={})
    assert (content, reasoning, finish) == ("", "I see.", "tool_calls")


def test_tools_and_a_form_leave_the_choice_between_them(live):
    options = {"tools": TOOLS, "response_format": schema()}
    assert json.loads(ask(live, "JSON-1", **options).choices[0].message.content) == json.loads(BODY)
    assert ask(live, "ONE-1", **options).choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.InternalServerError):
        ask(live, "words", **options)


def test_a_strict_tool_that_can_not_be_enforced_is_refused_and_another_is_not(live):
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    wish = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}
    assert refused(live, tools=[wish]).param.startswith("tools")
    assert ask(live, "hi", tools=[tool("f", **odd)]).choices[0].message.content == "Plain words."


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_budget": 3}, 3),
        ({"chat_template_kwargs": {"thinking_budget": 3}}, 3),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "low", "thinking_budget": 3}, 3),
        ({"reasoning_effort": "max"}, None),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, 1024),
        ({"reasoning": {"max_tokens": 3}}, 3),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, 1024),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, 3),
        ({"thinking": {"type": "enabled"}, "reasoning": {}}, None),
        ({}, None),
        ({"thinking_budget": 0}, None),  # the template's own way to think about nothing
        ({"reasoning_effort": "none"}, None),
    ],
)
def test_a_budget_ends_the_reasoning(live, fields, budget):
    answer = ask(live, "LONG-1", extra_body=fields)
    sampled = live.engine.requests[-1].sampling.thinking
    assert (sampled.tokens if sampled else None) == budget
    message, usage = answer.choices[0].message, answer.usage
    reasoning = getattr(message, "reasoning_content", "")
    if budget == 3:
        assert reasoning and message.content.endswith("nine ten") and not message.content.startswith("one")
        assert usage.completion_tokens_details.reasoning_tokens == 3 + 2  # and a line break, and the closing tag
    elif fields.get("thinking_budget") == 0 or fields.get("reasoning_effort") == "none":
        assert not reasoning and usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("fields", [{"reasoning_effort": "huge"}, {"thinking_budget": -1}, {"thinking_budget": "9"}])
def test_a_wrong_budget_names_its_field(live, fields):
    assert refused(live, extra_body=fields).param == next(iter(fields))
    for wish in ("9", 2**70):
        nested = {"chat_template_kwargs": {"thinking_budget": wish}}
        assert refused(live, extra_body=nested).param == "chat_template_kwargs.thinking_budget"


@pytest.mark.parametrize(
    ("fields", "guarded"), [({}, True), ({"loop_guard": False}, False), ({"ignore_eos": True, "max_tokens": 2}, False)]
)
def test_the_loop_guard_is_on_unless_it_is_switched_off(live, fields, guarded):
    live.chat("hi", **fields)
    assert live.engine.requests[-1].sampling.loop_guard is guarded
