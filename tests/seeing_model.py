"""A tiny model directory that reads images: the tiny model with a random tower, vision tokens, and a template for them.

A token is 8 x 8 pixels, so images are small. torch is imported when weights are made.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kakera.arch.registry import spec_of
from kakera.contract.images import ImageSpan
from tiny_model import CONFIG, HIDDEN, SPECIAL, byte_tokenizer, write_tiny_model

START, IMAGE, END = 256 + len(SPECIAL), 257 + len(SPECIAL), 258 + len(SPECIAL)  # ids of the vision tokens
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
FACTOR = 8  # pixels of a side of a token
TOWER = {
    "model_type": "qwen3_5_vision",
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 68,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": HIDDEN,
}
SEEING: dict[str, Any] = {**CONFIG, "vision_config": TOWER, "image_token_id": IMAGE}
PREPROCESSOR = {
    "size": {"shortest_edge": 256, "longest_edge": 65536},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 3,
}
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for item in m.content -%}"
    "{%- if 'image' in item or 'image_url' in item or item.type == 'image' -%}"
    "{%- if m.role == 'system' -%}{{ raise_exception('System message cannot contain images.') }}{%- endif -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in item -%}{{- item.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def write_seeing_model(directory: Path, seed: int = 0) -> None:
    import torch
    from safetensors.torch import save_file

    from tiny_weights import random_tensors

    write_tiny_model(directory, seed)
    tower, generator = spec_of(SEEING).vision, torch.Generator().manual_seed(seed)
    assert tower is not None
    tensors = {
        t.name: torch.randn(t.shape, generator=generator) * (t.shape[-1] ** -0.5 if len(t.shape) > 1 else 0.3)
        + (1.0 if t.values == "scale" else 0.0)
        for t in tower.tensors()
    }
    found = {**random_tensors(seed), **{name: tensor.bfloat16() for name, tensor in tensors.items()}}
    save_file(found, directory / "model.safetensors")
    tokenizer = byte_tokenizer()
    plain = {key: value for key, value in tokenizer["added_tokens"][0].items() if key not in ("id", "content")}
    tokenizer["added_tokens"] += [{"id": START + i, "content": name, **plain} for i, name in enumerate(VISION_TOKENS)]
    for name, content in (
        ("config.json", SEEING),
        ("tokenizer.json", tokenizer),
        ("preprocessor_config.json", PREPROCESSOR),
    ):
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def picture(seed: int, rows: int, columns: int, start: int = 0) -> ImageSpan:
    """Noise of so many tokens."""
    pixels = random.Random(seed).randbytes(3 * rows * columns * FACTOR**2)
    return ImageSpan(start, rows, columns, seed.to_bytes(32, "big"), pixels)


def prompt_of(*parts: tuple[int, ...] | ImageSpan) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Tokens of text and images one behind the other, and where the images are."""
    tokens: list[int] = []
    images: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, ImageSpan):
            images.append(ImageSpan(len(tokens) + 1, part.rows, part.columns, part.digest, part.pixels))
            tokens += [START, *[IMAGE] * part.tokens, END]
        else:
            tokens += part
    return tuple(tokens), tuple(images)
