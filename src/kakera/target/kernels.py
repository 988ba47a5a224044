"""Which kernel serves a shape: one answer for plans, for whoever loads and routes, and for the ops that launch. Pure.

A dtype is that of activations; None stands for one that no activation has. Where the answer is no, the plain operations
of torch compute, and an op that is called all the same raises ValueError. What a kernel wants of the tensors in hand
beside that (strides, alignment) is the op's own question.
"""

from __future__ import annotations

from typing import Protocol

from kakera.arch.layout import Dtype
from kakera.target.target import Target

OLDEST = (8, 0)  # compute capability: m16n8k16 products
EIGHT = 8  # channels of a load of 16 bytes
SIXTEEN = 16  # the same of int8 rows
WIDEST = 8192  # input channels that a thread block holds in registers
FEW_ROWS, FEW_CHANNELS = 32, 256  # a block of dense_few.cu reads 8 rows for one channel; more is a library's business
MOST_BLOCKS = 65535  # of a grid's second side
GDN_DIM, GDN_TAPS = 128, 4  # of gdn_step.cu: key and value channels of a head, taps
HEAD_DIMS = (128, 256)  # of attention
MOST_GROUPS = 4  # groups of dims with a scale of their own: a quarter of the dims, at least, shares one
CODECS = ("int2", "bf16")  # of pages


class GdnShape(Protocol):
    """Of a Gated DeltaNet layer."""

    @property
    def k_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def v_heads(self) -> int: ...
    @property
    def conv_taps(self) -> int: ...


class PageFormat(Protocol):
    """Of keys and values in pages."""

    @property
    def codec(self) -> str: ...
    @property
    def group(self) -> int: ...  # dims that share a scale, where windowed
    @property
    def windowed(self) -> bool: ...


def is_half(dtype: Dtype | None) -> bool:
    """Whether activations are what every kernel of ours takes."""
    return dtype in ("fp16", "bf16")


def keeps_codes(target: Target, dtype: Dtype | None) -> bool:
    """Whether linears stay as they are stored, decoded in the product. A card that was not asked is new enough."""
    return target.has_cards and (target.capability or OLDEST) >= OLDEST and is_half(dtype)


def serves_small_linear(rows: int, inputs: int, outputs: int, dtype: Dtype | None) -> bool:
    """Whether a kernel of ours multiplies a plain 16-bit weight."""
    return 0 < rows <= FEW_ROWS and outputs <= FEW_CHANNELS and _loads(inputs, dtype) and inputs <= WIDEST


def serves_host_rows(channels: int, dtype: Dtype | None) -> bool:
    """Whether rows of a table in host memory are looked up where they lie, int8 or 16-bit."""
    return channels % SIXTEEN == 0 and is_half(dtype)


def serves_add_norm(rows: int, channels: int, dtype: Dtype | None) -> bool:
    """Whether the sum of residual and delta and its RMS norm are one launch."""
    return _launches(rows, channels, dtype) and channels <= WIDEST


def serves_swiglu(rows: int, channels: int, dtype: Dtype | None) -> bool:
    """Whether silu(gate) up is one launch."""
    return _launches(rows, channels, dtype)


def serves_gdn_step(gdn: GdnShape, dtype: Dtype | None) -> bool:
    """Whether a Gated DeltaNet layer between its projections is one launch. An odd number of value heads would leave
    rows of q | k | v | z | b | a off the 8 bytes that are loaded at once."""
    shapes = (gdn.k_dim, gdn.v_dim, gdn.conv_taps) == (GDN_DIM, GDN_DIM, GDN_TAPS) and gdn.v_heads % 2 == 0
    return shapes and is_half(dtype)


def serves_write(head_dim: int, rotary_dim: int) -> bool:
    """Whether QK-norm, RoPE, rotation, coding and storing of heads are one launch."""
    return head_dim in HEAD_DIMS and rotary_dim in (head_dim, head_dim // 2, head_dim // 4)


def serves_decode(head_dim: int, groups: int) -> bool:
    """Whether decode rows attend over pages of so many groups a head as they lie."""
    return head_dim in HEAD_DIMS and groups <= MOST_GROUPS


def serves_attention(head_dim: int, rotary_dim: int, pages: PageFormat, turned: bool, dtype: Dtype | None) -> bool:
    """Whether attention is kernels: not for other head sizes, small groups and fp32 pages, nor where a rotation file
    has turned the heads by a matrix or graded their codes (`turned`)."""
    groups = head_dim // pages.group if pages.windowed else 1
    shapes = serves_decode(head_dim, groups) and serves_write(head_dim, rotary_dim)
    return shapes and pages.codec in CODECS and not turned and is_half(dtype)


def has_large_tiles(capability: tuple[int, int] | None) -> bool:
    """Whether tensor cores and shared memory are those of Hopper or data-centre Blackwell (192 KB and more; elsewhere
    99): larger tiles, and kernels of cuDNN."""
    return capability is not None and capability[0] in (9, 10)


def _launches(rows: int, channels: int, dtype: Dtype | None) -> bool:
    return 0 < rows <= MOST_BLOCKS and _loads(channels, dtype)


def _loads(channels: int, dtype: Dtype | None) -> bool:
    return channels % EIGHT == 0 and is_half(dtype)
