"""A model that can be planned and shown and nothing else: every other command says so before it downloads or loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flash_next
from kakera.arch.registry import load_spec
from kakera.cli import app
from kakera.cli.model import read_shape, resolve_model
from kakera.errors import Unserved
from kakera.plan import planner
from kakera.plan.known import KNOWN
from kakera.target import devices

WORDS = "kakera can plan Qwen3.8-Flash-Next (qwen4_exp) and not serve it yet: "


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """Four layers of a published build, headers only."""
    directory = tmp_path_factory.mktemp("build")
    flash_next.write_headers(directory)
    return directory


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(flash_next.BUILD))
    return tmp_path


@pytest.mark.parametrize("command", ["serve", "chat", "bench decode", "eval ppl", "bench kernels --spec"])
@pytest.mark.parametrize("name", ["qwen3.8-flash-next", "spec:qwen3.8-flash-next"])
def test_commands_that_compute_refuse_a_known_name(command, name):
    found = CliRunner().invoke(app, [*command.split(), name])
    assert isinstance(found.exception, Unserved), found.output
    assert found.exception.exit_status == 2 and str(found.exception).startswith(WORDS)


def test_commands_that_compute_refuse_a_directory(build, config_alone, tmp_path):
    for directory in (build, config_alone):
        with pytest.raises(Unserved, match="not serve it yet"):
            resolve_model(str(directory))
        found = CliRunner().invoke(app, ["quantize", str(directory), str(tmp_path / "out")])
        assert isinstance(found.exception, Unserved) and not (tmp_path / "out").exists()


def test_a_repository_is_refused_when_its_config_is_there_and_before_its_weights(build, hub):
    hub.repositories["owner/flash-next"] = {"main": _files(build)}
    with pytest.raises(Unserved, match="not serve it yet"):
        resolve_model("owner/flash-next")
    assert not [path for _, path, _ in hub.asked if path.endswith(".safetensors")]


def test_a_repository_is_shown_and_planned_from_headers_also_of_files_that_no_index_names(build, hub):
    files, beside = _files(build), load_spec(build, planned=True).names.beside
    hub.repositories["owner/flash-next"] = {"main": files}
    assert read_shape("owner/flash-next").weights().parts == read_shape(str(build)).weights().parts
    asked = [(path.rsplit("/", 1)[-1], part) for _, path, part in hub.asked if path.endswith(".safetensors")]
    assert {name for name in beside if name in files} <= {name for name, part in asked if part == "bytes=0-100000"}
    assert all(part for _, part in asked)
    hub.repositories["owner/flash-next"] = {"main": {name: held for name, held in files.items() if name not in beside}}
    without = read_shape("owner/flash-next").weights()
    assert {part.name for part in without.parts} == {"experts", "embedding"}
    assert without.source.endswith("; no file holds the n-gram table, which is not counted")


def _files(build: Path) -> dict[str, Path]:
    return {path.name: path for path in build.iterdir()}


def test_plan_answers_from_a_name_a_config_and_headers_alike(config_alone, build):
    def weights(model: str) -> dict[str, int]:
        found = CliRunner().invoke(app, ["plan", model, "--gpus", "48GB", "--host-cache", "0", "--json"])
        data = json.loads(found.stdout)
        return {row["name"]: row["bytes"] for row in data["rows"] if row["meter"] == "load" and row["bytes"]}

    by_name = weights("qwen3.8-flash-next")
    assert by_name["weights"] == pytest.approx(3.3e9, rel=0.03) and by_name["experts"] == 30_670_848_000
    assert weights(str(config_alone)) == by_name
    few = json.loads((build / "config.json").read_text())
    (config_alone / "config.json").write_text(json.dumps(few))
    assert weights(str(build)) == pytest.approx(weights(str(config_alone)), rel=0.002)


def test_plan_says_that_it_is_not_served():
    found = CliRunner().invoke(app, ["plan", "qwen3.8-flash-next", "--gpus", "48GB"], env={"COLUMNS": "200"})
    assert WORDS in found.stdout
    assert re.search(r"GB of weights a token reads 3\.8\d GB on each card and 0\.0 MB from the host", found.stdout)


def test_info_answers_from_a_name_a_config_and_headers_alike(config_alone, build):
    def show(model: str) -> dict:
        return json.loads(CliRunner().invoke(app, ["info", model, "--json"]).stdout)

    by_name = show("qwen3.8-flash-next")
    assert by_name["bytes"] == pytest.approx((3.28 + 30.67 + 1.27 + 26.24 + 0.714) * 1e9, rel=0.01)
    assert by_name["parameters"] == pytest.approx(179.6e9, rel=0.001)  # without the vision tower
    assert by_name["layers"] == {"gdn": 36, "full": 12, "mtp": 1}
    assert by_name["kv_bytes_per_token"] == {"bf16": 24_576 + 768, "int2": 3264 + 768}
    assert {**show(str(config_alone)), "model": None, "path": None} == {**by_name, "model": None, "path": None}
    stored = show(str(build))
    groups = {group["role"]: group for group in stored["groups"]}
    assert groups["layers.*.mlp.experts.gate_up_proj"]["shapes"] == [[512, 1280, 2560]]
    assert groups["layers.*.ple.ple_embedding.ngram_embedding"]["bytes"] == pytest.approx(26.24e9, rel=0.001)
    assert WORDS in CliRunner().invoke(app, ["info", str(build)]).stdout


@pytest.fixture
def experts(hub) -> str:
    """A mixture of experts that a CPU alone computes so far, on the hub."""
    config = json.dumps({**KNOWN["qwen3.6-35b-a3b"], "num_hidden_layers": 4}).encode()
    files = {"config.json": config, "tokenizer.json": b"{}", "model.safetensors": b"\x02\0\0\0\0\0\0\0{}"}
    hub.repositories["owner/experts"] = {"main": files}
    return "owner/experts"


@pytest.mark.parametrize("gpus", ["48GB", "12GB,12GB"])
def test_experts_are_refused_on_cards_before_a_download(hub, experts, gpus, monkeypatch):
    monkeypatch.setattr(planner, "resolve_to_compute", devices.resolve)
    with pytest.raises(Unserved, match=r"mixtures of experts .* on a CPU so far \(--gpus cpu\)"):
        resolve_model(experts, gpus)
    assert not [path for _, path, _ in hub.asked if path.endswith(".safetensors")]


def test_plan_and_info_answer_for_experts_by_name():
    found = CliRunner().invoke(app, ["plan", "qwen3.6-35b-a3b", "--gpus", "16GB"], env={"COLUMNS": "200"})
    assert "on a CPU so far" in found.stdout and re.search(r"experts +│ +9.74 GB │", found.stdout)
    shown = json.loads(CliRunner().invoke(app, ["info", "qwen3.6-35b-a3b", "--json"]).stdout)
    assert round(shown["bytes"] / 1e6) == 12_218 and shown["layers"] == {"gdn": 30, "full": 10, "mtp": 0}
    assert shown["parameters"] == pytest.approx(34.66e9, rel=1e-3)
    assert {group["kind"] for group in shown["groups"] if "experts" in group["role"]} == {"escha"}
