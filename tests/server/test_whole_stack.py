"""The server over the real scheduler and a real engine process, with a scripted model at the bottom."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from live_server import free_port, hang_up, wait_until

from kakera.run.process.client import EngineClient
from kakera.run.scripted import ScriptedRecipe
from kakera.server.model import ServedModel
from kakera.server.run import serve

SCRIPT = {
    "context": 1024,
    "streams": [
        {"match": "fox", "pieces": list("The quick brown fox jumps over the lazy dog.")},
        {"match": "slow", "text": "word " * 900, "delay_ms": 5},
        {"match": "JSON-1", "text": '{"a": 1}'},
        {"match": "parrot", "text": "word " * 600},
        {"text": "Hello 😀."},
    ],
}


class Stack:
    def __init__(self, path: Path, model: ServedModel):
        path.write_text(json.dumps(SCRIPT))
        self.recipe = ScriptedRecipe(path)
        self.model = model
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=False)
        self.status: int | None = None
        self.engine: EngineClient | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        self._wait()

    async def _run(self) -> None:
        self.engine = await EngineClient.start(self.recipe)
        try:
            self.status = await serve(self.engine, self.model, port=self.port, log_level="error")
        finally:
            await self.engine.close()

    def _wait(self) -> None:
        for _ in range(1500):
            try:
                self.http.get("/health")
                return
            except httpx.ConnectError:
                time.sleep(0.02)
        raise AssertionError("the server did not start")

    def chat(self, text: str, **more) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"enable_thinking": False}}
        return self.http.post("/v1/chat/completions", json={**body, **more})

    def stats(self) -> dict[str, float]:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture(scope="module")
def stack(tmp_path_factory, model):
    """The tests below run in order; the last one kills the engine."""
    return Stack(tmp_path_factory.mktemp("stack") / "script.json", model)


def test_a_stream_stands_still_while_the_card_is_lent(stack):
    """Through server and engine: what runs is kept, what comes is refused, and nothing is lost."""
    lines: list[str] = []

    def read() -> None:
        body = {"prompt": "slow", "max_tokens": 300, "stream": True}
        with stack.http.stream("POST", "/v1/completions", json=body) as response:
            lines.extend(line for line in response.iter_lines() if line.startswith("data: "))

    reading = threading.Thread(target=read)
    reading.start()
    wait_until(lambda: stack.stats()["kakera_running"] == 1)
    assert stack.http.post("/sleep?mode=keep").json()["level"] == 1
    assert stack.stats()["kakera_asleep"] == 1 and stack.stats()["kakera_running"] == 0
    assert stack.chat("hi").json()["error"]["code"] == "asleep"
    assert stack.http.post("/wake_up").json()["is_sleeping"] is False
    reading.join(60)
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1]]
    assert "".join(choice["text"] for choices in texts for choice in choices) == ("word " * 900)[: 5 * 300].strip(" ")


def test_a_scripted_answer_comes_through(stack):
    assert stack.chat("hi").json()["choices"][0]["message"]["content"] == "Hello 😀."
    answer = stack.chat("fox", stop=["own fox"]).json()
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "message": {"role": "assistant", "content": "The quick br"},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["completion_tokens"] >= len("The quick brown fox")


def test_a_form_is_held_in_the_engine_process(stack):
    form = {"response_format": {"type": "json_object"}}
    choice = stack.chat("JSON-1", **form).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": 1}', "stop")
    refused = stack.chat("words", **form)
    assert refused.status_code == 500 and "not allowed here" in refused.json()["error"]["message"]


def test_a_loop_is_cut_off_and_counted_as_one(stack):
    answer = stack.chat("parrot").json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] < 600
    assert any("requests" in name and '"loop"' in name and count == 1 for name, count in stack.stats().items())
    assert stack.chat("parrot", loop_guard=False).json()["choices"][0]["finish_reason"] == "stop"


def test_the_same_prompt_again_is_cached(stack):
    text = "fox " * 150
    first, second = (stack.chat(text).json()["usage"] for _ in range(2))
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
    assert cached[0] == 0 and cached[1] >= first["prompt_tokens"] - 128
    stopped = stack.chat(text, stop=["own"]).json()["usage"]
    assert stopped["prompt_tokens_details"]["cached_tokens"] == cached[1]


def test_messages_that_differ_in_their_billing_line_share_the_cache(stack):
    usages = []
    for cch in ("fa690", "0aaa9"):
        system = f"x-anthropic-billing-header: cc_version=2.1.37; cch={cch};\n" + "rule " * 150
        body = {"max_tokens": 9, "system": system, "messages": [{"role": "user", "content": "hi"}]}
        usages.append(stack.http.post("/v1/messages", json=body).json()["usage"])
    assert usages[0]["cache_read_input_tokens"] == 0
    assert usages[1]["cache_read_input_tokens"] >= usages[0]["input_tokens"] - 128
    assert usages[1]["input_tokens"] + usages[1]["cache_read_input_tokens"] == usages[0]["input_tokens"]


def test_echo_with_logprobs_over_several_prefill_chunks(stack):
    body = {"prompt": [5] * 700, "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = stack.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [0.0] * 699


def test_leaving_frees_everything(stack):
    body = {"messages": [{"role": "user", "content": "slow"}], "n": 4}
    url = f"http://127.0.0.1:{stack.port}"
    hang_up(url, "/v1/chat/completions", body, lambda: stack.stats()["kakera_running"] == 4)
    wait_until(lambda: (stats := stack.stats())["kakera_running"] == 0 and free(stats))


def free(stats) -> bool:
    return stats["kakera_slots_free"] == stats["kakera_slots_total"]


def test_health_runs_a_token(stack):
    assert stack.http.get("/health?deep=1").json()["status"] == "ok"


def test_a_killed_engine_process_answers_who_waits_and_ends_the_server_with_70(stack):
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(stack.chat("slow")))
    waiting.start()
    while stack.stats()["kakera_running"] == 0:
        time.sleep(0.02)
    os.kill(stack.engine.pid, signal.SIGKILL)
    waiting.join(60)
    stack.thread.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_died"
    assert stack.status == 70
