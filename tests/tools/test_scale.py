"""Several servers behind a router: how routers are started, what clients make of streams, and a small run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kakera.errors import UsageError
from tools.scale import PARTS, app, parts_of
from tools.scale_fleet import LOGGED, Router, router_named, words_of
from tools.scale_traffic import _Heard

URLS = ["http://a:1", "http://b:2"]


def test_a_router_that_is_known_gets_ports_servers_and_more_options() -> None:
    router = router_named("vllm-router", "/my venv/python", "--policy random")
    words = words_of(router.command, 8000, 8001, URLS)
    assert words[:3] == ["/my venv/python", "-m", "vllm_router.launch_router"] and "8000" in words and "8001" in words
    assert words[words.index("--worker-urls") + 1 :] == [*URLS, "--policy", "random"]
    assert router.add and router.add[0].format(url=URLS[0]) == "/add_worker?url=http://a:1"
    path, body = (part.format(url=URLS[0]) for part in router_named("smg", "p", "").add or ())
    assert (path, json.loads(body)) == ("/workers", {"url": "http://a:1"})


def test_a_router_of_ones_own_is_a_command_and_what_can_not_be_asked_of_it_is_left_out() -> None:
    router = router_named("mine --listen {port} --to {urls} --quiet", "p", "")
    assert words_of(router.command, 8000, 8001, URLS) == ["mine", "--listen", "8000", "--to", *URLS, "--quiet"]
    assert parts_of(None, router) == [part for part in PARTS if part not in ("credit", "added")]
    assert parts_of(None, None) == ["turns"] and parts_of(None, router_named("vllm-router", "p", "")) == list(PARTS)
    with pytest.raises(UsageError, match="--router nginx: choose vllm-router, smg, or give a command"):
        router_named("nginx", "p", "")


@pytest.mark.parametrize(
    ("only", "words"),
    [("credit", "--only credit: with this router choose turns, killed"), ("restarted", "killed,restarted")],
)
def test_parts_that_can_not_be_measured_are_refused(only: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parts_of(only, Router("mine {urls}"))


def chunk(text: str) -> str:
    return "data: " + json.dumps({"id": "one", "choices": [{"delta": {"content": text}}]})


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([chunk("He"), chunk("llo"), "data: [DONE]"], ""),
        ([chunk("Hello")], "ended early"),
        ([chunk("Hello"), 'data: {"error": "gone"}', "data: [DONE]"], "error: gone"),
    ],
)
def test_a_stream_is_whole_or_has_a_fault(lines: list[str], fault: str) -> None:
    seen: list[None] = []
    heard = _Heard(lambda: seen.append(None))
    for line in lines:
        heard.line(line)
    reply = heard.reply(sent=0.0)
    assert (reply.id, reply.text, reply.fault) == ("one", "Hello", fault) and seen


def test_who_has_answered_is_read_from_a_servers_log() -> None:
    lines = (
        '2026-12-01 INFO kakera.requests: {"client": "a", "id": "chatcmpl-1"}\n2026-12-01 INFO kakera: {"id": "no"}\n'
    )
    assert [json.loads(line)["id"] for line in LOGGED.findall(lines)] == ["chatcmpl-1"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router comes with the extra `clients`"
)
def test_two_servers_behind_a_router_of_which_one_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"streams": [{"text": "word " * 100, "delay_ms": 10}]}))
    small = ["--servers", "2", "--conversations", "3", "--turns", "2", "--at-once", "2"]
    given = [f"scripted:{script}", "--router", "vllm-router", "--only", "turns,killed", *small, "--json"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    figures = {figure["name"]: figure for figure in json.loads(result.stdout)["figures"]}
    assert len(figures) == 5 and figures["killed: streams that failed"]["value"] >= 1
