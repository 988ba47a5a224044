"""Random weights: the published tensors by name, dtype and shape; repeatable; and no activation explodes or dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_published import PAYLOAD_BYTES, published

from kakera.arch.registry import ARCHITECTURES, spec_of
from kakera.arch.spec import QWEN_NAMES
from kakera.errors import CheckpointError
from kakera.evaluate.session import open_forced
from kakera.plan.known import KNOWN
from kakera.plan.plan import Wishes
from kakera.plan.weights import RANDOM_WEIGHTS, from_checkpoint, from_config, from_tensors
from kakera.weights.checkpoint import Checkpoint
from kakera.weights.synthetic import RandomTensor, random_tensors
from random_model import ESCHA, write_config


def tensors(config: dict, seed: int = 0) -> list[RandomTensor]:
    return random_tensors(spec_of(config), {**config, RANDOM_WEIGHTS: seed}, Path("nowhere"))


def test_the_27b_has_the_published_tensors_and_not_a_byte_more():
    found = tensors(KNOWN["qwen3.8-27b"])
    assert {t.name: (t.dtype, t.shape) for t in found} == {QWEN_NAMES.canonical(n): t for n, t in published().items()}
    assert sum(t.bytes for t in found) == PAYLOAD_BYTES


def _made(config) -> bool:
    """Random weights have Escha's form or 16 bit."""
    method = (config.get("quantization_config") or {}).get("quant_method", "")
    return config["model_type"] in ARCHITECTURES and method in ("", "escha")


@pytest.mark.parametrize("name", [name for name, config in KNOWN.items() if _made(config)])
def test_what_a_plan_counts_for_a_known_name_is_what_is_made(name):
    spec = spec_of(KNOWN[name])
    planned = from_config(spec, KNOWN[name])
    made = from_tensors(tensors(KNOWN[name]), spec, "")
    assert (made.coded, made.embedding, made.decoded) == (planned.coded, planned.embedding, planned.decoded)


def test_the_same_seed_and_name_give_the_same_numbers():
    def read(seed: int) -> dict[str, torch.Tensor]:
        return {t.name: t.read() for t in tensors(ESCHA, seed)}

    first, again, other = read(0), read(0), read(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    code = "model.layers.0.mlp.up_proj.escha_code"
    assert not torch.equal(first[code], other[code])
    assert not torch.equal(first[code], first[code.replace("layers.0", "layers.1")])


@pytest.mark.parametrize("changes", [{}, {"quantization_config": None}, {"tie_word_embeddings": True}])
def test_a_checkpoint_takes_them_for_stored_ones(tmp_path, changes):
    directory = write_config(tmp_path / "m", **changes, random_weights=3)
    checkpoint = Checkpoint.open(directory)
    shapes = {name: tensor.shape for name, tensor in checkpoint.spec.tensors().items()}
    checkpoint.check_complete(shapes)
    name = "model.layers.3.mlp.down_proj"
    weight_OI = checkpoint.linear(name, *shapes[name])
    assert weight_OI.std().item() == pytest.approx(shapes[name][1] ** -0.5, rel=0.03)
    assert checkpoint.kind(name) == ("plain" if changes == {"quantization_config": None} else "escha")
    entries = {entry.name: entry.bytes for entry in checkpoint.entries()}
    assert from_checkpoint(directory, checkpoint.spec).coded == sum(entries.values())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"quantization_config": None}])
def test_64_layers_keep_activations_near_1_and_remember_for_a_sensible_while(tmp_path, changes):
    directory = write_config(tmp_path / "m", **changes, num_hidden_layers=64, random_weights=0)
    forced = open_forced(directory, Wishes(gpus="cpu", kv="fp32"), 256)
    tokens = torch.randint(ESCHA["vocab_size"], (256,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = torch.cat([rows for _, rows in forced.logits(tokens)])
    assert logits.isfinite().all()
    assert 0.5 < logits.std().item() < 2
    states_LSVKD = forced.states.state_LSVKD
    assert states_LSVKD.isfinite().all()
    assert 1e-3 < states_LSVKD.std().item() < 10
    gdn = [site.block for layer in forced.model.weights.layers for site in layer if site.kind == "gdn"]
    rates, biases = torch.cat([block.rate_V for block in gdn]), torch.cat([block.dt_bias_V for block in gdn])
    decays = (rates * torch.nn.functional.softplus(biases)).exp()
    assert 0.1 < decays.min().item() < 0.6 < 0.99 < decays.max().item() < 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "exl3", "bits": 3}}, "not as 'exl3'"),
        ({"hidden_size": 192}, "multiples of 128 channels"),
    ],
)
def test_what_can_not_be_made_is_refused_in_words(changes, words):
    with pytest.raises(CheckpointError, match=words):
        tensors({**ESCHA, **changes})
