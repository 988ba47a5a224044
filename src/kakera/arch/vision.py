"""The vision tower of the Qwen3.5 family: its sizes and tensors, and how images enter the text model. No torch.

One tower serves a whole family; only the width of its last linear differs. An image of H x W pixels, multiples of
patch x merge = 32, becomes (H / 32) x (W / 32) tokens of the text model. Source: transformers' Qwen3_5VisionModel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kakera.arch import rope
from kakera.arch.computed import Computed
from kakera.arch.config import Config, positive, short
from kakera.arch.tensors import Tensor, small
from kakera.errors import CheckpointError

PREFIX = "model.visual."
COLOURS = 3
COMPUTED: Computed = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "in_channels": (COLOURS,),
    "deepstack_visual_indexes": ([],),
}


@dataclass(frozen=True)
class VisionSpec:
    """`out`: width of the text model. `side`: learned positions stand on a square grid of so many a side. `token`: the
    id that stands for a part of an image in a prompt. `axes`: for each pair of channels that turn in the text model's
    attention, which position turns it: 0 time, 1 row, 2 column."""

    depth: int
    hidden: int
    heads: int
    mlp: int
    out: int
    patch: int
    merge: int
    temporal: int
    side: int
    theta: float
    token: int
    axes: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_values(self) -> int:
        """Values of a patch as the tower reads it: colours, frames, rows, columns."""
        return COLOURS * self.temporal * self.patch**2

    @property
    def factor(self) -> int:
        """Pixels of a side of one token."""
        return self.patch * self.merge

    @property
    def merged(self) -> int:
        """Channels of the patches that become one token."""
        return self.hidden * self.merge**2

    @property
    def parameters(self) -> int:
        return sum(tensor.count for tensor in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """All that a stored tower holds, under full names. Nothing codes them: 4,304 is no multiple of 128."""
        hidden, first = self.hidden, (self.hidden, COLOURS, self.temporal, self.patch, self.patch)
        yield small(f"{PREFIX}patch_embed.proj.weight", first, "weight")
        yield small(f"{PREFIX}patch_embed.proj.bias", (hidden,), "weight")
        yield small(f"{PREFIX}pos_embed.weight", (self.side**2, hidden), "weight")
        for i in range(self.depth):
            block = f"{PREFIX}blocks.{i}"
            yield from _norm(f"{block}.norm1", hidden)
            yield from _norm(f"{block}.norm2", hidden)
            yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden)
            yield from _linear(f"{block}.attn.proj", hidden, hidden)
            yield from _linear(f"{block}.mlp.linear_fc1", self.mlp, hidden)
            yield from _linear(f"{block}.mlp.linear_fc2", hidden, self.mlp)
        yield from _norm(f"{PREFIX}merger.norm", hidden)
        yield from _linear(f"{PREFIX}merger.linear_fc1", self.merged, self.merged)
        yield from _linear(f"{PREFIX}merger.linear_fc2", self.out, self.merged)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[Tensor]:
    yield small(f"{name}.weight", (outputs, inputs), "weight")
    yield small(f"{name}.bias", (outputs,), "weight")


def _norm(name: str, channels: int) -> Iterator[Tensor]:
    yield small(f"{name}.weight", (channels,), "scale")
    yield small(f"{name}.bias", (channels,), "weight")


def vision_of(config: Config, rotary_dim: int) -> VisionSpec | None:
    """The tower that a config tells of; None if it tells of none, or of no token that stands for an image.

    Raises CheckpointError for a tower that is not computed, TypeError for a value of another type.
    """
    told, token = config.get("vision_config"), config.get("image_token_id")
    if not isinstance(told, dict) or token is None:
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.size("vocab_size"):
        raise CheckpointError(f"config.json: image_token_id is {short(token)}, which is no token of the vocabulary")
    keys = Config(told)
    keys.refuse_others(COMPUTED)
    side = math.isqrt(positions := keys.size("num_position_embeddings", 2304))
    hidden, heads, out = keys.size("hidden_size", 1152), keys.size("num_heads", 16), config.size("hidden_size")
    if side**2 != positions:
        raise CheckpointError(f"vision_config: {positions} positions stand on no square grid")
    if hidden % heads or (hidden // heads) % 4:
        raise CheckpointError(f"vision_config: {heads} heads of {hidden} channels have no quarters, which turn apart")
    if (said := keys.size("out_hidden_size", out)) != out:
        raise CheckpointError(f"vision_config: out_hidden_size is {said}, and the text model's hidden size {out}")
    return VisionSpec(
        depth=keys.layers("depth", 27),
        hidden=hidden,
        heads=heads,
        mlp=keys.size("intermediate_size", 4304),
        out=out,
        patch=keys.size("patch_size", 16, most=256),
        merge=keys.size("spatial_merge_size", 2, most=16),
        temporal=keys.size("temporal_patch_size", 2, most=16),
        side=side,
        theta=_theta(keys.get("rope_parameters") or {}),
        token=token,
        axes=rope.axes(config, rotary_dim // 2),
    )


def _theta(told: Any) -> float:
    """Of the angles by which a patch's row and column turn its queries and keys."""
    if not isinstance(told, dict):
        raise TypeError(f"vision_config: rope_parameters is {short(told)}")
    if (kind := told.get("rope_type", "axial")) not in ("axial", "default"):
        raise CheckpointError(f"vision_config: rope_type is {short(kind)} (kakera computes 'axial')")
    return positive("rope_theta", told.get("rope_theta", 1e4))
