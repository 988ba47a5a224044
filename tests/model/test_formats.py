"""Coded checkpoints through the whole model: the logits of the decoded weights, biases on request, clear refusals."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_world import NO_BIAS, PREFIX, Tensors, mixed, write_by_leaf, write_coded, write_source, write_twin
from model_world import Harness
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from in_process import run
from kakera.cli import app
from kakera.errors import CheckpointError
from kakera.model import reader
from kakera.model.linear import Linear, fused
from kakera.model.load import load_weights
from kakera.model.qwen3_5 import HybridModel
from kakera.model.reader import LinearReader
from kakera.model.weights import AttentionWeights, GdnWeights
from kakera.ops.host_rows import host_rows_reference
from kakera.ops.trellis import TrellisLinear, TrellisScratch
from kakera.weights.checkpoint import Checkpoint

UP = f"{PREFIX}layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Stored:
    directory: Path
    tensors: Tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def escha(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    directory = tmp_path_factory.mktemp("coded") / "escha"
    return Stored(directory, write_coded(source, directory, "escha"))


def logits(directory: Path, tokens: Tensor, **options: bool) -> Tensor:
    return Harness(HybridModel.load(directory, **options)).prefill(tokens[:150], [64])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item() / 10))


@pytest.mark.parametrize("bias", [False, True])
def test_escha_gives_the_logits_of_its_decoded_weights(tmp_path, source, escha, tokens, bias):
    found = Checkpoint.open(escha.directory)
    bits = {int(e.bits_per_weight) for e in found.entries() if e.kind == "escha" and e.shape[0] > 128}
    assert bits == {2, 3}
    assert {found.kind("model.embed_tokens"), found.kind("lm_head")} == {"int8"}
    leaves = found.leaves(UP.replace(PREFIX, "model."))
    assert len({leaves[leaf].path for leaf in leaves.names()}) == 2
    twin = write_twin(source, tmp_path / "twin", escha.tensors, bias)
    close(logits(escha.directory, tokens, escha_bias=bias), logits(twin, tokens))


def test_exl3_gives_the_logits_of_its_decoded_weights(tmp_path, source, tokens):
    tensors = mixed(write_coded(source, tmp_path / "exl3", "exl3"))
    tensors[f"{UP}.bias"] = torch.linspace(-1, 1, 256).half()
    save_file(tensors, tmp_path / "exl3" / "model.safetensors")
    found = Checkpoint.open(tmp_path / "exl3")
    assert {e.kind for e in found.entries()} == {"exl3", "int8", "plain"}
    assert {round(2 * e.bits_per_weight) / 2 for e in found.entries() if e.shape == (256, 128)} >= {2.5, 3.5}
    twin = write_twin(source, tmp_path / "twin", tensors, bias=True)
    close(logits(tmp_path / "exl3", tokens), logits(twin, tokens))


def test_rows_that_stay_on_the_host_are_those_of_the_device(source, escha, monkeypatch):
    """As the loader hands them to what reads them there: int8 as they are stored, others in the model's dtype."""
    monkeypatch.setattr(reader, "HostRows", lambda rows_VH, scale_V, dtype, device: (rows_VH, scale_V))
    for directory, stored in ((source, torch.bfloat16), (escha.directory, torch.int8)):
        expected = HybridModel.load(directory, torch.bfloat16).weights
        checkpoint = Checkpoint.open(directory)
        found = load_weights(checkpoint, torch.bfloat16, torch.device("cpu"), embedding_on_host=True)
        rows_VH, scale_V = found.embedding
        tokens_T = torch.tensor([0, 5, len(rows_VH) - 1])
        assert rows_VH.dtype == stored and rows_VH.device.type == "cpu"
        rows_TH = host_rows_reference(rows_VH, scale_V, tokens_T, torch.bfloat16)
        assert torch.equal(rows_TH, expected.embedding(tokens_T))


def test_linears_of_one_input_stay_coded_each_with_its_own_codebook(tmp_path, source, monkeypatch):
    """What a GPU would launch, with the reference in the kernels' place."""
    save_file(mixed(write_coded(source, tmp_path / "exl3", "exl3")), tmp_path / "exl3" / "model.safetensors")
    found, nothing = Checkpoint.open(tmp_path / "exl3"), torch.empty(0)
    scratch = TrellisScratch(nothing, nothing, nothing, nothing)
    reader = LinearReader(found, found.spec.tensors(), torch.float16, torch.device("cpu"), True, scratch)
    names = [f"model.layers.0.{name}" for name in ("mlp.gate_proj", "mlp.up_proj", "linear_attn.in_proj_qkv")]
    made = reader.projection(names, ["model.layers.0.linear_attn.in_proj_b"])
    launches = [[(part.codebook, part.bits) for part in linear.parts] for linear in made.coded]
    assert launches == [[("mul1", 2.5), ("mul1", 2)], [("mcg", 3)]]

    def into(self, x_TI, y_PTO, scratch):
        for part, y_TO in zip(self.parts, y_PTO, strict=True):
            y_TO.copy_(part.forward(x_TI))

    monkeypatch.setattr(TrellisLinear, "into", into)
    x_TI = torch.randn(5, 128).half()
    expected = [reader.linear(name)(x_TI) for name in (*names, "model.layers.0.linear_attn.in_proj_b")]
    torch.testing.assert_close(made(x_TI), torch.cat(expected, 1), rtol=0, atol=1e-2)


def test_the_switch_adds_every_bias_to_its_own_channels(escha):
    off, on = HybridModel.load(escha.directory), HybridModel.load(escha.directory, escha_bias=True)
    stored = Checkpoint.open(escha.directory, escha_bias=True)
    x_TH = torch.randn(5, off.spec.hidden)

    def own(name: str, channels: int) -> Tensor:
        return Linear(stored.linear(name, channels, 128).half().float(), stored.bias(name, channels))(x_TH)

    for i, layer in enumerate(on.weights.layers):
        name, mixer = f"model.layers.{i}", layer[0].block
        expected = [own(f"{name}.mlp.{part}_proj", 256) for part in ("gate", "up")]
        torch.testing.assert_close(layer[1].block.gate_up(x_TH), torch.cat(expected, 1))
        if isinstance(mixer, AttentionWeights):
            per_head = own(f"{name}.self_attn.q_proj", 256).view(5, 2, 128)  # of each head: query, then gate
            k, v = (own(f"{name}.self_attn.{part}_proj", 128) for part in "kv")
            expected = [per_head[..., :64].flatten(1), k, v, per_head[..., 64:].flatten(1)]
        else:
            assert isinstance(mixer, GdnWeights)
            rows = {"qkv": 256, "z": 128, "b": 2, "a": 2}
            expected = [own(f"{name}.linear_attn.in_proj_{part}", count) for part, count in rows.items()]
        torch.testing.assert_close(mixer.proj_in(x_TH), torch.cat(expected, 1))
        out = "self_attn.o_proj" if isinstance(mixer, AttentionWeights) else "linear_attn.out_proj"
        torch.testing.assert_close(mixer.proj_out(x_TH), own(f"{name}.{out}", 128))
        assert layer[1].block.down.bias_O is not None

    assert stored.bias(NO_BIAS.replace(PREFIX, "model."), 128) is None
    everything = [
        m for layer in off.weights.layers for m in (layer[1].block.gate_up, layer[1].block.down, layer[0].block.proj_in)
    ]
    assert all(linear.bias_O is None for linear in everything)


def test_fused_linears_keep_the_order_and_an_absent_bias_is_zero():
    a, b = Linear(torch.randn(3, 8)), Linear(torch.randn(2, 8), torch.tensor([1.0, 2.0]))
    assert fused([a, b]).bias_O.tolist() == [0, 0, 0, 1, 2]
    assert fused([a, a]).bias_O is None
    x = torch.randn(7, 8)
    torch.testing.assert_close(fused([a, b])(x), torch.cat([a(x), b(x)], 1))
    torch.testing.assert_close(b.rows(torch.tensor([1]))(x), b(x)[:, 1:])


def test_eval_measures_both_ways(escha):
    def measure(*arguments: str) -> dict[str, Any]:
        options = ["--window", "128", "--limit", "1", "--gpus", "cpu", "--kv", "bf16", "--json"]
        result = CliRunner().invoke(app, ["eval", *arguments, *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    model = str(escha.directory)
    off, on = measure("ppl", model), measure("ppl", model, "--escha-bias")
    assert (off["escha_bias"], on["escha_bias"]) == (False, True)
    difference = on["nll"]["mean"] - off["nll"]["mean"]
    assert abs(difference) > 1e-3
    kld = measure("kld", model, "--escha-bias", "--base", model)
    assert kld["kld"]["mean"] > 1e-3
    assert kld["nll_delta"]["mean"] == pytest.approx(difference, abs=1e-4)


def test_the_switch_is_refused_where_there_is_nothing_to_switch_on(source):
    with pytest.raises(CheckpointError, match="no biases on Escha linears"):
        HybridModel.load(source, escha_bias=True)


def unknown_leaf(tensors: Tensors) -> None:
    tensors[f"{UP}.escha_rotation_theta"] = torch.ones(3)


def missing_tensor(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}norm.weight"]


def missing_leaf(tensors: Tensors) -> None:
    del tensors[f"{UP}.escha_rin"]


def extra_tensor(tensors: Tensors) -> None:
    tensors[f"{PREFIX}layers.0.mlp.adapter.weight"] = torch.ones(3)


def extra_leaf(tensors: Tensors) -> None:
    tensors[f"{PREFIX}embed_tokens.weight_zero"] = torch.ones(3)


def nan_scale(tensors: Tensors) -> None:
    tensors[f"{UP}.escha_rout"][7] = torch.nan


DAMAGES: dict[Callable[[Tensors], None], str] = {
    unknown_leaf: r"tensor \S+up_proj\.escha_rotation_theta in \S+00002-of-00002\.safetensors: .*not understood",
    missing_tensor: r"damaged does not fit the model: 1 tensors missing: model\.norm\.weight",
    missing_leaf: r"model\.layers\.0\.mlp\.up_proj\.escha_rin is missing; the module is in \S+safetensors",
    extra_tensor: r"1 tensors extra: model\.layers\.0\.mlp\.adapter\.weight in \S+00002-of-00002\.safetensors",
    extra_leaf: r"tensor \S+embed_tokens\.weight_zero in \S+safetensors: .*not understood",
    nan_scale: r"tensor \S+up_proj\.escha_rout in \S+00002-of-00002\.safetensors contains NaN",
}


def damaged(directory: Path, escha: Stored, damage: Callable[[Tensors], None]) -> Path:
    tensors = {name: tensor.clone() for name, tensor in escha.tensors.items()}
    damage(tensors)
    return write_by_leaf(directory / "damaged", tensors, companions=escha.directory)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_by_tensor_and_file(tmp_path, escha, damage):
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        HybridModel.load(damaged(tmp_path, escha, damage))


def test_a_truncated_shard_is_refused_by_tensor_and_file(tmp_path, escha):
    directory = damaged(tmp_path, escha, lambda tensors: None)
    shard = directory / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors is cut off: \S+ ends at byte \d+"):
        HybridModel.load(directory)
    for command in ("info", "serve"):
        status, errors = kakera(command, directory)
        assert (status, len(errors)) == (1, 1), errors
        assert shard.name in errors[0]


@pytest.mark.parametrize(("command", "damage"), [("info", unknown_leaf), ("serve", nan_scale)], ids=["info", "serve"])
def test_commands_end_with_one_line_and_status_1(tmp_path, escha, command, damage):
    status, errors = kakera(command, damaged(tmp_path, escha, damage))
    assert status == 1, errors
    assert re.search(DAMAGES[damage], errors[-1])
    assert not [line for line in errors if "Traceback" in line]


def kakera(command: str, directory: Path) -> tuple[int, list[str]]:
    """Exit status and lines on stderr."""
    if command == "info":
        done = run(command, str(directory))
        return done.returncode, done.stderr.splitlines()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options = ["--gpus", "cpu", "--port", str(probe.getsockname()[1])]
    line = [sys.executable, "-m", "kakera.cli", command, str(directory), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.splitlines()
