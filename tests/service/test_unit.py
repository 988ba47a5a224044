"""The unit by its properties, `systemd-analyze verify` where there is one, and the advice around it."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kakera.cli import app, checks
from kakera.cli.checks import Finding
from kakera.cli.model import resolve_model
from kakera.cli.serve import read_keys, serve
from kakera.cli.service import install, serve_options, write_private
from kakera.errors import UsageError
from kakera.plan.plan import Wishes
from kakera.run.process.client import STOP_SECONDS as ENGINE_STOP_SECONDS
from kakera.server.run import LAST_WORDS_SECONDS
from kakera.service import systemd, wsl
from kakera.service.limits import SCRIPTED_BOUNDS, Bounds
from kakera.service.unit import Facts, quoted, unit_text
from kakera.target.wsl import under_wsl

BOUNDS = Bounds(stall_seconds=45.5, start_seconds=300, memory_high=2 * 10**9, memory_max=3 * 10**9)
FACTS = Facts("mini", (sys.executable, "serve", "mini"), (sys.executable, "doctor", "--check"), BOUNDS)


def settings_of(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if re.match(r"[A-Z]\w+=", line)]
    assert len({line.partition("=")[0] for line in lines}) == len(lines), "a setting twice"
    return dict(line.split("=", 1) for line in lines)


@given(
    st.builds(
        Bounds,
        stall_seconds=st.floats(30, 1e4),
        start_seconds=st.floats(60, 1e4),
        memory_high=st.integers(10**8, 10**11),
        memory_max=st.integers(10**8, 10**11),
    )
)
@settings(max_examples=30)
def test_times_of_the_unit_leave_room_for_each_other(bounds: Bounds) -> None:
    unit = settings_of(unit_text(Facts("m", ("/bin/true",), ("/bin/true",), bounds, drain_seconds=600)))
    assert int(unit["TimeoutStopSec"]) >= 600 + LAST_WORDS_SECONDS + 2 * ENGINE_STOP_SECONDS
    start, interval = int(unit["TimeoutStartSec"]), int(unit["StartLimitIntervalSec"])
    assert int(unit["WatchdogSec"]) >= bounds.stall_seconds + 20, "the server's own watchdog speaks first"
    assert interval >= int(unit["StartLimitBurst"]) * (start + int(unit["RestartSec"])), "slow failures must count too"
    assert (unit["Type"], unit["Restart"], unit["OOMPolicy"]) == ("notify", "on-failure", "stop")
    assert unit["LimitCORE"] == "0", "a core holds prompts, and fills the disk"
    assert set(unit["RestrictAddressFamilies"].split()) == {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"}
    assert unit["LockPersonality"] == unit["RestrictSUIDSGID"] == unit["NoNewPrivileges"] == "yes"
    assert 1_000 <= int(unit["TasksMax"]) <= 10_000
    assert int(unit["MemoryHigh"]) == bounds.memory_high and int(unit["MemoryMax"]) == bounds.memory_max


@given(st.text("ab/ %\"'\\;#$=é字", max_size=20))
@settings(max_examples=100)
def test_a_quoted_word_reads_back(word: str) -> None:
    assert [part.replace("%%", "%") for part in shlex.split(quoted(word))] == [word]


def test_a_word_that_would_end_the_line_is_refused() -> None:
    with pytest.raises(UsageError, match="unit file can not hold"):
        unit_text(Facts("m", ("/bin/true", "a\nExecStart=/bin/false"), ("/bin/true",), BOUNDS))


def verify(unit: Path) -> tuple[int, str]:
    """Status, and complaints about this unit; others of the machine may have their own."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(unit.parent)}
    command = ["systemd-analyze", "verify", "--user", str(unit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, "\n".join(line for line in done.stderr.splitlines() if unit.stem in line)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "a place" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    serve = (str(program), "serve", "/models/100 % \"good\" $HOME; 'x' \\ #", "--port", "31000")
    facts = Facts(
        "100 %", serve, (str(program), "doctor"), BOUNDS, (("CUDA_VISIBLE_DEVICES", "1"), ("HF_HOME", "/a b"))
    )
    unit = tmp_path / "kakera-test.service"
    unit.write_text(unit_text(facts))
    status, complaints = verify(unit)
    assert status == 0 and not complaints
    unit.write_text(unit_text(facts).replace("WatchdogSec=75", "WatchdogSec=soon"))
    assert "Failed to parse sec value" in verify(unit)[1], "verify would find a mistake"


def test_dry_run_prints_the_unit_and_changes_nothing(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.chdir(tiny_model.parent)
    options = ["--gpus", "cpu", "--context", "1024", "--port", "31000", "--api-key", "secret"]
    options += ["--allowed-host", "a.example", "--allowed-host", "b.example"]
    done = CliRunner().invoke(app, ["service", "install", tiny_model.name, *options, "--dry-run"])
    assert done.exit_code == 0, done.output
    unit = settings_of(done.stdout)
    words = shlex.split(unit["ExecStart"])
    assert words[:5] == [":" + sys.executable, "-m", "kakera.cli", "serve", str(tiny_model.resolve())]
    for option, value in (("--port", "31000"), ("--context", "1024"), ("--gpus", "cpu")):
        assert words[words.index(option) + 1] == value
    assert [words[i + 1] for i, word in enumerate(words) if word == "--allowed-host"] == ["a.example", "b.example"]
    assert "--host" not in words and "--chunk" not in words, "defaults are not frozen"
    assert "secret" not in done.stdout and words[words.index("--api-key-file") + 1].endswith("kakera/api-key")
    assert unit["ExecStartPre"].endswith("doctor --check") and unit["Environment"] == "CUDA_VISIBLE_DEVICES=1"
    assert 10**8 < int(unit["MemoryHigh"]) < int(unit["MemoryMax"])
    assert not (tmp_path / "config").exists()


def test_a_plan_that_is_refused_installs_nothing(tiny_model: Path) -> None:
    asked = ["service", "install", str(tiny_model), "--gpus", "cpu", "--host-cache", "900TB", "--dry-run"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code and "ExecStart" not in done.stdout and type(done.exception).__name__ == "PlanRefused"


def test_options_of_a_service_are_options_of_serve(tmp_path: Path) -> None:
    script = tmp_path / "x.json"
    script.write_text("{}")
    name = f"scripted:{script}"
    wishes = Wishes("cpu", 1024, 2, 64, "bf16", 16, 128, "rotation.bin", "fp16", 10**6)
    key = Path("/k")
    words = serve_options(resolve_model(name), name, "0.0.0.0", 1, key, ["n", "m"], "debug", wishes)
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    given_options = [word for word in words if word.startswith("--")]
    assert words[-4:] == ("--served-name", "n", "--served-name", "m") and len(given_options) == 16
    assert all(option in known for option in given_options)
    assert words[0] == f"scripted:{script.resolve()}" and Path(words[words.index("--rotation") + 1]).is_absolute()


@pytest.mark.parametrize("verb", [["install"], ["status"], ["logs"], ["uninstall"]])
def test_without_systemd_every_verb_says_what_to_do_instead(verb: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "none")
    monkeypatch.setattr(systemd.require_systemd, "__defaults__", (tmp_path / "none", False))
    done = CliRunner().invoke(app, ["service", *verb])
    assert isinstance(done.exception, systemd.NoSystemd) and done.exception.exit_status == 1
    text = str(done.exception)
    assert "systemd does not run here" in text and "docs/operating.md" in text and "\n" not in text


def test_what_windows_has_to_be_told(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 6.6.87.2-microsoft-standard-WSL2 (root@x)")
    assert under_wsl(version) and not under_wsl(tmp_path / "none")
    version.write_text("Linux version 6.8.0-generic")
    assert not under_wsl(version)
    lines = "\n".join(wsl.needs(10 * 10**9, systemd=False))
    for needed in ("systemd=true", "memory=12GB", "vmIdleTimeout=-1", "Prefer No Sysmem Fallback"):
        assert needed in lines
    assert "systemd=true" not in "\n".join(wsl.needs(10**9, systemd=True))
    with pytest.raises(systemd.NoSystemd, match=r"wsl\.conf"):
        systemd.require_systemd(tmp_path / "none", wsl=True)


SHOWN = """LoadState=loaded
UnitFileState=enabled
ActiveState=active
SubState=running
StatusText=mini answers on http://127.0.0.1:30000/v1; a=b
MainPID=4711
NRestarts=2
MemoryCurrent=18446744073709551615
ExecMainStatus=0
"""


@pytest.mark.parametrize(("active", "exit_code"), [("active", 0), ("failed", 3), ("activating", 3)])
def test_status_is_one_json_document_with_the_exit_status_of_systemctl(monkeypatch, active, exit_code) -> None:
    asked = []

    def run(words, **_):
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, SHOWN.replace("=active", f"={active}"), "")

    monkeypatch.setattr(systemd, "require_systemd", lambda **_: None)
    monkeypatch.setattr(systemd, "properties", partial(systemd.properties, run))
    result = CliRunner().invoke(app, ["service", "status", "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code == exit_code and asked[0][:4] == ["systemctl", "--user", "show", "kakera.service"]
    assert told["active"] == active and told["enabled"] == "enabled" and told["status"].endswith("/v1; a=b")
    assert (told["pid"], told["restarts"], told["memory_bytes"], told["since"]) == (4711, 2, None, None)


def test_lingering_that_is_not_permitted_is_said(tmp_path: Path) -> None:
    def denied(words, **_):
        return subprocess.CompletedProcess(words, 1, "", "Could not enable linger: Access denied\n")

    problem = systemd.linger_problem(denied)
    assert problem and "Access denied" in problem and "sudo loginctl enable-linger" in problem
    assert systemd.linger_problem(lambda words, **_: subprocess.CompletedProcess(words, 0, "", "")) is None
    assert SCRIPTED_BOUNDS.stall_seconds == 30


def test_a_key_comes_from_a_file_that_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "config" / "key"
    write_private(path, "secret\n")
    assert read_keys(path) == ("secret",) and path.stat().st_mode & 0o777 == 0o600
    write_private(path, "new\n\n old \n")
    assert read_keys(path) == ("new", "old")
    not_text, inside = tmp_path / "bytes", tmp_path / "spaced"
    write_private(path, "\n")
    not_text.write_bytes(b"\xff\xfe")
    write_private(inside, "kéy\n")
    for wrong in (path, tmp_path / "none", tmp_path, not_text, inside):
        with pytest.raises(UsageError, match="--api-key-file"):
            read_keys(wrong)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o444, 0o666])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        read_keys(path)
    for private in (0o600, 0o400, 0o700):
        path.chmod(private)
        assert read_keys(path) == ("secret",)


def test_a_key_file_of_another_owner_is_a_mounted_secret(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    path.chmod(0o444)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    assert read_keys(path) == ("secret",)


@pytest.mark.parametrize("key", ["", " ", "\t", "\n", " secret", "kéy", "a\nb"])
@pytest.mark.parametrize("command", [["serve", "mini"], ["service", "install", "mini", "--dry-run"]])
def test_an_empty_or_unsendable_key_is_wrong_usage(command: list[str], key: str) -> None:
    done = CliRunner().invoke(app, [*command, "--api-key", key])
    assert isinstance(done.exception, UsageError) and done.exception.exit_status == 2
    assert "--api-key" in str(done.exception)


def test_both_ways_to_give_a_key_are_one_too_many(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "mini", "--api-key", "a", "--api-key-file", str(tmp_path / "key")])
    assert isinstance(done.exception, UsageError) and "both given" in str(done.exception)


def test_doctors_check_is_quiet_unless_something_is_broken(monkeypatch) -> None:
    findings = [Finding("a", "ok", "fine"), Finding("b", "note", "so so", "buy more")]
    monkeypatch.setattr(checks, "run_checks", lambda: findings)
    done = CliRunner().invoke(app, ["doctor", "--check"])
    assert (done.exit_code, done.output) == (0, "")
    findings.append(Finding("c", "broken", "no driver", "install it"))
    done = CliRunner().invoke(app, ["doctor", "--check"])
    assert done.exit_code == 1 and "no driver" in done.output and "install it" in done.output
    assert "fine" not in done.output and "so so" not in done.output


def test_a_service_takes_the_options_of_serve_but_for_those_of_a_debugging_run() -> None:
    def options(command: Any) -> set[str]:
        return {*inspect.signature(command).parameters}

    assert options(serve) - options(install) == {"record", "record_prompts", "stall_limit"}
