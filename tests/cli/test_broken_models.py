"""Model directories and scripts that are damaged: one line that names the file, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kakera.cli.engine import recipe_for, served_model
from kakera.cli.model import resolve_model
from kakera.errors import CheckpointError, UsageError
from kakera.plan.plan import Wishes
from kakera.run.scripted import Script
from tiny_model import CONFIG


def start(model: Path) -> None:
    """What `kakera serve` does before it starts an engine."""
    found = resolve_model(str(model))
    served_model(found)
    recipe_for(found, Wishes(gpus="cpu"), lambda line: None)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"\xd8\xff", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("config.json", json.dumps({**CONFIG, "vocab_size": "many"}).encode(), "vocab"),
        ("config.json", json.dumps({**CONFIG, "hidden_size": None}).encode(), "hidden"),
        ("config.json", json.dumps({**CONFIG, "num_key_value_heads": 0}).encode(), "num_key_value_heads"),
        ("config.json", json.dumps({**CONFIG, "num_hidden_layers": "x"}).encode(), "wrong type"),
        ("config.json", b"[" * 100_000, "nested too deeply"),
        ("config.json", json.dumps({**CONFIG, "model_type": []}).encode(), "wrong type"),
        ("config.json", json.dumps({**CONFIG, "head_dim": float("inf")}).encode(), "head_dim"),
        ("generation_config.json", b"[]", "generation_config.json"),
        ("generation_config.json", b'{"temperature": "hot"}', "temperature is 'hot'"),
        ("model.safetensors", b"", "cut off"),
        ("model.safetensors", b"\xff" * 100, "safetensors"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json"),
        ("chat_template.jinja", b"{% if %}", "template"),
    ],
)
def test_a_damaged_file_is_a_checkpoint_error(
    tiny_model: Path, tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        start(model)


def test_a_cut_shard_is_named(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off"):
        start(model)


def test_cards_that_are_not_there_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine process, when it builds: the server holds no torch that could know."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = recipe_for(resolve_model(str(tiny_model)), Wishes(gpus="12GB"), lambda line: None)
    with pytest.raises(UsageError, match="torch finds no NVIDIA GPU"):
        recipe()


@pytest.mark.parametrize(
    "document",
    [
        {"streams": [{"text": 5}]},
        {"streams": [{"pieces": 5}]},
        {"streams": [{"text": "a", "match": 5}]},
        {"streams": [{"text": "a", "delay_ms": "x"}]},
        {"streams": [{"text": "a", "delay_ms": -5}]},
        {"streams": [{"text": "a"}], "context": "x"},
        {"streams": [{"text": "a"}], "context": 0},
        {"streams": [{"text": "a"}], "tokenizer": 5},
    ],
    ids=str,
)
def test_a_script_with_a_wrong_value_is_a_checkpoint_error(tmp_path: Path, document: dict[str, object]) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError):
        Script.load(path)
