import json

import pytest
from typer.testing import CliRunner

from kakera.cli import app
from kakera.cli.progress import progress
from kakera.errors import UsageError

SMALL = ["--gpus", "cpu", "--chunk", "64", "--json"]


def run(*arguments):
    result = CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_ppl_prints_one_json_document(tiny_model):
    found = run("ppl", str(tiny_model), "--window", "128", "--limit", "2", *SMALL)
    assert found["positions"] == 2 * 127
    assert found["nll"]["low"] <= found["nll"]["mean"] <= found["nll"]["high"]


def test_kld_against_another_directory_is_0_for_the_same_weights(tiny_model):
    arguments = ("kld", str(tiny_model), "--base", str(tiny_model), "--kv", "bf16", "--window", "128", "--limit", "1")
    found = run(*arguments, *SMALL)
    assert found["kld"]["mean"] == 0.0 and found["top1"]["mean"] == 1.0


def test_a_suite_writes_answers_that_serve_as_a_baseline(tiny_model, tmp_path):
    data = tmp_path / "cases.jsonl"
    case = {"kind": "x", "messages": [{"role": "user", "content": "Hi"}], "score": "contains_all", "expected": ["q"]}
    data.write_text("".join(json.dumps({"id": name, **case}) + "\n" for name in "ab"))
    answers = tmp_path / "answers.jsonl"
    options = ("--data", str(data), "--context", "256", *SMALL)
    run("retrieval", str(tiny_model), "--out", str(answers), *options)
    assert [json.loads(line)["id"] for line in answers.read_text().splitlines()] == ["a", "b"]
    again = run("retrieval", str(tiny_model), "--baseline", str(answers), *options)
    baseline = again["groups"][-1]["baseline"]
    assert baseline["same_text"] == baseline["same_verdict"] == baseline["total"] == 2


def test_without_a_terminal_every_tenth_is_a_line_on_stderr(capsys):
    with progress("windows", 25) as advance:
        for _ in range(25):
            advance(1)
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert (lines[0], lines[-1], len(lines), shown.out) == ("windows: 3 of 25", "windows: 25 of 25", 10, "")


def test_without_a_terminal_a_minute_is_a_line_too(capsys, monkeypatch):
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr("kakera.cli.progress.time.monotonic", lambda: next(clock))
    with progress("tokens", 1_000_000) as advance:
        for _ in range(7):
            advance(5000)
    assert capsys.readouterr().err.splitlines() == ["tokens: 15,000 of 1,000,000", "tokens: 30,000 of 1,000,000"]


def test_one_window_tells_how_far_it_is(tiny_model):
    result = CliRunner().invoke(app, ["eval", "ppl", str(tiny_model), "--window", "512", "--limit", "1", *SMALL])
    lines = result.stderr.splitlines()
    assert "tokens: 64 of 512" in lines and lines[-1] == "tokens: 512 of 512" and len(lines) == 8, lines


def test_a_scripted_model_has_nothing_to_evaluate(tmp_path):
    script = tmp_path / "script.json"
    script.write_text("{}")
    with pytest.raises(UsageError, match="nothing to evaluate"):
        run("ppl", f"scripted:{script}", "--json")


@pytest.mark.parametrize("suite", ["ppl", "kld"])
def test_cards_that_are_not_there_are_refused_before_anything_is_loaded(suite, tiny_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="torch finds no NVIDIA GPU"):
        run(suite, str(tiny_model), "--gpus", "12GB", "--window", "128", "--json")
