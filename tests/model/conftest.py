"""Fixtures of the model's tests."""

from __future__ import annotations

import pytest
import torch
from model_world import VOCAB, Harness, hybrid_config, save_model
from torch import Tensor

from kakera.model.qwen3_5 import HybridModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HybridModel:
    """A hybrid model whose channel counts are multiples of 32, as in every published model: bits are compared on it."""
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory, "qwen3_5_text", hybrid_config(6, 2, intermediate_size=160))
    return HybridModel.load(directory)


@pytest.fixture
def harness(tiny: HybridModel) -> Harness:
    return Harness(tiny)


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(3))
