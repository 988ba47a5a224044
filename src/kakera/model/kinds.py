"""Which code loads and computes a block, by the kind that its declaration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kakera.arch.spec import ModelSpec
from kakera.model.blocks import Blocks
from kakera.model.loader import Loader
from kakera.model.mixers import full, gdn
from kakera.model.mlp import dense, experts
from kakera.model.weights import AttentionWeights, GdnWeights, MlpWeights, MoeWeights


@dataclass(frozen=True)
class BlockKind:
    """`load`: (loader, module, declared block) -> its weights. `build`: (model, weights of all blocks of the kind,
    device, dtype of activations) -> what computes them; it chooses the kernels."""

    load: Callable[[Loader, str, Any], Any]
    build: Callable[[ModelSpec, Sequence[Any], torch.device, torch.dtype], Blocks]


KINDS: dict[str, BlockKind] = {
    "gdn": BlockKind(GdnWeights.load, gdn.build),
    "full": BlockKind(AttentionWeights.load, full.build),
    "swiglu": BlockKind(MlpWeights.load, dense.build),
    "moe": BlockKind(MoeWeights.load, experts.build),
}
