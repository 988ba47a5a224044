"""The vision tower: from the pixels of one image to the embeddings of its tokens.

Shape letters: Y, X pixels of a side; N patches, those that become one token side by side; H hidden, I of the MLP, D of
a head; M patches of one token. Attention is full within the image, so images never mix and each has the same bits
alone. Source: transformers' Qwen3_5VisionModel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kakera.arch.vision import COLOURS, PREFIX, VisionSpec
from kakera.errors import CheckpointError
from kakera.ops.rotary import Rotary, frequencies, rotate
from kakera.target.as_torch import is_card
from kakera.weights.checkpoint import Checkpoint

EPS = 1e-6
PIECE = 1024  # patches that an MLP computes, or a rotation turns, at once
HEADS = 4  # that attend at once


@dataclass(frozen=True)
class Affine:
    """weight_OI and bias_O of a linear, or the scale and bias of a layer norm."""

    weight: Tensor
    bias: Tensor

    def linear(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight, self.bias)

    def norm(self, x_NH: Tensor) -> Tensor:
        return F.layer_norm(x_NH, self.weight.shape, self.weight, self.bias, EPS)

    def to(self, device: torch.device) -> Affine:
        return Affine(self.weight.to(device, non_blocking=True), self.bias.to(device, non_blocking=True))


@dataclass(frozen=True)
class TowerBlock:
    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine

    def mlp(self, x_NH: Tensor) -> Tensor:
        return self.fc2.linear(F.gelu(self.fc1.linear(self.norm2.norm(x_NH)), approximate="tanh"))

    def to(self, device: torch.device) -> TowerBlock:
        """Itself, if it is there."""
        return TowerBlock(*(part.to(device) for part in vars(self).values()))


@dataclass(frozen=True)
class TowerWeights:
    """Blocks and the merger's linears may lie on the host, the rest is on the device. `patch`: the first convolution
    as a linear, [H, values of a patch]; `positions_GH`: the learned grid, flat."""

    patch: Affine
    positions_GH: Tensor
    blocks: tuple[TowerBlock, ...]
    norm: Affine
    fc1: Affine
    fc2: Affine


class Tower:
    """`device`: computes, and holds what is not streamed."""

    def __init__(self, spec: VisionSpec, weights: TowerWeights, device: torch.device):
        self.spec, self.weights, self.device = spec, weights, device
        self._levels = _levels().to(device, weights.patch.weight.dtype)
        self._frequencies_F = frequencies(spec.head_dim // 2, spec.theta).to(device)

    @staticmethod
    def load(
        checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu", *, on_host: bool = False
    ) -> Tower:
        """Read the tower of a checkpoint. `on_host`: blocks and the merger's linears stay in host memory (pinned
        beside a GPU) and come to the device one by one for every image. Raises CheckpointError for one that is not
        there, or not whole."""
        spec, device = checkpoint.spec.vision, torch.device(device)
        if spec is None:
            raise CheckpointError(f"{checkpoint.directory}: its config.json tells of no vision tower")
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        if missing := [name for name in shapes if not checkpoint.has(name)]:
            raise CheckpointError(
                f"{checkpoint.directory}: {len(missing)} of the vision tower's {len(shapes)} tensors are missing, "
                f"such as {missing[0]}"
            )

        def affine(name: str, host: bool = False) -> Affine:
            where = torch.device("cpu") if host else device
            read = (checkpoint.tensor(full, shapes[full], dtype, where) for full in _leaves(name))
            weight, bias = (tensor.pin_memory() if host and is_card(device) else tensor for tensor in read)
            return Affine(weight.flatten(1) if weight.dim() > 1 else weight, bias)

        names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
        weights = TowerWeights(
            patch=affine("patch_embed.proj"),
            positions_GH=checkpoint.tensor(grid := f"{PREFIX}pos_embed.weight", shapes[grid], dtype, device),
            blocks=tuple(TowerBlock(*(affine(f"blocks.{i}.{n}", on_host) for n in names)) for i in range(spec.depth)),
            norm=affine("merger.norm"),
            fc1=affine("merger.linear_fc1", on_host),
            fc2=affine("merger.linear_fc2", on_host),
        )
        return Tower(spec, weights, device)

    @torch.inference_mode()
    def encode(self, pixels: bytes, rows: int, columns: int) -> Tensor:
        """Embeddings [rows x columns, width of the text model] of an image of so many tokens, row by row, in the
        weights' dtype and on the device. `pixels`: uint8 [Y, X, 3] as bytes, of `factor` pixels a token."""
        factor, weights = self.spec.factor, self.weights
        raw = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(rows * factor, columns * factor, COLOURS)
        row_N, column_N = self._grid(rows * self.spec.merge, columns * self.spec.merge)
        x_NH = weights.patch.linear(self.patches(raw.to(self.device)))
        x_NH = x_NH + self._positions(row_N, column_N).to(x_NH.dtype)
        rotary = self._rotary(row_N, column_N)
        for stored in weights.blocks:
            block = stored.to(self.device)
            x_NH = x_NH + block.proj.linear(self._attend(block.qkv.linear(block.norm1.norm(x_NH)), rotary))
            x_NH = x_NH + torch.cat([block.mlp(piece) for piece in torch.split(x_NH, PIECE)])
        merged_MH = weights.norm.norm(x_NH).view(rows * columns, self.spec.merged)
        hidden_MH = F.gelu(weights.fc1.to(self.device).linear(merged_MH))
        return weights.fc2.to(self.device).linear(hidden_MH)

    def patches(self, pixels_YXC: Tensor) -> Tensor:
        """[N, values of a patch] of uint8 pixels in the weights' dtype, to the bit as transformers' processor has them:
        colours to [-1, 1], and a patch of a still image once for each frame."""
        patch, merge, frames = self.spec.patch, self.spec.merge, self.spec.temporal
        rows, columns = (side // (patch * merge) for side in pixels_YXC.shape[:2])
        x = self._levels[pixels_YXC.int()].view(rows, merge, patch, columns, merge, patch, COLOURS)
        x = x.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
        return x.reshape(rows * columns * merge**2, self.spec.patch_values)

    def _grid(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Row and column of each patch in the order of `patches`: block by block of those that become one token."""
        merge = self.spec.merge
        of_blocks = torch.arange(height * width, device=self.device).view(height // merge, merge, width // merge, merge)
        flat_N = of_blocks.permute(0, 2, 1, 3).flatten()
        return flat_N // width, flat_N % width

    def _positions(self, row_N: Tensor, column_N: Tensor) -> Tensor:
        """The learned grid, stretched to the image's with its corners aligned: float32 weights, bilinear."""
        side = self.spec.side
        (top_N, below_N, down_N), (left_N, right_N, over_N) = (_taps(place_N, side) for place_N in (row_N, column_N))
        parts = [
            self.weights.positions_GH[first * side + second] * (one * other)[:, None]
            for first, one in ((top_N, 1 - down_N), (below_N, down_N))
            for second, other in ((left_N, 1 - over_N), (right_N, over_N))
        ]
        return torch.stack(parts, 1).sum(1)

    def _rotary(self, row_N: Tensor, column_N: Tensor) -> Rotary:
        """Rows turn the first half of a head's pairs, columns the second."""
        halves = [place_N.float()[:, None] * self._frequencies_F for place_N in (row_N, column_N)]
        angles_N1D = torch.cat(halves, 1)[:, None]
        return Rotary(angles_N1D.cos(), angles_N1D.sin())

    def _attend(self, qkv_NI: Tensor, rotary: Rotary) -> Tensor:
        """[N, H] of queries, keys and values side by side, which are overwritten: rotated in pieces, because that takes
        six times their bytes, and attended a few heads at a time, which a library may copy to pad them."""
        heads, count = self.spec.heads, len(qkv_NI)
        qkv_NXD = qkv_NI.view(count, 3 * heads, self.spec.head_dim)
        for begin in range(0, count, PIECE):
            piece = slice(begin, begin + PIECE)
            turned = Rotary(rotary.cos[piece], rotary.sin[piece])
            qkv_NXD[piece, : 2 * heads] = rotate(qkv_NXD[piece, : 2 * heads], turned)
        q, k, v = (x_NHD.transpose(0, 1) for x_NHD in torch.split(qkv_NXD, heads, 1))
        out_NHD = torch.empty_like(qkv_NXD[:, :heads])
        for first in range(0, heads, HEADS):
            few = slice(first, first + HEADS)
            attended = F.scaled_dot_product_attention(q[few][None], k[few][None], v[few][None])[0]
            out_NHD[:, few] = attended.transpose(0, 1)
        return out_NHD.flatten(1)


def _leaves(name: str) -> tuple[str, str]:
    return f"{PREFIX}{name}.weight", f"{PREFIX}{name}.bias"


def _levels() -> Tensor:
    """float32 [256]: what each level of a colour becomes, rounded where transformers' processor rounds."""
    return ((torch.arange(256, dtype=torch.float64) * (1 / 255)).float() - 0.5) / 0.5


def _taps(place_N: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of places 0 .. n - 1 on a grid of `side`: the cell before, the one behind, and how far it is between them."""
    count = place_N.max() + 1
    at_N = place_N.float() * (side - 1) / (count - 1).clamp(min=1)
    before_N = at_N.floor()
    first_N = before_N.long()
    return first_N, (first_N + 1).clamp(max=side - 1), at_N - before_N
