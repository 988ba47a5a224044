"""kakera calibrate: what it writes is a rotation that the other commands take."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kakera.arch.registry import load_spec
from kakera.cli import app
from kakera.errors import UsageError
from kakera.kv.rotation import Rotation
from tiny_model import write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tiny_model(directory)
    (tmp_path / "text").write_text("".join(f"{i} is the square root of {i * i}.\n" for i in range(100)))
    return directory


def calibrate(model: Path, *arguments: str) -> str:
    """What it prints on stdout."""
    options = ("--data", str(model.parent / "text"), "--window", "128", "--gpus", "cpu")
    words = ["calibrate", str(model), str(model.parent / "rotation"), *options, *arguments]
    return CliRunner().invoke(app, words, catch_exceptions=False).stdout


def test_its_files_are_graded_and_serve(model: Path) -> None:
    told = json.loads(calibrate(model, "--limit", "8", "--json"))
    out = model.parent / "rotation"
    assert (told["rotation"], told["tokens"]) == (str(out), 512)
    assert told["options"] == ["--rotation", str(out), "--kv-group", "32"]
    assert Rotation.load(out, load_spec(model)).graded
    options = ("--window", "512", "--limit", "1", "--data", str(model.parent / "text"), "--gpus", "cpu")
    int2 = ("--kv", "int2", "--kv-group", "32", "--kv-window", "64", "--rotation", str(out))
    found = CliRunner().invoke(app, ["eval", "kld", str(model), *options, *int2, "--json"], catch_exceptions=False)
    assert 0 < json.loads(found.stdout)["kld"]["mean"] < 0.1
    with pytest.raises(UsageError, match="is there already"):
        calibrate(model, "--limit", "8")


def test_a_short_text_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="64 tokens are too few"):
        calibrate(model, "--limit", "1")
