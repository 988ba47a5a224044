"""Shapes and machines that the plan's tests share. No file is read and no device is looked at."""

from __future__ import annotations

import pytest

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.plan.known import KNOWN
from kakera.plan.weights import WeightBytes, from_config


@pytest.fixture(scope="session")
def spec_27b() -> ModelSpec:
    return spec_of(KNOWN["qwen3.8-27b"])


@pytest.fixture(scope="session")
def weights_27b(spec_27b: ModelSpec) -> WeightBytes:
    return from_config(spec_27b, KNOWN["qwen3.8-27b"])


@pytest.fixture(scope="session")
def spec_small() -> ModelSpec:
    """A hybrid of the size of the bundled model."""
    return spec_of(SMALL)


SMALL = {
    "model_type": "qwen3_5_text",
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 1536,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1e7,
}


@pytest.fixture(scope="session")
def weights_small(spec_small: ModelSpec) -> WeightBytes:
    return from_config(spec_small, SMALL)
