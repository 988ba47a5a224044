"""Tiny random models that see, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_world import hybrid_config, save_random

IMAGE, START, END = 7, 8, 9  # ids
TOWER = {
    "model_type": "qwen3_5_vision",
    "depth": 2,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 108,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
}  # heads of 72 channels, as the family's; an MLP of no multiple of 32


def save_seeing(directory: Path, **text: Any) -> Any:
    """A random model with a random tower, whose norms and biases are drawn too; `text`: changes of its config."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = hybrid_config(6, 2, intermediate_size=160, **text)
    told = Qwen3_5Config(
        text_config=config,
        vision_config={**TOWER, "out_hidden_size": config["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=config["vocab_size"],
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = Qwen3_5ForConditionalGeneration(told)
    torch.manual_seed(1)
    return save_random(directory, model)


def pixels_of(seed: int, rows: int, columns: int, factor: int = 8) -> np.ndarray:
    """uint8 [height, width, 3] of so many tokens."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows * factor, columns * factor, 3), dtype=np.uint8)


def patches_of(pixels: np.ndarray, patch: int = 4) -> torch.Tensor:
    """As transformers' processor makes them of an image that needs no resize."""
    height, width, _ = pixels.shape
    x = ((pixels.astype(np.float64) * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
    x = x.reshape(height // (2 * patch), 2, patch, width // (2 * patch), 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return torch.from_numpy(np.stack([x, x], axis=5).reshape(-1, 3 * 2 * patch * patch))
