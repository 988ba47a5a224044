"""Output to what can not take it, and values that hold control characters: words, never a trace or a moved cursor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import in_process
from kakera.cli import app
from kakera.cli.model import BUNDLED
from kakera.cli.terminal import visible, visible_message

COMMAND = [sys.executable, "-m", "kakera.cli"]
FITTING = ["plan", "qwen3.8-27b", "--gpus", "12GB,12GB"]
WRITERS = [["--version"], ["--help"], ["plan", "-h"], FITTING, [*FITTING, "--json"], ["plan", "qwen3.8-27b"]]


def run(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100", "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )


@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_a_full_disk_is_one_line_in_words(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*arguments, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (1, "kakera: can not write the output: No space left on device\n")


@pytest.mark.parametrize("arguments", WRITERS[1:], ids=" ".join)
def test_a_reader_that_left_ends_it_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(*arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_errors_that_can_not_be_written_leave_the_exit_status() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "info", "/nowhere"], stderr=full, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_encoding_lacks_are_escaped(tmp_path: Path, encoding: str) -> None:
    broken = tmp_path / "漢字"
    broken.mkdir()
    done = run("info", str(broken), PYTHONIOENCODING=encoding)
    assert done.returncode == 1 and "\\u6f22\\u5b57" in done.stderr and "Traceback" not in done.stderr
    table = run(*FITTING, PYTHONIOENCODING=encoding)
    assert table.returncode == 0 and "weights" in table.stdout, table.stderr
    said = subprocess.run(
        [sys.executable, "-c", "from kakera.cli import main; main(lambda: print('漢字 \\udcff'))"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (said.returncode, said.stdout) == (0, b"\\u6f22\\u5b57 \\udcff\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["plan", "--kv", "int2\r"], "--kv int2\\r:"),
        (["plan", "--kv=int2\n"], "--kv int2\\n:"),
        (["plan", "--state-dtype", "fp16\x1b[2J"], "--state-dtype fp16\\x1b[2J:"),
        (["plan", "--rotation", "/x\n/y"], "--rotation /x\\n/y:"),
        (["serve", "--log-level", "info\t\x07"], "--log-level info\\t\\x07:"),
        (["info", "/nowhere\x1b]0;title\x07"], "/nowhere\\x1b]0;title\\x07:"),
        (["plan", "--gpus", "12GB\u202e"], "--gpus 12gb\\u202e:"),
        (["plan", "--gpus", "12GB,X\nY"], "x\\ny:"),
    ],
)
def test_control_characters_of_values_are_seen_in_messages(arguments: list[str], shown: str) -> None:
    done = in_process.run(*arguments)
    assert done.returncode == 2 and shown in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("arguments", [["--kv-group", "1\r\x1b[2J"], ["--no\x1b[2J"], ["mini", "more\x1b[2J"]])
def test_what_the_parser_refuses_steers_no_terminal(arguments: list[str]) -> None:
    done = in_process.run("plan", *arguments)
    assert done.returncode == 2 and "\x1b[2J" not in done.stderr and "\r" not in done.stderr


@pytest.mark.parametrize("command", ["plan MODEL --gpus cpu", "info MODEL", "models DIRECTORY", "cache ls"])
def test_names_of_files_neither_steer_a_terminal_nor_are_markup(command, tmp_path, monkeypatch) -> None:
    name = "a[bold]\x1b[31m\rb"
    model = tmp_path / "models" / name
    model.mkdir(parents=True)
    for file in BUNDLED.iterdir():
        (model / file.name).symlink_to(file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "kakera" / "prefix" / ("a" * 32)
    kept.mkdir(parents=True)
    (kept / "MANIFEST.json").write_text(json.dumps({"model": name, "KV codec": "int2[/no]"}))
    words = [str({"MODEL": model, "DIRECTORY": model.parent}.get(word, word)) for word in command.split()]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert found.exit_code == 0, found.output
    assert "a[bold]\\x1b[31m\\rb" in found.output and not {"\x1b", "\r"} & {*found.output}


def test_text_keeps_its_lines_its_letters_and_its_emoji() -> None:
    for text in ("two\nlines\tand 漢字 é", "👩\u200d🔬", "می\u200cخواهم", ""):
        assert visible(text) == text
    assert visible("a\x00b\x7f\x9b\u2028\udcff") == "a\\x00b\\x7f\\x9b\\u2028\\udcff"
    assert visible_message("refused:\n* more", ["plan", "\n"]) == "refused:\n* more"


@pytest.mark.parametrize("command", [[], ["plan"], ["service"], ["service", "status"], ["eval", "ppl"], ["bench"]])
def test_h_is_help_everywhere(command: list[str]) -> None:
    done = in_process.run(*command, "-h", COLUMNS="100")
    assert done.returncode == 0 and "Usage:" in done.stdout and "--help" in done.stdout


def test_a_shell_learns_commands_and_options() -> None:
    words = {"_KAKERA_COMPLETE": "complete_bash", "COMP_WORDS": "kakera service sta", "COMP_CWORD": "2"}
    entry = "import sys; sys.argv = ['kakera']; from kakera.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", entry], env={**os.environ, **words}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["status"], done.stderr
