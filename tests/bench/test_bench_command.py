import json

import pytest
from typer.testing import CliRunner

from kakera.cli import app
from kakera.errors import UsageError


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_decode_prints_a_row_for_each_context_and_batch_and_draws_a_plot(tiny_model, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "decode.png"
    grid = ("--contexts", "64,128", "--batches", "1,2", "--steps", "4", "--plot", str(plot))
    result = run("decode", str(tiny_model), *grid, "--gpus", "cpu", "--context", "512", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [(row["context"], row["batch"]) for row in rows] == [(64, 1), (64, 2), (128, 1), (128, 2)]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_missed_bar_is_exit_status_1(tiny_model):
    result = run("figures", str(tiny_model), "--only", "bytes", "--gpus", "cpu", "--json")
    (figure,) = json.loads(result.stdout)["figures"]
    assert (figure["ok"], result.exit_code) == (False, 1)


def test_a_scripted_model_is_measured_through_its_server(tiny_model, tmp_path):
    script = tmp_path / "script.json"
    stream = {"text": "a b c d e f g h i j k l m n o p", "delay_ms": 2}
    script.write_text(json.dumps({"tokenizer": str(tiny_model), "streams": [stream]}))
    load = ("--streams", "1,2", "--prompt-tokens", "32", "--new-tokens", "16", "--long", "0")
    levels = json.loads(run("serve", f"scripted:{script}", *load, "--json").stdout)["levels"]
    assert [level["streams"] for level in levels] == [1, 2]
    assert levels[0]["gap"]["p50"] >= 0.002


@pytest.mark.parametrize(
    "wrong", [("decode", "--batches", "0"), ("decode", "--plot", "/no/such/x.png"), ("figures", "--only", "speed")]
)
def test_wrong_numbers_and_names_are_refused(tiny_model, wrong):
    command, *options = wrong
    with pytest.raises(UsageError):
        run(command, str(tiny_model), *options, "--gpus", "cpu")
