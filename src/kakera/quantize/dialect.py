"""How EXL3 and Escha name things: leaves of a coded linear and the quantisation part of the configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kakera.ops.codec.codebook import MCG_MULTIPLIER
from kakera.ops.codec.coded import CodedLinear
from kakera.quantize.recipe import Format, Recipe
from kakera.weights import escha, int8
from kakera.weights.files import StoredTensor


@dataclass(frozen=True)
class Module:
    """A quantised module: its name in the file, rate and stored tensors (names are leaves); of a stack the channels
    are those of one of its `experts`."""

    name: str
    bits: int
    out_channels: int
    in_channels: int
    tensors: tuple[StoredTensor, ...]
    experts: int = 0

    @property
    def coded(self) -> bool:
        return all(tensor.name != int8.MARK for tensor in self.tensors)

    @property
    def weights(self) -> int:
        return max(1, self.experts) * self.out_channels * self.in_channels


def leaves(format: Format, coded: CodedLinear) -> dict[str, Tensor]:
    """The tensors of a coded linear by leaf name."""
    in_scale, out_scale = coded.in_scale.half(), coded.out_scale.half()
    if format == "exl3":
        flag = torch.tensor(MCG_MULTIPLIER - (1 << 32), dtype=torch.int32)  # its presence is what counts
        return {"trellis": coded.code, "suh": in_scale, "svh": out_scale, "mcg": flag}
    numbers = escha.descriptor(coded.half_bits // 2, coded.out_channels, coded.in_channels)
    return {
        "escha_code": coded.code,
        "escha_rin": in_scale,
        "escha_rout": out_scale,
        "escha_config": torch.tensor(numbers, dtype=torch.int32),
    }


def stack_descriptor(bits: int, shape: tuple[int, ...]) -> Tensor:
    """`escha_config` of a stack [E, O, I]."""
    experts, outputs, inputs = shape
    return torch.tensor(escha.descriptor(bits, outputs, inputs, experts), dtype=torch.int32)


def config(recipe: Recipe, modules: list[Module]) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    coded = [m for m in modules if m.coded]
    weights = sum(m.weights for m in coded)
    bits = round(sum(m.bits * m.weights for m in coded) / max(1, weights), 2)
    if recipe.format == "exl3":
        return {
            "quant_method": "exl3",
            "version": "kakera",
            "bits": bits,
            "head_bits": recipe.bits.get("head", 8),
            "calibration": {"rows": 0, "cols": 0},
            "out_scales": "always",
            "codebook": "mcg",
        }
    return {
        "quant_method": "eschamoe" if any(m.experts for m in coded) else "escha",
        "format_version": "2.0",
        "bits": bits,
        "global_config": {"codebook": "cbA", "bits": bits},
        "ignore": ["in_proj_a", "in_proj_b", "lm_head", "embed_tokens"],
        "int8_embedding": True,
        "layer_meta": {
            m.name: {
                "K": m.bits,
                "bits": float(m.bits),
                "in_features": m.in_channels,
                "out_features": m.out_channels,
            }
            for m in coded
        },
    }


def exl3_storage(recipe: Recipe, modules: list[Module]) -> dict[str, Any]:
    """quantization_config.json: the tensors of every coded module."""
    storage = {}
    for m in modules:
        if m.coded:
            stored = {
                f"{m.name}.{t.name}": {"shape": list(t.shape), "n_bytes": t.bytes, "dtype": str(t.torch_dtype)}
                for t in m.tensors
            }
            storage[m.name] = {
                "stored_tensors": stored,
                "quant_format": "exl3",
                "bits_per_weight": m.bits,
                "mcg_multiplier": MCG_MULTIPLIER,
            }
    return {**config(recipe, modules), "tensor_storage": storage}
