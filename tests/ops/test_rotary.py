"""Frequencies of RoPE, to the bit those of transformers: of YaRN with every key that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kakera.arch.registry import spec_of
from kakera.model.mixers.full import build
from kakera.ops.rotary import Rotary, frequencies
from kakera.plan.known import KNOWN

SHAPE = {key: value for key, value in KNOWN["qwen3.5-9b-bf16"].items() if key != "rope_parameters"}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "as the family's pages say": YARN,
    "of a short training": {**YARN, "factor": 8, "original_max_position_embeddings": 8192},
    "whole heads": {**YARN, "partial_rotary_factor": 1.0},
    "an eighth of a head": {**YARN, "partial_rotary_factor": 0.125},
    "another base": {**YARN, "rope_theta": 500_000.0, "factor": 2.5},
    "turns": {**YARN, "beta_fast": 48, "beta_slow": 0.5},
    "no rounding of the range": {**YARN, "truncate": False, "beta_fast": 20.0},
    "a range of one": {**YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    "a scale of its own": {**YARN, "attention_factor": 0.75},
    "mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "one mscale alone": {**YARN, "mscale": 0.707},
    "a factor of 1": {**YARN, "factor": 1.0},
    "no factor": {**YARN, "factor": None, "original_max_position_embeddings": 65_536},
    "an older spelling": {**{key: value for key, value in YARN.items() if key != "rope_type"}, "type": "yarn"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_scale_are_those_of_transformers(case):
    configs = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    said = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, **CASES[case]}
    spec = spec_of({**SHAPE, "rope_parameters": said})
    sizes = {key: SHAPE[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")}
    theirs = modeling.Qwen3_5TextRotaryEmbedding(
        configs.Qwen3_5TextConfig(**sizes, num_hidden_layers=4, rope_parameters=dict(said))
    )
    full = build(spec, (), torch.device("cpu"), torch.float32)
    ours = frequencies(spec.rotary_dim, spec.rope_theta, spec.attention.yarn)
    assert torch.equal(ours, theirs.inv_freq) and torch.equal(full._frequencies_F, ours)
    assert full._scale == theirs.attention_scaling
    positions = torch.tensor([0, 1, 63, 64, 8191, 262_143, 1_000_000])
    rotary = Rotary.at(positions, ours, full._scale)
    cos, sin = theirs(torch.zeros(1), positions[None])
    if spec.rotary_dim == 64:  # whose sections of three-dimensional positions are the model's
        assert torch.equal(torch.cat([rotary.cos, rotary.cos], -1)[:, 0], cos[0])
        assert torch.equal(torch.cat([rotary.sin, rotary.sin], -1)[:, 0], sin[0])


@pytest.mark.slow
@pytest.mark.parametrize("sections", [[11, 11, 10], [16, 8, 8], [2, 20, 10]], ids=str)
def test_three_positions_of_a_token_turn_as_in_transformers(sections):
    """To the bit, with unequal axes and with equal ones, where one position says as much."""
    configs = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    said = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": sections}
    spec = spec_of({**SHAPE, "rope_parameters": said, "vision_config": {"depth": 27}, "image_token_id": 7})
    sizes = {key: SHAPE[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")}
    theirs = modeling.Qwen3_5TextRotaryEmbedding(
        configs.Qwen3_5TextConfig(**sizes, num_hidden_layers=4, rope_parameters=dict(said))
    )
    full = build(spec, (), torch.device("cpu"), torch.float32)
    positions = torch.tensor([[0, 5, 900, 70_000], [0, 6, 917, 70_001], [0, 9, 931, 70_063]])
    rotary = Rotary.at(positions, full._frequencies_F, 1.0, full._axes_F)
    cos, sin = theirs(torch.zeros(1), positions[:, None])
    assert torch.equal(rotary.cos[:, 0], cos[0, :, :32]) and torch.equal(rotary.sin[:, 0], sin[0, :, :32])
    assert rotary.cos.is_contiguous() and rotary.sin.is_contiguous()
    equal = Rotary.at(positions[:1].expand(3, -1), full._frequencies_F, 1.0, full._axes_F)
    assert torch.equal(equal.cos, Rotary.at(positions[0], full._frequencies_F).cos)
