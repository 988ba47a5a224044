"""Model directories and scripts that are damaged: one line that names the file, before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kakera.arch.stored import INDEX
from kakera.cli import app
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


TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12387816\n"


def linked(model: Path, directory: Path, file: str, content: bytes) -> Path:
    """The model with one file of another content."""
    directory.mkdir()
    for path in model.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / file).unlink(missing_ok=True)
    (directory / file).write_bytes(content)
    return directory


@pytest.mark.parametrize("file", [*TEXTS, "model.safetensors", "chat_template.json", "model.safetensors.index.json"])
def test_a_file_that_git_lfs_has_not_fetched_says_so(tiny_model: Path, tmp_path: Path, file: str) -> None:
    model = linked(tiny_model, tmp_path / "model", file, POINTER)
    for other, own in (("chat_template.jinja", "chat_template.json"), ("model.safetensors", INDEX)):
        if file == own:  # read if the other one is not there
            (model / other).unlink()
    with pytest.raises(CheckpointError, match=f"/{file} is a Git LFS pointer, not the file: run `git lfs pull` in "):
        start(model)


@pytest.mark.parametrize("file", TEXTS)
def test_a_byte_order_mark_is_no_matter_and_utf_16_is_named(tiny_model: Path, tmp_path: Path, file: str) -> None:
    text = (tiny_model / file).read_text()
    start(linked(tiny_model, tmp_path / "marked", file, text.replace("\n", "\r\n").encode("utf-8-sig")))
    for i, coding in enumerate(("utf-16", "utf-16-le", "utf-16-be", "utf-32")):
        with pytest.raises(CheckpointError, match=f"/{file} is text in UTF-16 or UTF-32; save it as UTF-8"):
            start(linked(tiny_model, tmp_path / str(i), file, text.encode(coding)))
    with pytest.raises(CheckpointError, match=f"/{file} is not UTF-8 .byte {len(text)} is 0xff"):
        start(linked(tiny_model, tmp_path / "bytes", file, text.encode() + b"\xff"))


@pytest.mark.parametrize("command", ["serve", "chat", "plan", "info", "quantize", "bench decode", "eval ppl"])
def test_every_command_refuses_a_format_that_is_not_read_by_name(
    tiny_model: Path, tmp_path: Path, command: str
) -> None:
    fp8 = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    coded = linked(tiny_model, tmp_path / "coded", "config.json", json.dumps(fp8).encode())
    gguf = linked(tiny_model, tmp_path / "gguf", "model.gguf", b"GGUF")
    (gguf / "model.safetensors").unlink()
    header = json.dumps({"lm_head.qweight": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    packed = linked(tiny_model, tmp_path / "packed", "model.safetensors", content)
    cases = [(coded, "are FP8"), (gguf, "holds model.gguf, which is GGUF"), (gguf / "model.gguf", "is GGUF")]
    if command not in ("serve", "chat"):  # those find it when they plan, behind what they say first
        cases.append((packed, "lm_head.qweight .* is AWQ or GPTQ"))
    for path, words in cases:
        out = [str(tmp_path / "out")] if command == "quantize" else []
        found = CliRunner().invoke(app, [*command.split(), str(path), *out])
        assert isinstance(found.exception, CheckpointError), (path, found.output, found.exception)
        assert re.search(f"{words}.*; kakera reads plain weights", str(found.exception)), path
    with pytest.raises(CheckpointError, match="is AWQ or GPTQ"):
        start(packed)


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
