"""litellm against a real server, as its OpenAI and as its Anthropic provider."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from command_server import CommandServer
from lazily import lazily

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it downloads a price list
litellm = lazily("litellm", missing="litellm comes with the extra `clients`")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own ones

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
ANIMAL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


def ask(server: CommandServer, text: str, **more: Any) -> Any:
    """Over chat completions; hosted_vllm is litellm's name for servers like this one."""
    base = f"http://127.0.0.1:{server.port}/v1"
    message = {"role": "user", "content": text}
    more.setdefault("model", "hosted_vllm/mini")
    return litellm.completion(messages=[message], api_base=base, api_key="none", num_retries=0, **more)


def test_a_whole_answer_with_its_reasoning_and_usage(server: CommandServer) -> None:
    answer = ask(server, "hi")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content.strip()) == ("Hello there.", "Thought.")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_answer_is_the_same(server: CommandServer) -> None:
    chunks = list(ask(server, "hi", stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == "Hello there." and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == ask(server, "hi").usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(server: CommandServer, stream: bool) -> None:
    answer = ask(server, "umbrella?", tools=[WEATHER], stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo", "days": 2})
    assert answer.choices[0].finish_reason == "tool_calls"


def test_an_answer_of_a_schema(server: CommandServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL, "strict": True}}
    answer = ask(server, "an animal", response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"name": "fox", "legs": 4}


def test_errors_are_its_classes(server: CommandServer) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(server, "hi", temperature=9)
    with pytest.raises(litellm.NotFoundError, match="mini"):
        ask(server, "hi", model="hosted_vllm/other")


def test_messages_with_a_call(server: CommandServer) -> None:
    answer = litellm.completion(
        model="anthropic/mini",
        messages=[{"role": "user", "content": "parasol?"}],
        tools=[WEATHER],
        api_base=f"http://127.0.0.1:{server.port}",
        api_key="none",
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}


def test_leaving_a_stream_ends_its_request(server: CommandServer) -> None:
    stream = ask(server, "endless", stream=True)
    next(iter(stream))
    stream.completion_stream.close()
    end = time.monotonic() + 60
    while server.http.get("/v1/loads").json()["aggregate"]["total_reqs"]:
        assert time.monotonic() < end, "the request still runs"
        time.sleep(0.02)
