"""A quantised directory: complete, readable bit for bit, resumable after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.quantize.tiny import cheap_encode, write_tiny

from kakera.errors import CheckpointError, UsageError
from kakera.ops.int8 import int8_weight
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.linear import encode_linear
from kakera.quantize.recipe import Recipe
from kakera.weights import int8
from kakera.weights.checkpoint import Checkpoint

FIXED = {"exl3": 3, "escha": 2.5}


def recipe(source: Path, format: str, **options) -> Recipe:
    return Recipe.for_bits(format, FIXED[format], Checkpoint.open(source).spec, **options)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("format", ["exl3", "escha"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_what_is_written_is_what_is_read(tmp_path, format, prefix, monkeypatch):
    source = write_tiny(tmp_path / "source", prefix)
    coded = {}
    real = encode_linear

    def remember(weight_OI, bits, seed, encode):
        result = real(weight_OI, bits, seed, encode)
        coded[weight_OI.double().sum().item()] = result[0]
        return result

    monkeypatch.setattr("kakera.quantize.convert.encode_linear", remember)
    made = recipe(source, format)
    summary = quantize_checkpoint(source, tmp_path / "out", made, shard_bytes=200_000, encode=cheap_encode)
    plain, found = Checkpoint.open(source), Checkpoint.open(tmp_path / "out")

    assert found.modules() == plain.modules()
    assert {m: found.kind(m) for m in ("model.embed_tokens", "lm_head")} == {
        "model.embed_tokens": "int8",
        "lm_head": "exl3" if format == "exl3" else "int8",
    }
    for report in summary.linears:
        shape = next(e.shape for e in plain.entries() if e.name == report.module)
        weight_OI = plain.linear(report.module, *shape)
        if found.kind(report.module) == "int8":
            expected = int8_weight(*int8.encode(weight_OI), torch.float32)
        else:
            expected = coded[weight_OI.double().sum().item()].weight()
            assert found.coded(report.module, *shape).bits == report.bits == made.bits[report.kind]
        assert torch.equal(found.linear(report.module, *shape), expected)
    for name in (
        "model.norm.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.in_proj_a.weight",
    ):
        module, _, leaf = name.rpartition(".")
        stored = plain.leaves(module)[leaf].shape
        assert torch.equal(found.tensor(name, stored), plain.tensor(name, stored))
        assert found.leaves(module)[leaf].dtype == "BF16"
        assert found.leaves(module)[leaf].name.startswith(prefix)


def test_linears_that_do_not_fit_blocks_of_128_stay_plain_with_a_note(tmp_path):
    source = write_tiny(tmp_path / "source")
    summary = quantize_checkpoint(source, tmp_path / "out", recipe(source, "exl3"), encode=cheap_encode)
    found = Checkpoint.open(tmp_path / "out")
    odd = [f"{layer}.self_attn.{p}_proj" for layer in ("model.layers.1", "mtp.layers.0") for p in "kvo"]
    assert all(found.kind(name) == "plain" for name in odd)
    assert sorted(note.split()[0] for note in summary.notes) == sorted(odd)
    assert "no multiple of 128" in summary.table()


def test_files_and_configs(tmp_path):
    source = write_tiny(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "a", recipe(source, "exl3"), shard_bytes=100_000, encode=cheap_encode)
    quantize_checkpoint(source, tmp_path / "b", recipe(source, "escha"), encode=cheap_encode)
    a, b = tmp_path / "a", tmp_path / "b"
    shards = sorted(a.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size <= 100_000 for path in shards)
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} <= set(contents(a))
    assert not (a / ".unfinished").exists()
    exl3 = json.loads((a / "config.json").read_text())["quantization_config"]
    assert (exl3["quant_method"], exl3["codebook"], exl3["head_bits"]) == ("exl3", "mcg", 6)
    storage = json.loads((a / "quantization_config.json").read_text())["tensor_storage"]
    assert storage["model.layers.0.mlp.up_proj"]["bits_per_weight"] == 3
    assert (b / "model.safetensors").is_file()
    escha = json.loads((b / "config.json").read_text())["quantization_config"]
    assert (escha["quant_method"], escha["int8_embedding"]) == ("escha", True)
    assert escha["layer_meta"]["mtp.fc"] == {"K": 3, "bits": 3.0, "in_features": 256, "out_features": 128}
    report = json.loads((a / "quantization_report.json").read_text())
    assert {linear["kind"] for linear in report["linears"]} >= {"mlp.up", "gdn.qkv", "attention.q", "mtp", "head"}


@pytest.mark.sweep
def test_a_real_search_reaches_the_error_of_its_rate():
    made = torch.Generator().manual_seed(3)
    weight_OI = 0.02 * torch.randn(128, 128, generator=made) * torch.rand(128, 1, generator=made)
    weight_OI[7], weight_OI[:, 9] = 0, 0
    from kakera.ops.codec import codebook
    from kakera.quantize import tail_biting

    def encode(targets, bits):
        return tail_biting.encode(targets, codebook.table("mcg", torch.float32), bits)

    coded, error = encode_linear(weight_OI, 3, 1, encode)
    assert 0.0156 < error < 0.019
    assert coded.weight()[7].eq(0).all()
    assert coded.weight()[:, 9].eq(0).all()
    assert torch.equal(coded.in_scale.half().float(), coded.in_scale)


def test_a_matrix_of_zeros_is_coded_as_zeros():
    coded, error = encode_linear(torch.zeros(128, 256), 2, 1, cheap_encode)
    assert error == 0
    assert coded.weight().eq(0).all()


KILLED = """
import sys, time
from pathlib import Path
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.recipe import Recipe
from kakera.weights.checkpoint import Checkpoint
from tests.quantize.tiny import cheap_encode

def slow(targets, bits):
    time.sleep(0.02)
    return cheap_encode(targets, bits)

source, out = Path(sys.argv[1]), Path(sys.argv[2])
recipe = Recipe.for_bits("exl3", 3, Checkpoint.open(source).spec)
quantize_checkpoint(source, out, recipe, progress=lambda p: print(p.last.module, flush=True), encode=slow)
"""


def test_a_killed_run_resumes_and_ends_with_the_same_bytes(tmp_path):
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    quantize_checkpoint(source, tmp_path / "whole", recipe(source, "exl3"), encode=cheap_encode)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source), str(out)], env=environment, stdout=subprocess.PIPE, text=True
    )
    finished = [process.stdout.readline() for _ in range(4)]
    time.sleep(0.03)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(finished)
    assert not (out / "config.json").exists()

    with pytest.raises(UsageError, match="another source or recipe"):
        quantize_checkpoint(source, out, recipe(source, "exl3", seed=7), encode=cheap_encode)
    resumed = []
    quantize_checkpoint(
        source, out, recipe(source, "exl3"), progress=lambda p: resumed.append(p.resumed), encode=cheap_encode
    )
    assert resumed[:4] == [True] * 4
    assert not resumed[-1]
    assert contents(out) == contents(tmp_path / "whole")


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        quantize_checkpoint(source, out, recipe(source, "exl3"), encode=cheap_encode)
    assert contents(out) == {"thesis.tex": b"precious"}


def test_a_quantised_source_is_refused(tmp_path):
    source = write_tiny(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "a", recipe(source, "exl3"), encode=cheap_encode)
    with pytest.raises(CheckpointError, match="quantise the 16-bit original"):
        quantize_checkpoint(tmp_path / "a", tmp_path / "b", recipe(source, "exl3"), encode=cheap_encode)
