"""A mixture of experts in both formats: what is written is what is read, from every form of the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantize.tiny import cheap_encode
from torch import Tensor

from kakera.arch.registry import load_spec, spec_of
from kakera.arch.weigh import by_tensor, format_of
from kakera.errors import CheckpointError, UsageError
from kakera.model.load import load_weights
from kakera.ops.codec.coded import CodedLinear
from kakera.plan.weights import from_checkpoint
from kakera.quantize import stack
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.linear import encode_linear
from kakera.quantize.recipe import Recipe
from kakera.weights.checkpoint import Checkpoint
from kakera.weights.files import read_header
from kakera.weights.synthetic import random_tensors
from random_model import ESCHA

EXPERTS, PREFIX = 3, "model.language_model."
CONFIG: dict[str, Any] = {
    **{key: value for key, value in ESCHA.items() if key not in ("intermediate_size", "quantization_config")},
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
STACKS = {f"model.layers.0.mlp.experts.{name}_proj": name for name in ("gate_up", "down")}


def write_source(directory: Path, split: bool) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    made = random_tensors(spec_of(CONFIG), {**CONFIG, "random_weights": 3}, Path("m"))
    tensors: dict[str, Tensor] = {}
    for tensor in made:
        name, value = tensor.name, tensor.read()
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name.split(".")[-1])
        if split and parts and ".experts." in name:
            owner = name.rpartition(".")[0]
            for i, expert in enumerate(value):
                chunks = zip(parts, expert.chunk(len(parts)), strict=True)
                tensors |= {f"{owner}.{i}.{part}.weight": chunk.clone() for part, chunk in chunks}
        else:
            tensors[name] = value
    text = {name.replace("model.", PREFIX, 1) if name.startswith("model.") else name: t for name, t in tensors.items()}
    save_file({**text, "mtp.fc.weight": torch.ones(2, 2)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module", params=[False, True], ids=["stacked", "split"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "m", request.param)


def quantised(source: Path, out: Path, format: str, bits: float) -> Checkpoint:
    recipe = Recipe.for_bits(format, bits, load_spec(source))
    quantize_checkpoint(source, out, recipe, encode=cheap_encode)
    return Checkpoint.open(out)


@pytest.mark.parametrize(("format", "bits"), [("exl3", 3), ("escha", 2.5)])
def test_what_is_written_is_what_is_read(tmp_path, source, format, bits, monkeypatch):
    coded: dict[float, CodedLinear] = {}

    def remember(weight_OI, bits, seed, encode):
        found = encode_linear(weight_OI, bits, seed, encode)
        coded[weight_OI.double().sum().item()] = found[0]
        return found

    monkeypatch.setattr(stack, "encode_linear", remember)
    found, plain = quantised(source, tmp_path / "out", format, bits), Checkpoint.open(source)
    found.check_complete(found.spec.tensors())
    for name, kind in STACKS.items():
        for number in range(EXPERTS):
            weight_OI = plain.expert(name, number)
            parts = weight_OI.chunk(2 if format == "exl3" and kind == "gate_up" else 1)
            expected = torch.cat([coded[part.double().sum().item()].weight() for part in parts])
            assert torch.equal(found.expert(name, number), expected)
    assert len({tuple(each.in_scale.tolist()) for each in coded.values()}) == len(coded)  # signs of their own
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = {header.name: header for header in read_header(tmp_path / "out" / "model.safetensors")}
    forms = {name: format_of(held) for name, held in by_tensor(found.spec, stored.values()).items()}
    linears = ("self_attn.q_proj", "mlp.shared_expert.down_proj")
    assert {forms[name] for name in STACKS} == {format}
    assert {forms[f"model.layers.0.{name}"] for name in linears} == {"exl3" if format == "exl3" else "int8"}
    assert {forms[f"model.layers.0.mlp.{name}"] for name in ("gate", "shared_expert_gate")} == {"plain"}
    mlp = f"{PREFIX}layers.0.mlp.experts"
    if format == "exl3":
        assert stored[f"{mlp}.2.up_proj.trellis"].shape == (8, 8, 48)
        storage = json.loads((tmp_path / "out" / "quantization_config.json").read_text())["tensor_storage"]
        assert storage[f"{mlp}.2.up_proj"]["bits_per_weight"] == 3
        assert f"{mlp}.2.up_proj.svh" in storage[f"{mlp}.2.up_proj"]["stored_tensors"]
    else:
        assert config["quant_method"] == "eschamoe" and config["bits"] == 2.33
        assert stored[f"{mlp}.down_proj.escha_code"].shape == (EXPERTS, 8, 8, 48)  # 3 bits, gate and up 2
        assert stored[f"{mlp}.gate_up_proj.escha_code"].shape == (EXPERTS, 8, 16, 32)
        meta = config["layer_meta"][f"{mlp}.gate_up_proj"]
        assert meta == {"K": 2, "bits": 2.0, "in_features": 128, "out_features": 256}
    assert stored["mtp.fc.weight"].shape == (2, 2)


def test_every_form_of_a_source_gives_the_same_weights_and_a_plan_counts_them(tmp_path):
    made = [write_source(tmp_path / name, name == "split") for name in ("stacked", "split")]
    for format in ("exl3", "escha"):
        outs = [tmp_path / f"{format}-{source.name}" for source in made]
        for source, out in zip(made, outs, strict=True):
            quantised(source, out, format, 2)
        tensors = [load_file(out / "model.safetensors") for out in outs]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
        (experts,) = from_checkpoint(outs[0], load_spec(outs[0])).parts
        load_weights(Checkpoint.open(outs[0]), torch.float32, torch.device("cpu"))
        assert experts.bytes == sum(t.nbytes for name, t in tensors[0].items() if ".experts." in name)
        with pytest.raises(CheckpointError, match="quantise the 16-bit original"):
            quantised(outs[0], tmp_path / "again", "exl3", 2)


def test_a_killed_run_goes_on_behind_the_stack_that_was_finished(tmp_path, source, monkeypatch):
    quantised(source, tmp_path / "whole", "exl3", 2)
    calls = 0

    def killed(*arguments):
        nonlocal calls
        calls += 1
        if calls > 2 * EXPERTS + 1:
            raise KeyboardInterrupt
        return encode_linear(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stack, "encode_linear", killed)
        with pytest.raises(KeyboardInterrupt):
            quantised(source, tmp_path / "killed", "exl3", 2)
    assert not (tmp_path / "killed" / "config.json").exists()
    seen = []
    recipe = Recipe.for_bits("exl3", 2, load_spec(source))
    quantize_checkpoint(source, tmp_path / "killed", recipe, progress=seen.append, encode=cheap_encode)
    assert [each.resumed for each in seen if ".experts." in each.last.module] == [True, False]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_escha_codes_experts_alone():
    spec = spec_of(CONFIG)
    recipe = Recipe.for_bits("escha", 2.5, spec)
    assert recipe.bits == {"experts.gate_up": 2, "experts.down": 3}
    assert recipe.mean_bits(spec) == pytest.approx(7 / 3)
    assert Recipe.for_bits("escha", 2, spec, overrides={"experts.gate_up": 3}).bits["experts.gate_up"] == 3
    with pytest.raises(UsageError, match="beside experts escha keeps linears as int8 rows"):
        Recipe.for_bits("escha", 2.5, spec, overrides={"attention.q": 3})
    assert Recipe.for_bits("exl3", 3, spec).bits.keys() >= {"experts.gate_up", "attention.q", "mlp.up", "head"}
