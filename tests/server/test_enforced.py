"""What a body asks of its answer is enforced or refused, in every dialect, streamed and whole, never dropped."""

import json

import pytest

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SAID = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": SAID, "max_tokens": 20, "enable_thinking": False},
    TEXT: {"prompt": "hi", "max_tokens": 20},
    MESSAGES: {"messages": SAID, "max_tokens": 20},
    RESPONSES: {"input": "hi", "max_output_tokens": 20, "reasoning": {"effort": "none"}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "x", "strict": True, "schema": SCHEMA}
FORMS = [
    {"type": "json_object", "schema": SCHEMA},
    {"type": "json_object", "json_schema": NAMED},
    {"type": "json_object", "json_schema": {"schema": SCHEMA}},
    {"type": "json_schema", "json_schema": NAMED},
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "json_schema", **NAMED},
]
WRONG_FORMS = [
    {"type": "json_object", "json_schema": SCHEMA},  # the schema itself where its wrapper belongs
    {"type": "json_schema", "json_schema": SCHEMA},
    {"type": "json_schema", "json_schema": {"json_schema": NAMED}},
    {"type": "json_schema", "json_schema": NAMED, "schema": SCHEMA},
    {"type": "json_schema", "name": "x"},
    {"type": "json_object", "grammar": "start: /a/"},
    {"type": "json_object", "regex": "a"},
    {"type": "json_object", "properties": {}},
    {"type": "json_object", "schema": []},
    {"type": "text", "schema": SCHEMA},
    {"type": "regex", "regex": "a", "schema": SCHEMA},
    {"type": "grammar", "grammar": "start: /a/", "pattern": "a"},
    {"type": "json", "schema": SCHEMA},
    {"schema": SCHEMA},
]
WRONG_WISHES = [
    *({"structured_outputs": wish} for wish in ({"json_object": False}, {}, [], 0, "yes", True)),
    *({"structured_outputs": {"json_object": wish}} for wish in (0, 1, [], {}, "yes", "")),
    *({"structured_outputs": {"json": wish}} for wish in (5, [], "", "no json")),
    *({"structured_outputs": {"choice": wish}} for wish in ([], {}, "a", [1], [""], 0)),
    *({"structured_outputs": {kind: wish}} for kind in ("regex", "grammar") for wish in ("", 0, [], {}, False)),
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"guided_json": []},
    {"guided_regex": ""},
    {"guided_choice": []},
    {"json_schema": SCHEMA},
    {"grammar": 'root ::= "a"'},
    {"format": "json"},
    {"format": SCHEMA},
    {"regex": "a"},
    {"ebnf": 'root ::= "a"'},
    {"allowed_token_ids": [5]},
    {"bad_words": ["hi"]},
    {"logits_processors": ["x"]},
    *({name: SCHEMA} for name in ("schema", "response_schema")),
    *({name: True} for name in ("json_object", "json_mode")),
    *({name: [5]} for name in ("banned_tokens", "force_words", "suppress_tokens", "banned_strings")),
    {"extra_body": {"guided_json": SCHEMA}},
    {"mirostat": 2},
    {"use_beam_search": True},
    *({"logit_bias": bias} for bias in ({"٣": 1}, {"７": 1}, {"007": 1}, {"7": 1, "007": 2}, {"+7": 1}, {" 7": 1})),
    {"logit_bias": {"": 1}},
]  # fmt: skip


@pytest.fixture(scope="module")
def strict(model, tmp_path_factory):
    from live_server import start

    streams = [{"text": '{"a": 5}'}]
    with start(model, tmp_path_factory.mktemp("enforced") / "script.json", streams) as server:
        yield server


@pytest.fixture(scope="module")
def loose(model, tmp_path_factory):
    """What it says breaks every form here."""
    from live_server import start

    streams = [{"text": '{"b": 5}'}]
    with start(model, tmp_path_factory.mktemp("enforced") / "script.json", streams) as server:
        yield server


def form_of(route: str, form: dict) -> list[dict]:
    """The fields that ask for it: the dialect's own and chat's."""
    ours = [{"response_format": form}]
    return ours + {RESPONSES: [{"text": {"format": form}}], MESSAGES: []}.get(route, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", BODIES)
def test_a_schema_is_enforced_wherever_a_client_puts_it(strict, loose, route, form, stream):
    for fields in form_of(route, form):
        good = strict.post(route, **BODIES[route], **fields, stream=stream)
        assert good.status_code == 200 and "5" in good.text and "not allowed" not in good.text
        bad = loose.post(route, **BODIES[route], **fields, stream=stream)
        assert "not allowed here" in bad.text


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_form_of_messages_has_two_names(strict, loose, field):
    form = {"type": "json_schema", "schema": SCHEMA}
    wish = {field: {"format": form} if field == "output_config" else form}
    assert strict.post(MESSAGES, **BODIES[MESSAGES], **wish).status_code == 200
    assert "not allowed here" in loose.post(MESSAGES, **BODIES[MESSAGES], **wish).text
    twice = {"output_format": form, "output_config": {"format": form}}
    assert strict.post(MESSAGES, **BODIES[MESSAGES], **twice).status_code == 400
    wrong = {"output_config": {"format": {**form, "regex": "a"}}}
    assert strict.post(MESSAGES, **BODIES[MESSAGES], **wrong).status_code == 400


@pytest.mark.parametrize("wish", [*({"response_format": form} for form in WRONG_FORMS), *WRONG_WISHES])
@pytest.mark.parametrize("route", BODIES)
def test_what_is_not_enforced_is_a_400_that_names_the_field(strict, route, wish):
    field = next(iter(wish))
    for stream in (False, True):
        answer = strict.post(route, **BODIES[route], **wish, stream=stream)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["param"].partition(".")[0].partition("[")[0] == field and field in error["message"]


@pytest.mark.parametrize(
    ("routes", "wish", "nothing"),
    [
        ((CHAT, TEXT, MESSAGES), {"text": {"format": FORMS[0]}}, {"text": {"format": {"type": "text"}}}),
        ((CHAT, TEXT, RESPONSES), {"output_config": {"format": FORMS[0]}}, {"output_config": {"effort": "low"}}),
        ((CHAT, TEXT, RESPONSES), {"stop_sequences": ["a"]}, {"stop_sequences": []}),
        ((MESSAGES, RESPONSES), {"n": 2}, {"n": 1}),
        ((MESSAGES, RESPONSES), {"logprobs": True}, {"logprobs": False}),
        ((TEXT, MESSAGES, RESPONSES), {"top_logprobs": 2}, {"top_logprobs": 0}),
        ((CHAT, MESSAGES, RESPONSES), {"echo": True}, {"echo": False}),
    ],
)
def test_fields_of_another_dialect_are_refused_where_they_would_be_dropped(strict, routes, wish, nothing):
    for route in routes:
        answer = strict.post(route, **BODIES[route], **wish)
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(next(iter(wish)))
        assert strict.post(route, **BODIES[route], **nothing).status_code == 200


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_responses_names_its_own_field(strict, form):
    error = strict.post(RESPONSES, **BODIES[RESPONSES], text={"format": form}).json()["error"]
    assert error["param"] == "text.format" and "text.format" in error["message"]


@pytest.mark.parametrize("route", BODIES)
def test_two_forms_are_one_too_many(strict, route):
    for fields in form_of(route, FORMS[0])[1:]:
        answer = strict.post(route, **BODIES[route], **fields, response_format=FORMS[0])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize(
    "nothing",
    [
        *({field: None} for field in ("response_format", "structured_outputs", "grammar", "bad_words", "guided_json")),
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"grammar": ""},
        {"bad_words": [], "extra_body": {}, "json_mode": False},
        {"mirostat": 0, "typical_p": 1.0, "use_beam_search": False, "skip_special_tokens": True},
        {"suffix": "", "best_of": 1},
        {"service_tier": "auto", "mine": {"own": 1}},
    ],
)
@pytest.mark.parametrize("route", BODIES)
def test_values_that_ask_for_nothing_are_let_through(strict, route, nothing):
    assert strict.post(route, **BODIES[route], **nothing).status_code == 200


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
def test_agents_dialects_take_what_they_have_no_name_for(strict, route):
    wish = {"seed": 7, "min_p": 0.5, "logit_bias": {"7": -100}, "stop": ["zzz"], "min_tokens": 2}
    assert strict.post(route, **BODIES[route], **wish).status_code == 200
    sampling = strict.engine.requests[-1].sampling
    assert (sampling.seed, sampling.min_p, sampling.min_tokens) == (7, 0.5, 2)
    assert sampling.logit_bias == ((7, -100.0),)
    for name in ("seed", "min_p"):
        error = strict.post(route, **BODIES[route], **{name: "x"}).json()["error"]
        assert error["param"] == name


def test_errors_name_the_field_that_was_sent(strict):
    for kind, wish in {
        "json": {"type": "strin"},
        "regex": "(?=a)",
        "choice": ["x" * 600_000],
        "grammar": "a: b",
    }.items():
        error = strict.post(TEXT, **BODIES[TEXT], **{f"guided_{kind}": wish}).json()["error"]
        assert error["param"] == f"guided_{kind}" and f"guided_{kind}.{kind}" not in error["message"]


@pytest.mark.parametrize(
    ("route", "field"), [(CHAT, "stop"), (TEXT, "stop"), (MESSAGES, "stop_sequences"), (RESPONSES, "stop")]
)
def test_too_many_stops_name_the_limit(strict, route, field):
    error = strict.post(route, **BODIES[route], **{field: [str(i) for i in range(17)]}).json()["error"]
    assert error["param"] == field and "16" in error["message"]
    assert strict.post(route, **BODIES[route], **{field: [str(i) * 9 for i in range(16)]}).status_code == 200


@pytest.mark.parametrize("wish", [{"best_of": 3}, {"n": 2, "best_of": 3}, {"suffix": "end"}])
def test_fields_of_text_completions_without_effect_are_refused(strict, wish):
    answer = strict.post(TEXT, **BODIES[TEXT], **wish)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == [*wish][-1]
    assert strict.post(TEXT, **BODIES[TEXT], n=2, best_of=2).status_code == 200


@pytest.mark.parametrize("name", ["max_new_tokens", "n_predict", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
def test_the_limit_under_another_name_is_refused_unless_the_right_one_is_there(strict, route, name):
    ours = {CHAT: ("max_tokens", "max_completion_tokens"), TEXT: ("max_tokens",), RESPONSES: ("max_output_tokens",)}
    body = {field: value for field, value in BODIES[route].items() if not field.startswith("max_")}
    known = name in ours[route]
    answer = strict.post(route, **body, **{name: 3})
    assert answer.status_code == (200 if known else 400) and (known or answer.json()["error"]["param"] == name)
    assert strict.post(route, **{**BODIES[route], name: 3}).status_code == 200
    assert strict.post(route, **body, **{name: -1}).status_code == (400 if known else 200), "-1 is no limit elsewhere"


def test_a_union_of_refs_is_enforced(strict, loose):
    one = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    schema = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/N"}], "$defs": {"A": one, "N": {"type": "null"}}}
    wish = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    assert strict.post(CHAT, **BODIES[CHAT], **wish).status_code == 200
    assert "not allowed here" in loose.post(CHAT, **BODIES[CHAT], **wish).text
    schema["oneOf"] = [{"$ref": "#/$defs/A"}] * 2
    error = strict.post(CHAT, **BODIES[CHAT], **json.loads(json.dumps(wish))).json()["error"]
    assert error["code"] == "invalid_grammar" and "write anyOf" in error["message"]


@pytest.mark.parametrize("route", BODIES)
def test_too_many_stop_tokens_name_the_limit(strict, route):
    for count, status in ((1024, 200), (1025, 400), (100_000, 400)):
        answer = strict.post(route, **BODIES[route], stop_token_ids=[9] * count)
        assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == "stop_token_ids" and "1024" in error["message"]
