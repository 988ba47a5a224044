"""Known fields are checked by type and range, in OpenAI's error shape; a bad request never hurts the next one."""

import json

import pytest

USER = [{"role": "user", "content": "hi"}]

BAD_CHAT = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 25}, "logprobs"),
    ({"presence_penalty": 9}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [999999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"x": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 500}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda value: str(value)[:60])
def test_a_bad_chat_field_is_a_400_naming_it(live, fields, param):
    response = live.post("/v1/chat/completions", **{"model": "mini", "messages": USER, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, 999999]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 25}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
    ids=str,
)
def test_a_bad_completion_field_is_a_400_naming_it(live, fields, param):
    response = live.post("/v1/completions", **{"model": "mini", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"].split("[")[0] == param


def test_after_all_that_a_good_request_is_answered(live):
    assert live.chat().json()["choices"][0]["message"]["content"] == "Hello there."


@pytest.mark.parametrize("body", ["{", "", "[]", "null", '{"messages": NaN}', '"x"'])
def test_bodies_that_are_no_request_are_a_400(live, body):
    response = live.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_not_a_number_is_refused(live):
    body = '{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    response = live.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


def test_an_unknown_model_is_a_404_and_default_is_known(live):
    response = live.post("/v1/chat/completions", model="gpt-9", messages=USER)
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    assert live.post("/v1/completions", model="default", prompt="a").status_code == 200
    assert live.post("/v1/completions", prompt="a").status_code == 200


def test_unknown_fields_are_accepted_and_logged_once(live, caplog):
    for _ in range(2):
        assert live.chat(shiny_new_field=1).status_code == 200
    assert [r.getMessage() for r in caplog.records if "shiny_new_field" in r.getMessage()] == [
        "request field 'shiny_new_field' is not known and has no effect"
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "s"}],
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": "u"}, {"role": "system", "content": "a"}],
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": "u", "name": "bob"}],
    ],
)
def test_odd_message_lists_are_rendered(live, messages):
    assert live.post("/v1/chat/completions", messages=messages).status_code == 200


def test_a_prompt_that_can_never_fit_is_refused_before_the_engine_sees_it(live):
    before = len(live.engine.requests)
    for path, body in (
        ("/v1/completions", {"prompt": [5] * 4096}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ):
        response = live.post(path, **body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "4096" in response.json()["error"]["message"]
    assert len(live.engine.requests) == before


def test_the_last_place_of_the_context_is_used(live):
    response = live.post("/v1/completions", prompt=[5] * 4095, max_tokens=50)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 1


def test_absent_max_tokens_means_the_rest_of_the_context(live):
    live.chat()
    request = live.engine.requests[-1]
    assert request.sampling.max_tokens == 4096 - len(request.tokens)


def test_defaults_come_from_the_generation_config_and_the_request_wins(live):
    live.chat()
    sampling = live.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    live.chat(temperature=0, top_k=-1, seed=5, logit_bias={"7": -1.5}, stop_token_ids=[9], min_p=0.1)
    sampling = live.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.min_p) == (0, 0, 5, 0.1)
    assert sampling.logit_bias == ((7, -1.5),)
    assert set(sampling.stop_token_ids) == {*live.model.eos, 9}
    live.chat(ignore_eos=True, max_tokens=5)
    assert live.engine.requests[-1].sampling.stop_token_ids == ()


def test_two_requests_without_a_seed_differ(live):
    live.chat()
    live.chat()
    first, second = (request.sampling.seed for request in live.engine.requests[-2:])
    assert first != second


def test_unknown_routes_have_the_error_shape(live):
    assert live.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert live.http.get("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v2/chat/completions", None),
        ("/v1/engines", None),
    ],
)
def test_a_base_url_with_or_without_v1_too_much_is_told_what_is_served(live, asked, meant):
    response = live.post(asked, messages=USER)
    said = response.json()["error"]["message"]
    assert response.status_code == 404 and asked in said
    assert f"; {meant} is served" in said if meant else "is served" not in said


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/{}", {}),
        ("/v1/chat/completions", {"model": "{}", "messages": USER}),
        ("/v1/chat/completions", {"messages": [{"role": "{}", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": USER, "structured_outputs": {"{}": 1}}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function", "function": {"name": "{}"}}] * 2}),
        ("/v1/responses", {"input": [{"role": "{}", "content": "hi"}]}),
        ("/v1/messages", {"model": "{}", "messages": USER, "max_tokens": 1}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tools": [{"type": "{}", "name": "f"}]}),
    ],
)
def test_an_error_gives_no_megabytes_back(live, path, body):
    """It names what was sent; how it begins and what to do stay."""
    long = "x" * 50_000
    response = live.http.post(path.format(long), content=json.dumps({"model": "mini", **body}).replace("{}", long),
                              headers={"content-type": "application/json"})  # fmt: skip
    error = response.json()["error"]
    assert 400 <= response.status_code < 500 and len(response.content) < 4000
    assert 1000 < len(error["message"]) < 2000 and " ... " in error["message"]


def test_a_long_body_is_a_413_with_and_without_a_declared_length(serve):
    server = serve([{"text": "x"}], body_limit=1000)
    assert server.chat("x" * 2000).status_code == 413
    chunks = (b"x" * 100 for _ in range(20))
    assert server.http.post("/v1/completions", content=chunks).status_code == 413
    assert server.chat("x").status_code == 200


def test_an_api_key_guards_the_model_and_not_its_health(serve):
    server = serve([{"text": "x"}], keys=("secret",))
    assert server.chat().status_code == 401
    assert server.http.get("/health").status_code == 200
    for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    assert server.http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_a_full_queue_is_a_429_that_says_when_to_come_back(serve):
    server = serve([{"text": "x"}], max_waiting=0)
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "queue_full"
