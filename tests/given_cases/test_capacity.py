"""Cases about the length of the context."""

from __future__ import annotations

from command_server import CommandServer


def test_case_07_absent_max_tokens_runs_to_the_end_token_or_to_the_context(scripted: CommandServer) -> None:
    ended, cut = scripted.chat("hi").json(), scripted.chat("endless").json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["message"]["content"] == "Hello there."
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["total_tokens"] == 512


def test_case_66_the_planned_context_can_be_filled(tiny: CommandServer) -> None:
    assert tiny.http.get("/health").status_code == 200
    for size in (1000, 1023):
        body = {"prompt": [5 + i % 200 for i in range(size)], "ignore_eos": True, "max_tokens": 1024}
        answer = tiny.complete(**body).json()
        assert answer["usage"]["total_tokens"] == 1024 and answer["choices"][0]["finish_reason"] == "length"
    assert tiny.complete(prompt=[5] * 1024).json()["error"]["code"] == "context_length_exceeded"
    assert tiny.http.get("/health?deep=1").status_code == 200
