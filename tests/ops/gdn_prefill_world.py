"""One Gated DeltaNet layer's prefill with random weights: what the kernels and the plain path make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.ops.activation import sigmoid, silu, softplus
from kakera.ops.conv import causal_conv, conv_tail
from kakera.ops.gated_delta import gated_delta_recurrent
from kakera.ops.gated_delta_chunk import gated_delta_chunk
from kakera.ops.gdn_prefill import StateSave, gdn_prefill
from kakera.ops.norm import l2_norm, rms_norm_gated

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TINY = GdnSpec(k_heads=1, v_heads=2, k_dim=16, v_dim=16, conv_taps=4)
EPS = 1e-6
PAD = 8  # columns behind those that are read


@dataclass
class Result:
    y_NX: Tensor
    state_VKD: Tensor
    conv_WC: Tensor


class World:
    """Inputs of a span as a trained layer's: most heads forget slowly, gates of every size, a state from before."""

    def __init__(self, spec: GdnSpec, tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        self.spec = spec
        made = torch.Generator(DEVICE).manual_seed(seed + tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made, device=DEVICE)

        width = spec.conv_channels + spec.v_heads * (spec.v_dim + 2)
        padded = torch.full((tokens, width + PAD), float("nan"), dtype=dtype, device=DEVICE)
        self.mixed = padded[:, :width]
        self.mixed.copy_(normal(tokens, width))
        self.mixed[:, -spec.v_heads :] -= 2.0
        self.columns = normal(spec.conv_taps - 1, spec.conv_channels).to(dtype)
        self.state = normal(spec.v_heads, spec.k_dim, spec.v_dim) * 0.3
        self.conv_KC = normal(spec.conv_taps, spec.conv_channels)
        self.rate_V = -torch.logspace(-3, 1, spec.v_heads, device=DEVICE)
        self.dt_bias_V = normal(spec.v_heads)
        self.scale_D = 1 + 0.1 * normal(spec.v_dim)

    def first(self, tokens: int) -> World:
        """The same world's first tokens."""
        part = object.__new__(World)
        part.__dict__.update(self.__dict__, mixed=self.mixed[:tokens])
        return part

    def save(self, tokens: int, dtype: torch.dtype = torch.float32) -> StateSave:
        empty = torch.full(self.state.shape, float("nan"), dtype=dtype, device=DEVICE)
        return StateSave(tokens, empty, torch.full_like(self.columns, float("nan")))

    def run(self, saves: Sequence[StateSave] = (), cuts: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """By the kernels: y, and the state and columns after the last token; cut in several spans if wanted."""
        state, columns = self.state.clone(), self.columns.clone()
        parts = [
            gdn_prefill(self.mixed[begin:end], self, self.spec, EPS, state, columns, saves)
            for begin, end in pairwise([0, *cuts, len(self.mixed)])
        ]
        return torch.cat(parts), state, columns

    def plain(self, recurrent: bool = True) -> Result:
        """In float32, y not rounded at the end."""
        spec, C, X = self.spec, self.spec.conv_channels, self.spec.v_heads * self.spec.v_dim
        qkv, z, b, a = torch.split(self.mixed, [C, X, spec.v_heads, spec.v_heads], dim=1)
        conv = silu(causal_conv(qkv.float(), self.columns, self.conv_KC))
        qk, v = torch.split(conv, [2 * spec.k_heads * spec.k_dim, X], dim=1)
        q, k = l2_norm(qk.view(-1, 2, spec.k_heads, spec.k_dim)).unbind(1)
        g = softplus(a.float() + self.dt_bias_V) * self.rate_V
        rule = gated_delta_recurrent if recurrent else gated_delta_chunk
        v = torch.unflatten(v, 1, (spec.v_heads, spec.v_dim))
        o, state = rule(q * spec.k_dim**-0.5, k, v, g, sigmoid(b), self.state)
        y = rms_norm_gated(o, torch.unflatten(z.float(), 1, (spec.v_heads, spec.v_dim)), self.scale_D, EPS)
        return Result(y.flatten(1), state, conv_tail(qkv, self.columns))


def relative(ours: Tensor, plain: Tensor) -> float:
    """Of the norms."""
    ours, plain = ours.double(), plain.double()
    return ((ours - plain).norm() / plain.norm()).item()


def check(
    world: World, saves: Sequence[StateSave] = (), recurrent: bool = True, bound: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """Below what bf16 activations cost (1.7e-3); a bf16 y is rounded twice itself, and the interpreter truncates."""
    y, state, columns = world.run(saves)
    plain = world.plain(recurrent)
    rounding = 0.0 if y.dtype == torch.float16 else 3e-3 if DEVICE.type == "cuda" else 7e-3
    figures = relative(y, plain.y_NX), relative(state, plain.state_VKD)
    print(f"{world.spec}, {len(y)} tokens: y {figures[0]:.1e}, state {figures[1]:.1e}")
    assert figures[0] <= bound + rounding and figures[1] <= bound, figures
    assert torch.equal(columns, plain.conv_WC)
    for save in saves:
        part = world.first(save.tokens).plain(recurrent)
        assert relative(save.state_VKD, part.state_VKD) <= bound
        assert torch.equal(save.conv_WC, part.conv_WC)
    return y, state, columns
