"""kakera cache, and what --disk-cache refuses: all before a model is loaded."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kakera.cache.host import CacheSizes
from kakera.cli import app
from kakera.cli.engine import with_disk
from kakera.disk.home import Directory, check_home, default_home
from kakera.disk.log import DiskLog
from kakera.errors import UsageError
from kakera.run.process.recipe import EngineRecipe

KEY = {"model": "mini", "KV codec": "int2, group 256, window 4 pages", "states": "fp16", "device": "cuda"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return default_home()


def said(*command: str) -> str:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


def test_what_is_there_is_listed_and_removed_but_for_what_a_server_writes(home: Path) -> None:
    assert "nothing in" in said("cache", "ls") and json.loads(said("cache", "ls", "--json"))["bytes"] == 0
    home.mkdir(parents=True)
    DiskLog(home, "a" * 32, KEY, 10**9).close()
    writing = DiskLog(home, "b" * 32, KEY, 10**9)
    (home / "notes").mkdir()
    listed = json.loads(said("cache", "ls", "--json"))
    assert [(m["key"]["model"], m["in_use"]) for m in listed["models"]] == [("mini", False), ("mini", True)]
    assert "int2, group 256" in said("cache", "ls")
    assert "a server writes there" in said("cache", "purge")
    assert sorted(path.name[0] for path in home.iterdir()) == ["b", "n"]
    writing.close()


@pytest.mark.parametrize(("wanted", "words"), [("1MB", "at least 64 MB"), ("soon", "is not a size")])
@pytest.mark.parametrize("command", ["serve", "up", "service install --dry-run"])
def test_a_size_that_can_not_be_is_refused_before_anything_is_planned(command: str, wanted: str, words: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "mini", "--disk-cache", wanted], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and words in result.output and "--disk-cache" in result.output


def test_a_home_that_others_can_read_is_refused(home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        with_disk(EngineRecipe(Path("model"), SimpleNamespace(ranks=1)), 10**9, lambda line: None)  # type: ignore[arg-type]


def test_a_prefix_cache_without_memory_has_nothing_to_keep(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheSizes, "of", lambda _: CacheSizes(8, 99, 100, 0, 1, windowed=False))
    with pytest.raises(UsageError, match="give --host-cache more"):
        with_disk(EngineRecipe(Path("model"), SimpleNamespace(ranks=1)), 10**9, lambda line: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_home_that_is_no_directory_is_refused_in_words(home: Path, tmp_path: Path, kind: str) -> None:
    home.parent.mkdir()
    if kind == "file":
        home.touch()
    else:
        home.symlink_to(tmp_path if kind == "link" else tmp_path / "nothing")
    with pytest.raises(UsageError, match="is a link; set XDG_CACHE_HOME" if kind == "link" else "is not a directory"):
        check_home(home)


@pytest.mark.parametrize("command", ["ls", "purge"])
def test_a_home_of_another_user_is_said_to_be_unreadable(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def refuse(_: Path) -> list[Directory]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("kakera.disk.home.directories", refuse)
    result = CliRunner().invoke(app, ["cache", command])
    assert isinstance(result.exception, UsageError) and "can not be read (Permission denied)" in str(result.exception)


def test_the_home_is_never_a_relative_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".cache/kakera/prefix" and default_home().is_absolute()
