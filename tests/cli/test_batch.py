"""kakera batch as a user meets it: with a model of its own, interrupted and run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kakera.cli import app


def rows(place: Path, *names: str, **more: object) -> Path:
    file = place / "rows.jsonl"
    body = {"model": "mini", "prompt": "Once", "max_tokens": 5, **more}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in names]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def ids(file: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in file.read_text().splitlines())


@pytest.mark.slow
def test_a_batch_that_was_torn_goes_on_with_what_is_left(tmp_path):
    (tmp_path / "script").write_text(json.dumps({"streams": [{"text": "Well."}]}))
    file, out = rows(tmp_path, "a", "b", "c"), tmp_path / "out.jsonl"
    command = ["batch", str(file), str(out), f"scripted:{tmp_path / 'script'}", "--served-name", "mini"]
    first = CliRunner().invoke(app, [*command, "--json"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["answered"] == 3 and ids(out) == ["a", "b", "c"]
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1] + lines[2][:20])
    kept = [json.loads(line) for line in lines[:2]]
    rows(tmp_path, "a", "b", "c", "d")
    with file.open("a") as more:
        more.write("\nmalformed")
    second = CliRunner().invoke(app, command)
    assert second.exit_code == 1 and "2 of 5 lines answered" in second.stdout and "2 before" in second.stdout
    assert ids(out) == ["a", "b", "c", "d"] and [json.loads(line) for line in out.open()][:2] == kept
    (error,) = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["error"]["code"] == "invalid_json_line"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["mini", "--url", "h:1"], "give these to kakera serve"),
        (["--url", "h:1", "--context", "8k"], "give these to kakera serve"),
        (["--url", "ftp://h"], "where a server answers"),
        (["--api-key", "x"], "--api-key needs --url"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_written(tmp_path, options, says):
    done = CliRunner().invoke(app, ["batch", str(rows(tmp_path, "a")), str(tmp_path / "out"), *options])
    assert says in str(done.exception) and not (tmp_path / "out").exists()
