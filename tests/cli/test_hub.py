"""Commands that take a model from the hub, against a hub on this machine; and `up`, which chooses one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from kakera.cli import app, choice, up
from kakera.cli.model import read_shape, resolve_model
from kakera.cli.quantize import source_directory
from kakera.errors import CheckpointError, KakeraError, PlanRefused, UsageError
from kakera.hub import download
from kakera.plan.known import PUBLISHED
from kakera.plan.plan import Wishes
from kakera.target import devices
from local_hub import LocalHub, commit_of

NAME = "owner/tiny@3.0bpw"


@pytest.fixture
def tiny(hub: LocalHub, tiny_model: Path) -> LocalHub:
    """A repository with a build in a branch of its own, and an older one on main."""
    files = {path.name: path for path in tiny_model.iterdir()}
    hub.repositories["owner/tiny"] = {"main": {**files, "generation_config.json": b"{}"}, "3.0bpw": files}
    return hub


def kakera(*arguments: str) -> Result:
    """Errors are raised, as in `kakera.cli.main`."""
    done = CliRunner().invoke(app, list(arguments))
    if isinstance(done.exception, KakeraError):
        raise done.exception
    return done


def data(*arguments: str) -> dict:
    done = kakera(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_revision_is_meant_wherever_a_model_is_named(tiny: LocalHub) -> None:
    commit = commit_of("owner/tiny", "3.0bpw")
    source = {"repository": "owner/tiny", "revision": "3.0bpw", "commit": commit}
    shown = data("info", NAME)
    assert (shown["model"], shown["source"], shown["path"]) == ("tiny@3.0bpw", source, None)
    assert f"from the hub: owner/tiny at 3.0bpw, commit {commit[:12]}" in kakera("info", NAME).stdout
    assert data("plan", NAME, "--gpus", "cpu")["fits"]
    assert tiny.ranges("model.safetensors") == ["bytes=0-100000"] * 3  # headers, and nothing is downloaded for them

    model = resolve_model(NAME)
    assert model.name == "tiny@3.0bpw" and model.path.name == commit
    assert tiny.ranges("model.safetensors")[3:] == ["bytes=0-100000", None]
    shown = data("info", str(model.path))
    assert shown["source"] == source
    with pytest.raises(CheckpointError, match=r"no revision 9bpw; owner/tiny has the branches 3\.0bpw, main"):
        resolve_model("owner/tiny@9bpw")
    assert source_directory(NAME) == model.path and source_directory("no/model@here/x y") == Path("no/model@here/x y")


def test_pull_says_where_it_is_and_the_second_time_that_all_was_there(tiny: LocalHub) -> None:
    first, second = data("pull", NAME), data("pull", NAME)
    assert first["revision"] == "3.0bpw" and Path(first["path"], "model.safetensors").is_file()
    assert first["downloaded"] <= first["bytes"] == second["bytes"] and second["downloaded"] == 0
    words = kakera("pull", NAME).stdout
    assert "all of it was there" in words and f"kakera serve {NAME}" in words
    with pytest.raises(UsageError, match="owner/name or owner/name@revision"):
        kakera("pull", "nothing")
    with pytest.raises(UsageError, match="nothing to download"):
        kakera("pull", "mini")


def test_what_can_not_be_served_is_refused_before_it_is_downloaded(tiny: LocalHub) -> None:
    files = tiny.repositories["owner/tiny"]["main"]
    tiny.repositories["owner/bert"] = {"main": {**files, "config.json": b'{"model_type": "bert"}'}}
    for command in ("pull", "serve", "plan", "info"):
        with pytest.raises(CheckpointError, match="model_type 'bert' is not supported"):
            kakera(command, "owner/bert")
    assert tiny.ranges("model.safetensors") == []


def test_a_format_that_is_not_read_is_refused_by_name_before_it_is_downloaded(tiny: LocalHub) -> None:
    files = tiny.repositories["owner/tiny"]["main"]
    small = {name: content for name, content in files.items() if name != "model.safetensors"}
    fp8 = {**json.loads(Path(files["config.json"]).read_bytes()), "quantization_config": {"quant_method": "fp8"}}
    header = json.dumps({"lm_head.qweight": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    packed = len(header).to_bytes(8, "little") + header + bytes(200_000)
    builds = {
        "fp8": ({**files, "config.json": json.dumps(fp8).encode()}, "the weights are FP8"),
        "gptq": ({**small, "model.safetensors": packed}, "lm_head.qweight .* is AWQ or GPTQ"),
        "gguf": ({**small, "model-Q4_K_M.gguf": b"GGUF"}, "owner/gguf holds model-Q4_K_M.gguf, which is GGUF"),
        "ggufs": ({"Q4/model.gguf": b"GGUF", "README.md": b""}, "owner/ggufs holds Q4/model.gguf, which is GGUF"),
        "pickle": ({**small, "pytorch_model.bin": b"PK"}, "holds pytorch_model.bin, which is a PyTorch pickle"),
    }
    for name, (held, words) in builds.items():
        tiny.repositories[f"owner/{name}"] = {"main": held}
        for command in ("pull", "serve", "plan", "info"):
            with pytest.raises(CheckpointError, match=f"{words}.*; kakera reads plain weights"):
                kakera(command, f"owner/{name}")
    asked = [path for method, path, part in tiny.asked if method == "GET" and not part]
    assert not any(path.endswith((".safetensors", ".gguf", ".bin")) for path in asked)


def test_without_the_hub_what_is_on_this_disk_is_served(tiny: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(NAME).path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(NAME).path == path and read_shape(NAME).headers
    with pytest.raises(CheckpointError, match=r"tiny could not be fetched .*HF_HUB_OFFLINE is set, .*kakera models"):
        resolve_model("owner/tiny")
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"Only a part of it is on this disk: .* lacks tokenizer.json"):
        resolve_model(NAME)


def test_models_lists_what_is_whole_broken_and_begun(tiny: LocalHub, tiny_model: Path, tmp_path: Path) -> None:
    whole = resolve_model(NAME).path
    (resolve_model("owner/tiny").path / "tokenizer.json").unlink()
    (tmp_path / "hub" / "models--owner--lost").mkdir()
    given = tmp_path / "given"
    shutil.copytree(tiny_model, given / "mine")
    (given / "nothing").mkdir()
    found = data("models", str(given), "--gpus", "cpu:4GB")
    rows = {row["name"]: row for row in found["models"]}
    assert set(rows) == {"mini", str(given / "mine"), "owner/tiny", NAME}
    row = rows[NAME]
    assert (row["path"], row["fits"], row["problem"], row["context"]) == (str(whole), True, "", 4096)
    assert row["source"]["revision"] == "3.0bpw" and row["format"] == "plain 16 bits" and row["last_used"][:2] == "20"
    assert row["bytes"] > 600_000 < rows[str(given / "mine")]["bytes"]
    assert "lacks tokenizer.json" in (problem := rows["owner/tiny"]["problem"]) and "kakera pull owner/tiny" in problem
    assert "models--owner--lost" in found["broken"][0]
    data("pull", "owner/tiny")  # as it said
    table = kakera("models", "--gpus", "4GB").stdout
    assert "kakera pull" not in table and NAME in table
    with pytest.raises(UsageError, match="no such directory"):
        kakera("models", str(tmp_path / "none"))


def test_a_name_that_looks_like_markup_is_a_name(hub: LocalHub, tmp_path: Path) -> None:
    given = tmp_path / "a[" / "b] [red]"
    given.mkdir(parents=True)
    (given / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["models", str(tmp_path / "a["), "--gpus", "cpu:4GB"], env={"COLUMNS": "400"})
    assert result.exit_code == 0 and result.output.count("a[/b] [red]") >= 2


def test_models_says_what_does_not_fit(hub: LocalHub) -> None:
    (row,) = data("models", "--gpus", "cpu:1GB")["models"]
    assert row["fits"] is False and not row["problem"]


@pytest.mark.parametrize(
    ("gpus", "chosen", "second"),
    [
        ("rtx5090", "EschaLabs/Qwen3.8-27B-Escha-W2", "mini"),
        ("rtx3070", "mini", "EschaLabs/Qwen3.8-27B-Escha-W2"),
        ("cpu:8GB", "mini", "EschaLabs/Qwen3.8-27B-Escha-W2"),
        ("cpu:900GB", "mini", "EschaLabs/Qwen3.8-27B-Escha-W2"),
    ],
)
def test_up_chooses_the_best_that_fits_and_asks_no_network(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, gpus: str, chosen: str, second: str
) -> None:
    monkeypatch.setattr(devices, "host_memory", lambda: (64 * 10**9, 4 * 10**9))
    found = data("up", "--dry-run", "--gpus", gpus)
    assert (found["choice"]["name"], found["runner_up"]) == (chosen, second)
    assert found["choice"]["context"] >= 4096 and not found["choice"]["against"]
    names = {found["choice"]["name"], *(other["name"] for other in found["others"])}
    assert names == {checkpoint.name for checkpoint in PUBLISHED}
    unserved = {checkpoint.name for checkpoint in PUBLISHED if checkpoint.unserved}
    assert all(other["against"] for other in found["others"] if other["name"] in unserved)
    assert found["command"].startswith(f"kakera serve {chosen}") and hub.asked == []
    lines = kakera("up", "--dry-run", "--gpus", gpus).stdout.splitlines()
    beginnings = [line.split(" ")[0] for line in lines if not line.startswith(" ")]
    assert beginnings[:3] == ["Machine:", "Choice:", "Runner-up:"] and lines[-1].startswith("The same by hand: kakera")
    assert any(line.startswith("Download: 10.15 GB into ") for line in lines) is (chosen != "mini")


def test_the_published_checkpoints_are_planned_and_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for checkpoint in PUBLISHED:
        assert checkpoint.name in page and (checkpoint.shape or checkpoint.unserved)
        if checkpoint.bytes and checkpoint.shape:
            weights = read_shape(checkpoint.shape).weights()
            stored = weights.coded + sum(part.bytes for part in weights.parts)
            assert stored == pytest.approx(checkpoint.bytes, rel=0.03)
            assert f"| {checkpoint.bytes / 1e9:.1f} GB |" in page


def test_up_without_a_card_says_so(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((), ()))
    assert kakera("up", "--dry-run").stdout.startswith("Machine: no NVIDIA card is used; cpu (")


def test_up_pulls_and_serves_with_the_options_of_serve(tiny: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[dict] = []
    monkeypatch.setattr(up, "serve", functools.wraps(up.serve)(lambda **options: served.append(options)))
    given = ["--port", "31999", "--served-name", "a", "--any-name", "--gpus", "cpu:4GB", "--context", "2048"]
    asked = ["up", NAME, *given, "--chunk", "128", "--api-key", "secret"]
    monkeypatch.setattr(up, "check_port", lambda host, port: None)
    before = kakera(*asked, "--dry-run").stdout
    assert "Download: 0.7 MB into " in before and not served and "secret" not in before
    words = before.splitlines()[-1].removeprefix(f"The same by hand: kakera serve {NAME} ").split()
    assert " ".join(words) == "--port 31999 --api-key KEY " + " ".join([*given[2:], "--chunk", "128"])
    kakera(*asked, "--yes")
    (options,) = served
    assert options["model"] == NAME and (options["port"], options["served_name"]) == (31999, ["a"])
    assert (options["context"], options["chunk"], options["gpus"]) == (2048, 128, "cpu:4GB")
    assert None in tiny.ranges("model.safetensors")
    assert f"On this disk: {resolve_model(NAME).path}" in kakera(*asked, "--dry-run").stdout


def test_up_asks_in_a_terminal_before_it_downloads(tiny: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "serve", lambda **options: pytest.fail("nobody agreed"))
    monkeypatch.setattr(up, "check_port", lambda host, port: None)
    monkeypatch.setattr("typer.confirm", lambda question, default: "Download 0.7 MB" not in question)
    download_ = up._download
    monkeypatch.setattr(up, "_download", lambda repository, ask: download_(repository, ask=True))
    assert kakera("up", NAME, "--gpus", "cpu:4GB").exit_code == 1
    assert None not in tiny.ranges("model.safetensors")
    monkeypatch.setattr(download, "room", lambda: (Path("/small"), 10**6))
    with pytest.raises(CheckpointError, match=r"/small has 1\.0 MB free"):
        kakera("up", NAME, "--gpus", "cpu:4GB")


def test_up_says_why_not(hub: LocalHub) -> None:
    for name, words in {
        "qwen3.8-27b": "EschaLabs/Qwen3.8-27B-Escha-W2 can not be served here: the plan does not fit .* cheapest way: ",
        "EschaLabs/Qwen3.6-35B-A3B-Escha-W2": "serves mixtures of experts on a CPU only so far",
        "qwen3.8-flash-next": "not serve it yet",
    }.items():
        with pytest.raises(PlanRefused, match=words):
            kakera("up", name, "--gpus", "8GB")
    with pytest.raises(CheckpointError, match="no such repository"):
        kakera("up", "owner/none", "--gpus", "8GB")


def test_up_takes_a_small_chunk_where_the_default_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(spec, wishes, *more):
        if wishes.chunk != choice.SMALL_CHUNK:
            raise PlanRefused("no", {"reason": "It does not fit.", "ways": [{"change": "--chunk 512"}]})
        return made(spec, wishes, *more)

    made = choice.make_plan
    monkeypatch.setattr(choice, "make_plan", tight)
    checkpoint = next(found for found in PUBLISHED if found.shape == "qwen3.8-27b")
    found = choice.weighed(checkpoint, Wishes(), devices.resolve("24GB"))
    assert found.plan and found.plan.chunk == choice.SMALL_CHUNK
    for wishes, machine in ((Wishes(chunk=2048), "24GB"), (Wishes(), "cpu")):  # asked for; of no use
        against = choice.weighed(checkpoint, wishes, devices.resolve(machine)).against
        assert against == "it does not fit; the cheapest way: --chunk 512"


def test_the_environment_is_heard(tiny: LocalHub, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": tiny.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "kakera.cli", "pull", NAME, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"].startswith(str(tmp_path / "home"))
