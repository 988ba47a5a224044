"""kakera chat in a terminal and in a pipe, with an engine of its own and with a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import Terminal
from tests.command_server import CommandServer, free_port

import in_process
from kakera.cli.conversation import Ended, Piece, Settings
from kakera.cli.line_editor import HISTORY_BYTES, History
from kakera.cli.remote_answers import RemoteModel
from kakera.errors import KakeraError, UsageError

CHAT = [sys.executable, "-m", "kakera.cli", "chat"]
STREAMS = [  # the first that matches something in the conversation
    {"match": "bye", "text": "See you."},
    {"match": "weather", "text": "Sunny 😀 today."},
    {"match": "long", "text": "word " * 3000, "delay_ms": 20},
    {"match": "third", "text": "Three lines."},
    {"match": "ponder", "text": "<think>\nhm\n</think>\n\nYes."},
    {"text": "Hello there."},
]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chat") / "friend.json"
    path.write_text(json.dumps({"streams": STREAMS, "context": 512}))
    return f"scripted:{path}"


@pytest.fixture(scope="module")
def server(script: str) -> Iterator[CommandServer]:
    with CommandServer(script, "--api-key", "open sesame", "--served-name", "friend") as running:
        yield running


def asking(server: CommandServer) -> list[str]:
    """The command without an engine of its own, which takes a second to start."""
    return [*CHAT, "--url", f"127.0.0.1:{server.port}", "--api-key", "open sesame"]


def talk_as_people_do(terminal: Terminal) -> None:
    """The same with an engine and with a server."""
    terminal.prompt()
    terminal.paste("first\nsecond\nthird")
    terminal.type("\r")
    terminal.expect(r"Three lines\.\r\n\[0 of \d+ prompt tokens cached.* 1?\d tokens at [\d.]+ tok/s")
    terminal.prompt()
    terminal.type("the long one\r")
    terminal.expect("word word word")
    terminal.type("\x03")
    terminal.expect("interrupted")
    terminal.prompt()
    terminal.type("weathex\x7fr?\r")  # edited
    terminal.expect("Sunny 😀 today")
    terminal.prompt()
    terminal.type("\x1b[A\x1b[A")  # twice Up
    terminal.expect("the long one")
    terminal.type("\x03")
    terminal.expect("Ctrl-C again")
    terminal.prompt()
    terminal.type("bye\r")  # so the next Ctrl-C is a first one again
    terminal.expect(r"See you\.")
    terminal.prompt()
    terminal.type("\x03")
    terminal.expect("Ctrl-C again")
    terminal.prompt()
    terminal.type("\x03")
    assert terminal.wait() == 0


def test_a_conversation_in_a_terminal_and_its_history_in_the_next(
    script: str, server: CommandServer, tmp_path: Path
) -> None:
    with Terminal([*CHAT, script], XDG_STATE_HOME=str(tmp_path)) as terminal:
        talk_as_people_do(terminal)
    kept = tmp_path / "kakera" / "chat-history"
    assert kept.stat().st_mode & 0o777 == 0o600
    with Terminal(asking(server), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.prompt()
        terminal.type("\x1b[A")
        terminal.expect("bye")
        terminal.type("\x1b[A" * 3)
        terminal.expect("third")  # lines that were one message are one again
        terminal.type("\r")
        terminal.expect(r"Three lines\.")
        terminal.prompt()
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_a_conversation_with_a_server(server: CommandServer, tmp_path: Path) -> None:
    with Terminal(asking(server), XDG_STATE_HOME=str(tmp_path)) as terminal:
        talk_as_people_do(terminal)


def test_a_home_that_can_not_be_written_costs_the_history_alone(server: CommandServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Terminal(asking(server), XDG_STATE_HOME=str(tmp_path / "file")) as terminal:
        for _ in range(2):
            terminal.prompt()
            terminal.type("hi\r")
            terminal.expect(r"Hello there\.")
        terminal.prompt()
        terminal.type("/quit\r")
        assert terminal.wait() == 0


def test_a_terminal_without_unicode_shows_escapes_and_a_plain_spinner(server: CommandServer, tmp_path: Path) -> None:
    with Terminal(asking(server), XDG_STATE_HOME=str(tmp_path), PYTHONIOENCODING="ascii") as terminal:
        terminal.prompt()
        terminal.type("the weather?\r")
        terminal.expect(r"Sunny \\U0001f600 today\.")
        terminal.prompt()
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert terminal.raw.isascii() and "\\u28" not in terminal.raw


def piped(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHAT, *arguments], input=text, capture_output=True, text=True, check=False)


def test_what_is_piped_in_is_one_message(script: str) -> None:
    done = piped("/first\nthird\n", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Three lines.\n[") and done.stdout.count("prompt tokens cached") == 1
    assert in_process.run("chat", script).stdout == ""
    long = in_process.run("chat", script, given="word " * 600)
    assert long.returncode == 1 and long.stderr.count("\n") == 1
    assert "maximum context length is 512 tokens" in long.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["--url", "ftp://x"], "--url ftp://x: give where a server answers", 2),
        (["--url", "http://x:port"], "give where a server answers", 2),
        (["--url", "x", "--context", "4k"], "give memory options to kakera serve", 2),
        (["--url", "x", "--api-key", "a\r\nb"], "printable", 2),
        (["--api-key", "x"], "--api-key needs --url", 2),
        (["--url", f"127.0.0.1:{free_port()}"], "start one with kakera serve", 1),
    ],
)
def test_a_server_that_can_not_be_asked_is_said_in_words(arguments: list[str], said: str, status: int) -> None:
    done = in_process.run("chat", *arguments, given="hi")
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def ask(url: str, text: str, key: str | None = "open sesame", name: str = "", **settings: object) -> list[object]:
    model = RemoteModel(url, key, name, Settings(**{"max_tokens": 50, **settings}))  # type: ignore[arg-type]
    return list(model.answer([{"role": "user", "content": text}]))


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_every_form_of_its_url_finds_a_server(server: CommandServer, path: str) -> None:
    *pieces, ended = ask(f"http://127.0.0.1:{server.port}{path}", "hi")
    assert "".join(p.text for p in pieces if isinstance(p, Piece)) == "Hello there."
    assert isinstance(ended, Ended) and ended.reason == "stop" and ended.usage.completion_tokens > 1


def test_reasoning_reuse_and_limits_of_a_server_are_seen(server: CommandServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    kinds = {p.kind for p in ask(url, "ponder", thinking=True) if isinstance(p, Piece)}
    assert kinds == {"reasoning", "content"}
    text = "weather " * 100
    ask(url, text)
    ended = ask(url, text)[-1]
    assert isinstance(ended, Ended) and ended.usage.cached_tokens >= 64
    ended = ask(url, "hi", max_tokens=1)[-1]
    assert isinstance(ended, Ended) and ended.reason == "length"


def test_refusals_of_a_server_are_its_words(server: CommandServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    with pytest.raises(KakeraError, match="give its key with --api-key"):
        ask(url, "hi", key="wrong")
    with pytest.raises(KakeraError, match="is not served here"):
        ask(url, "hi", name="gpt-5")
    with pytest.raises(KakeraError, match="context"):
        ask(url, "word " * 600)
    with pytest.raises(UsageError, match="give where"):
        ask("http://", "hi")


def test_a_server_that_dies_ends_the_answer_and_not_the_chat(script: str, tmp_path: Path) -> None:
    with (
        CommandServer(script) as server,
        Terminal([*CHAT, "--url", f"127.0.0.1:{server.port}"], XDG_STATE_HOME=str(tmp_path)) as terminal,
    ):
        terminal.prompt()
        terminal.type("the long one\r")
        terminal.expect("word word")
        server.process.kill()
        server.process.wait()  # until then its socket takes connections, to reset them
        terminal.expect("server still running")
        terminal.expect("the message is forgotten; Up brings it back")
        terminal.prompt()
        terminal.type("\x1b[A\r")
        terminal.expect("start one with kakera serve")
        terminal.prompt()
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_a_long_history_loses_its_older_half(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    history = History(path)
    for i in range(3):
        history.store_string(f"{i}\n" + "x" * (HISTORY_BYTES // 3))
    newest, *_ = kept = list(History(path).load_history_strings())
    assert newest.startswith("2\nxxx") and len(kept) == 1 and path.stat().st_size < HISTORY_BYTES
