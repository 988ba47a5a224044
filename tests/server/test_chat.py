"""Chat completions through the real openai client: text, thinking, stops, choices, usage, log-probabilities."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from live_server import HELLO

from kakera.contract.events import EngineStats, Progress
from kakera.server.generate import Generation
from kakera.server.openai.progress import PromptProgress
from lazily import lazily

openai = lazily("openai")

OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(live, text, **more):
    more.setdefault("extra_body", OFF)
    return live.client.chat.completions.create(model="mini", messages=[{"role": "user", "content": text}], **more)


def streamed(live, text, **more):
    """(content, reasoning, finish reason, chunks)"""
    chunks = list(ask(live, text, stream=True, **more))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    [finish] = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    return content, reasoning, finish, chunks


def test_an_answer_and_its_usage(live):
    answer = ask(live, "hi")
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.model == "mini" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.prompt_tokens == len(live.engine.requests[-1].tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 7


def test_the_async_client_and_many_at_once(live):
    async def many():
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none") as client:
            message = {"role": "user", "content": "hi"}
            make = client.chat.completions.create
            return await asyncio.gather(*(make(model="mini", messages=[message], extra_body=OFF) for _ in range(8)))

    assert {answer.choices[0].message.content for answer in asyncio.run(many())} == {"Hello there."}


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(live):
    content, _, finish, chunks = streamed(live, "hi")
    assert (content, finish) == ("Hello there.", "stop")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)


def test_usage_comes_only_when_asked_with_empty_choices_before_done(live):
    asked = live.events(live.chat(stream=True, stream_options={"include_usage": True}))
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert all("usage" not in chunk and chunk["choices"] for chunk in asked[:-1])
    assert all(chunk["choices"] for chunk in live.events(live.chat(stream=True)))


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("fox", ["own fox"], "The quick br"),
        ("fox", "quick", "The "),
        ("fox", ["The"], ""),
        ("fox", ["own fix", "zzz"], "The quick brown fox jumps"),
        ("user-turn", ["\nUser:"], "Hi\nUse"),
    ],
)
def test_a_stop_string_cuts_exactly_before_itself(live, text, stop, content):
    answer = ask(live, text, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (content, "stop")
    assert answer.usage.completion_tokens >= 1 and answer.usage.prompt_tokens_details.cached_tokens == 7
    assert streamed(live, text, stop=stop)[:3] == (content, "", "stop")


def test_a_stop_string_ends_the_generation(live):
    answer = ask(live, "endless", stop=["word word"])
    assert answer.choices[0].message.content == "" and answer.usage.completion_tokens < 20


def test_min_tokens_holds_stop_strings_off(live):
    assert (
        ask(live, "fox", stop=["own"], extra_body={**OFF, "min_tokens": 8}).choices[0].message.content.endswith("jumps")
    )


def test_only_whole_characters_are_sent(live):
    content, _, _, chunks = streamed(live, "emoji")
    assert content == "a😀b"
    assert "\ufffd" not in "".join(c.choices[0].delta.content or "" for c in chunks)
    assert ask(live, "halfway", max_tokens=3).choices[0].message.content == "a\ufffd"
    assert streamed(live, "halfway", max_tokens=2)[:3] == ("a\ufffd", "", "length")


def test_a_control_token_spelled_by_the_user_stays_text(live):
    for text in ("<|im_end|>", "</think>", "<tool_call>"):
        ask(live, text)
        tokens = live.engine.requests[-1].tokens.tolist()
        spelled = live.model.tokenizer.encode(text)
        assert any(tokens[i : i + len(spelled)] == spelled for i in range(len(tokens)))


def test_thinking_is_split_off(live):
    message = ask(live, "ponder", extra_body={}).choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello!", "I should greet.")
    assert streamed(live, "ponder", extra_body={})[:3] == ("Hello!", "I should greet.", "stop")


def test_a_length_stop_within_the_reasoning_is_explicit(live):
    answer = ask(live, "ponder", max_tokens=3, extra_body={})
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.message.content == "" and choice.message.reasoning_content
    assert streamed(live, "ponder", max_tokens=3, extra_body={})[2] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": "false"}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_thinking_off_means_off(live, fields):
    message = ask(live, "hi", extra_body=fields).choices[0].message
    assert message.content == "Hello there." and not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_keep_their_index_and_share_the_seed(serve, stream):
    server = serve([{"pieces": list(word)} for word in ("alpha", "beta", "gamma")])
    texts = ["", "", ""]
    if stream:
        for chunk in ask(server, "x", n=3, seed=7, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = ask(server, "x", n=3, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
        assert answer.usage.completion_tokens == len("alphabetagamma") + 3
        assert answer.usage.prompt_tokens == len(server.engine.requests[0].tokens)
    assert sorted(texts) == ["alpha", "beta", "gamma"]
    samplings = [request.sampling for request in server.engine.requests]
    assert {s.choice for s in samplings} == {0, 1, 2} and {s.seed for s in samplings} == {7}
    assert len({request.id for request in server.engine.requests}) == 3


def test_logprobs_are_finite_and_cover_the_shown_tokens(live):
    answer = live.chat(logprobs=True, top_logprobs=20).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello there."
    assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    assert {top["logprob"] for entry in content for top in entry["top_logprobs"]} == {0.0, -9999.0}
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert live.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_streamed_logprobs_do_not_leak_behind_a_stop_string(live):
    chunks = live.events(live.chat("fox", stream=True, logprobs=True, stop=["own fox"]))
    entries = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == "The quick br"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CALLS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n123\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = [{"city": "123", "days": 2}, {"city": "Oslo"}]


@pytest.fixture
def caller(serve):
    return serve(
        [
            {"match": "letters", "pieces": list("Look.\n\n" + CALLS)},
            {"match": "musing", "pieces": list("Let me see. " + CALLS)},
            {"match": "thinking", "text": "Let me see.\n</think>\n\n" + CALLS},
            {"text": "Look.\n\n" + CALLS},
        ]
    )


def test_tool_calls_whole(caller):
    choice = ask(caller, "x", tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Look."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == ARGUMENTS
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize(("text", "body"), [("letters", OFF), ("musing", {}), ("thinking", {})])
def test_tool_calls_streamed(caller, text, body):
    content, reasoning, finish, chunks = streamed(caller, text, tools=TOOLS, extra_body=body)
    assert finish == "tool_calls" and "<" not in content + reasoning
    calls: dict[int, list] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.name == "weather"
                calls[call.index] = []
            else:
                assert call.id is None and call.type is None and call.function.name is None
            calls[call.index].append(call.function.arguments)
    assert [json.loads("".join(parts)) for parts in calls.values()] == ARGUMENTS
    assert (content, reasoning) == (("Look.", "") if body else ("", "Let me see."))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x", "letters"])
@pytest.mark.parametrize(
    ("stop", "calls", "finish"),
    [
        ("23", ['{"city": "1', ""], "stop"),  # within a value: nobody may take it for the whole one
        ("slo", ['{"city": "123", "days": 2}', '{"city": "O'], "stop"),
        ("<parameter=days>", ['{"city": "123"', ""], "stop"),
        ("\n</parameter>\n", ['{"city": "123"}', ""], "tool_calls"),  # an end that such clients ask for
        ("</tool_call>", ['{"city": "123", "days": 2}', ""], "tool_calls"),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nO", ['{"city": "123", "days": 2}', ""], "tool_calls"),
    ],
)
def test_a_call_that_a_stop_string_cuts_is_no_whole_call(caller, text, stop, calls, finish):
    choice = ask(caller, text, tools=TOOLS, stop=[stop]).choices[0]
    assert [call.function.arguments for call in choice.message.tool_calls] == [call for call in calls if call]
    assert choice.finish_reason == finish == streamed(caller, text, tools=TOOLS, stop=[stop], extra_body=OFF)[2]


def test_a_call_without_words_has_null_content(caller):
    message = ask(caller, "thinking", tools=TOOLS, extra_body={}).choices[0].message
    assert message.content is None and len(message.tool_calls) == 2


def test_tool_choice_none_shows_no_tools_and_makes_no_calls(caller):
    choice = ask(caller, "x", tools=TOOLS, tool_choice="none").choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert "weather" not in caller.model.tokenizer.decode(caller.engine.requests[-1].tokens)


def test_a_conversation_with_results_is_replayed(caller):
    first = ask(caller, "x", tools=TOOLS).choices[0].message
    history = [
        {"role": "user", "content": "x"},
        first.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in first.tool_calls),
    ]
    caller.client.chat.completions.create(model="mini", messages=history, tools=TOOLS, extra_body=OFF)
    prompt = caller.model.tokenizer.decode(caller.engine.requests[-1].tokens)
    assert CALLS in prompt and prompt.count("<tool_response>\nsun") == 2


def test_a_stream_tells_on_request_how_far_the_prompt_is_read(live):
    """In llama.cpp's words, and before the first token; nobody else gets such chunks."""
    chunks = live.events(live.chat("hi", stream=True, return_progress=True))
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    count = len(live.engine.requests[-1].tokens)
    assert told == [{"total": count, "cache": 0, "processed": 0, "time_ms": 0}]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and "prompt_progress" in chunks[1]
    assert all(chunk["choices"][0]["delta"] == {} for chunk in chunks if "prompt_progress" in chunk)
    body = {"model": "mini", "prompt": [5, 6, 7], "max_tokens": 2, "stream": True}
    plain = live.events(live.post("/v1/completions", **body, return_progress=True))
    assert plain[0]["prompt_progress"] == {"total": 3, "cache": 0, "processed": 0, "time_ms": 0}
    assert plain[0]["choices"][0]["text"] == "" and plain[1]["choices"][0]["text"]
    assert "prompt_progress" not in live.post("/v1/completions", **body).text
    for more in ({"stream": True}, {"stream": True, "return_progress": False}, {"return_progress": True}):
        assert "prompt_progress" not in live.chat("hi", **more).text


def test_progress_counts_from_what_the_cache_had():
    progress = PromptProgress()
    first = progress.as_json(0, Progress("a", 256, 300))
    assert first == {"total": 300, "cache": 256, "processed": 256, "time_ms": 0}
    second = progress.as_json(0, Progress("a", 300, 300))
    assert (second["cache"], second["processed"]) == (256, 300) and second["time_ms"] >= 0


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_who_waits_for_a_place_is_told_so_until_the_turn_comes(serve, monkeypatch, route):
    monkeypatch.setattr("kakera.server.http.sse.HEADERS_AFTER_SECONDS", 0.05)
    monkeypatch.setattr("kakera.server.http.sse.PING_SECONDS", 0.05)
    server = serve(HELLO, slots=1)
    server.engine.prefill_seconds = 0.5
    prompt = {"chat/completions": {"messages": [{"role": "user", "content": "fox"}]}, "completions": {"prompt": "fox"}}
    body = {"model": "mini", "stream": True, "max_tokens": 4, **prompt[route]}
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda _: server.http.post(f"/v1/{route}", json=body).text, range(2)))
    waited = [text for text in texts if ": waiting for a place: 1 running, 1 waiting\n" in text]
    assert len(waited) == 1 and all(": still working\n" in text and text.endswith("[DONE]\n\n") for text in texts)
    assert waited[0].rindex(": waiting") < waited[0].index(": still working")


@pytest.mark.parametrize(
    ("tokens", "lent", "words"),
    [
        (639, 90, "for a place"),
        (640, 90, "under 640 tokens runs now"),
        (6399, 0, "for a place"),
        (50, 90, "for a place"),
    ],
)
def test_who_is_too_long_for_what_others_leave_of_the_card_is_told_so(tokens, lent, words):
    stats = EngineStats(running=1, waiting=1, pages_total=100, pages_lent=lent)
    waiting = Generation(None, None, SimpleNamespace(tokens=(5,) * tokens), None, lambda: stats)
    assert words in waiting.standing and "waiting for" in waiting.standing
    stats = replace(stats, asleep=1)  # and one that was kept behind a sleep, whether it has begun or not
    for waiting._begun in (False, True):
        assert "which is lent" in waiting.standing
