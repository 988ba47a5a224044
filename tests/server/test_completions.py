"""Text completions: prompts as text and as ids, echo with log-probabilities, streams."""

import pytest


def test_text_and_token_prompts_reach_the_engine_alike(live):
    ids = live.model.tokenizer.encode("Once upon")
    for prompt in ("Once upon", ids):
        answer = live.client.completions.create(model="mini", prompt=prompt)
        assert answer.choices[0].text == "Hello there." and answer.choices[0].finish_reason == "stop"
        assert live.engine.requests[-1].tokens.tolist() == ids


def test_several_prompts_are_answered_in_order(serve):
    server = serve([{"match": str(i), "text": f"answer {i}"} for i in range(4)], max_waiting=20)
    answer = server.client.completions.create(model="mini", prompt=["0", "1", "2", "3"])
    assert [(c.index, c.text) for c in answer.choices] == [(i, f"answer {i}") for i in range(4)]
    answer = server.client.completions.create(model="mini", prompt=[server.model.tokenizer.encode("2")] * 2, n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(i, "answer 2") for i in range(4)]
    many = server.client.completions.create(model="mini", prompt=["3"] * 60)
    assert len(many.choices) == 60 and {c.text for c in many.choices} == {"answer 3"}


@pytest.mark.parametrize("text", ["<|im_start|>user\nWho?<|im_end|>\n", "<think>\n\n</think>\n\n", "a<|endoftext|>b"])
@pytest.mark.parametrize("wish", [{}, {"parse_special": None}, {"parse_special": True}, {"parse_special": False}])
def test_spelled_control_tokens_in_a_raw_prompt_are_the_tokens_unless_asked_otherwise(live, text, wish):
    special = wish.get("parse_special") is not False
    ids = live.model.tokenizer.encode(text, allow_special=special)
    assert (len(ids) < len(live.model.tokenizer.encode(text))) is special
    for prompt in (text, [text, text]):
        live.post("/v1/completions", prompt=prompt, **wish)
        assert live.engine.requests[-1].tokens.tolist() == ids
    assert live.post("/tokenize", prompt=text, **wish).json()["tokens"] == ids
    for path in ("/v1/chat/completions", "/v1/messages"):
        before = live.model.tokenizer.encode(text)
        live.post(path, messages=[{"role": "user", "content": text}], max_tokens=1)
        assert str(before[1:-1])[1:-1] in str(live.engine.requests[-1].tokens.tolist()), "a message spells a token"


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_limit_a_completion_ends_soon(live, stream):
    live.post("/v1/completions", prompt="endless", stream=stream, ignore_eos=True)
    assert live.engine.requests[-1].sampling.max_tokens == 16
    live.post("/v1/completions", prompt=[[5], [6]], stream=stream)
    assert {request.sampling.max_tokens for request in live.engine.requests[-2:]} == {16}
    live.post("/v1/completions", prompt="a", max_tokens=100, stream=stream)
    assert live.engine.requests[-1].sampling.max_tokens == 100


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_echo(live, stream):
    options = {"prompt": "a fox", "stop": ["own fox"], "echo": True, "stream": stream}
    response = live.post("/v1/completions", **options)
    if stream:
        choices = [chunk["choices"][0] for chunk in live.events(response)]
        assert "".join(choice["text"] for choice in choices) == "a foxThe quick br"
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert response.json()["choices"][0]["text"] == "a foxThe quick br"


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_as_evaluation_tools_ask_for_it(live, max_tokens, stream):
    text = "word" + " word" * 299
    ids = live.model.tokenizer.encode(text)
    response = live.post(
        "/v1/completions", prompt=ids, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream, temperature=0
    )
    if stream:
        choices = [chunk["choices"][0] for chunk in live.events(response)]
    else:
        choices = response.json()["choices"]
        assert response.json()["usage"]["completion_tokens"] == max_tokens
    logprobs = {key: [v for c in choices for v in c["logprobs"][key]] for key in choices[0]["logprobs"]}
    assert len(ids) >= 300 and {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value == 0.0 for value in logprobs["token_logprobs"][1:])
    shown = "".join(choice["text"] for choice in choices)
    assert shown == "".join(logprobs["tokens"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert shown[offset:].startswith(token)
    assert choices[-1]["finish_reason"] == "length"


def test_logprobs_of_parts_of_characters_do_not_collide(live):
    answer = live.post("/v1/completions", prompt="emoji", logprobs=2).json()
    assert answer["choices"][0]["text"] == "a😀b" and answer["choices"][0]["logprobs"]["text_offset"][-1] == 2
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b"]
    assert answer["choices"][0]["text"] == "a😀b"
    assert all(-9999.0 <= value <= 0.0 for top in logprobs["top_logprobs"] for value in top.values())


def test_usage_of_a_stream(live):
    chunks = live.events(live.post("/v1/completions", prompt="a", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 1
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "stop"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_cache_false_keeps_a_request_out_of_the_prefix_cache_in_every_dialect(live, route, body):
    for wanted, cache in ({}, True), ({"cache": None}, True), ({"cache": True}, True), ({"cache": False}, False):
        assert live.post(route, **body, **wanted).status_code == 200
        assert live.engine.requests[-1].cache is cache
    assert live.post(route, **body, cache="no").status_code == 400
