"""Blocks: what stands in a layer, with the sizes that code needs, its tensors and its states. No torch.

Those here are shared by several architectures; one that only a single architecture has belongs in its file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from kakera.arch import rope
from kakera.arch.config import Config
from kakera.arch.rope import Yarn
from kakera.arch.tensors import Kind, State, Tensor, Values, by_blocks, by_heads, gate, linear, small

# Small and sensitive first (k, v feed a cache that is itself rounded), then whatever writes into the residual stream.
# Escha's published mix (up and down at 3 of 2.47 bits) agrees with the order among the MLP linears.
ATTENTION_V, ATTENTION_K = Kind("attention.v", 10), Kind("attention.k", 20)
MLP_DOWN = Kind("mlp.down", 30, escha=3)
ATTENTION_O, GDN_OUT = Kind("attention.o", 40), Kind("gdn.out", 50)
MLP_UP = Kind("mlp.up", 60, escha=3)
GDN_QKV, ATTENTION_Q, GDN_Z = Kind("gdn.qkv", 70), Kind("attention.q", 80), Kind("gdn.z", 90)
MLP_GATE = Kind("mlp.gate", 100)


class Block(Protocol):
    """One block of a layer, whatever it computes."""

    kind: ClassVar[str]  # which code computes it: a key of the tables in model/
    stream: ClassVar[bool]  # reads and writes the residual stream itself instead of through the residual rule

    @property
    def name(self) -> str:
        """Of its module in the layer."""
        ...

    @property
    def alive(self) -> int:
        """Values of a token that it holds at once beside the stream, for a plan that has no formula for its kind."""
        ...

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """In a model of that width, under names relative to the block's."""
        ...

    def states(self) -> tuple[State, ...]:
        """Of one layer."""
        ...

    def of_rank(self, rank: int, ranks: int) -> Block:
        """The sizes of a rank's share."""
        ...


class Selector(Protocol):
    """Chooses what an attention block reads before it attends; None in its place chooses all."""

    kind: ClassVar[str]

    @property
    def alive(self) -> int:
        """As of a block."""
        ...

    @property
    def tokens(self) -> int:
        """The most that it leaves to be read."""
        ...

    def tensors(self, hidden: int) -> tuple[Tensor, ...]: ...

    def states(self) -> tuple[State, ...]: ...


@dataclass(frozen=True)
class GdnSpec:
    """A Gated DeltaNet block. Head counts, head widths in channels, convolution taps, activation of the output gate."""

    kind: ClassVar[str] = "gdn"
    stream: ClassVar[bool] = False

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_taps: int
    name: str = "linear_attn"
    activation: str = "silu"

    @property
    def conv_channels(self) -> int:
        """Channels of q | k | v, all of which go through the convolution."""
        return 2 * self.k_heads * self.k_dim + self.values

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.v_heads * self.v_dim

    @property
    def state_values(self) -> int:
        """Values of one layer's recurrent state S [v_heads, k_dim, v_dim]."""
        return self.v_heads * self.k_dim * self.v_dim

    @property
    def alive(self) -> int:
        return self.conv_channels + 3 * self.values

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        keys, values = (self.k_heads, self.k_dim), (self.v_heads, self.v_dim)
        channels, heads = by_heads(0, keys, keys, values), by_heads(0, (self.v_heads, 1))
        return (
            linear("in_proj_qkv", self.conv_channels, hidden, GDN_QKV, channels),
            linear("in_proj_z", self.values, hidden, GDN_Z, by_heads(0, values)),
            gate("in_proj_b", self.v_heads, hidden, heads),
            gate("in_proj_a", self.v_heads, hidden, heads),
            linear("out_proj", hidden, self.values, GDN_OUT, by_heads(1, values)),
            small("conv1d.weight", (self.conv_channels, 1, self.conv_taps), "filter", channels),
            small("A_log", (self.v_heads,), "decay", heads),
            small("dt_bias", (self.v_heads,), "step", heads),
            small("norm.weight", (self.v_dim,), "scale"),
        )

    def states(self) -> tuple[State, ...]:
        """S, and the last taps - 1 columns of q | k | v before the convolution."""
        keys, values = (self.k_heads, self.k_dim), (self.v_heads, self.v_dim)
        shape = (self.v_heads, self.k_dim, self.v_dim)
        columns = (self.conv_taps - 1, self.conv_channels)
        return (
            State("state", shape, "slot", "state", "recurrent", by_heads(0, (self.v_heads, 1))),
            State("conv", columns, "slot", "activation", "shift", by_heads(1, keys, keys, values)),
        )

    def of_rank(self, rank: int, ranks: int) -> GdnSpec:
        return replace(self, k_heads=self.k_heads // ranks, v_heads=self.v_heads // ranks)


@dataclass(frozen=True)
class AttentionSpec:
    """A full-attention block with norms of queries and keys. Head counts, channels of a head, how many of them turn and
    how.

    gated: q_proj holds per head head_dim rows of query, then head_dim rows of a sigmoid output gate. `norms`: what the
    values of its norms mean.
    """

    kind: ClassVar[str] = "full"
    stream: ClassVar[bool] = False

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool
    norms: Values
    yarn: Yarn | None = None
    name: str = "self_attn"
    selector: Selector | None = None

    @staticmethod
    def of(config: Config, turning: float, *, gated: bool, norms: Values) -> AttentionSpec:
        """As configs of the family say it. `turning`: the share of a head that turns if the config names none."""
        heads = config.size("num_attention_heads")
        head_dim = config.size("head_dim", config.size("hidden_size") // heads)
        rotary_dim, base = rope.rotary_dim(config, head_dim, turning), rope.theta(config)
        yarn = rope.yarn_of(config, rotary_dim, base)
        kv_heads = config.size("num_key_value_heads")
        return AttentionSpec(heads, kv_heads, head_dim, rotary_dim, base, gated, norms, yarn)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def alive(self) -> int:
        own = ((3 if self.gated else 2) * self.heads + 2 * self.kv_heads) * self.head_dim
        return own + (self.selector.alive if self.selector else 0)

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """Queries go with the KV head that they read."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = width * (2 if self.gated else 1)
        heads = by_heads(0, (self.kv_heads, self.head_dim))
        return (
            linear("q_proj", rows, hidden, ATTENTION_Q, by_heads(0, (self.kv_heads, rows // self.kv_heads))),
            linear("k_proj", kv_width, hidden, ATTENTION_K, heads),
            linear("v_proj", kv_width, hidden, ATTENTION_V, heads),
            linear("o_proj", hidden, width, ATTENTION_O, by_heads(1, (self.kv_heads, self.group * self.head_dim))),
            small("q_norm.weight", (self.head_dim,), self.norms),
            small("k_norm.weight", (self.head_dim,), self.norms),
            *(self.selector.tensors(hidden) if self.selector else ()),
        )

    def states(self) -> tuple[State, ...]:
        """Keys and values by token."""
        shape, heads = (self.kv_heads, self.head_dim), by_heads(0, (self.kv_heads, 1))
        own = tuple(State(name, shape, "page", "codec", "shift", heads) for name in ("k", "v"))
        return own + (self.selector.states() if self.selector else ())

    def of_rank(self, rank: int, ranks: int) -> AttentionSpec:
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks)


@dataclass(frozen=True)
class SwiGlu:
    """down(silu(gate x) * (up x)); `width` channels inside."""

    kind: ClassVar[str] = "swiglu"
    stream: ClassVar[bool] = False

    width: int
    name: str = "mlp"

    @property
    def alive(self) -> int:
        """gate, up and their product."""
        return 3 * self.width

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        return (
            linear("gate_proj", self.width, hidden, MLP_GATE, by_blocks(0, self.width)),
            linear("up_proj", self.width, hidden, MLP_UP, by_blocks(0, self.width)),
            linear("down_proj", hidden, self.width, MLP_DOWN, by_blocks(1, self.width)),
        )

    def states(self) -> tuple[State, ...]:
        return ()

    def of_rank(self, rank: int, ranks: int) -> SwiGlu:
        return replace(self, width=self.width // ranks)
