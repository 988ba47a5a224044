"""The one answer to which kernel serves a shape: its borders, and that an op asks with its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from kakera.ops.dense import has_kernel
from kakera.plan.kv_format import KvFormat
from kakera.target import kernels
from kakera.target.as_torch import name_of
from kakera.target.target import CPU, CUDA

HALVES, OTHERS = ("fp16", "bf16"), ("fp32", None)


@dataclass(frozen=True)
class Gdn:
    k_dim: int = 128
    v_dim: int = 128
    v_heads: int = 48
    conv_taps: int = 4


def card(*capability: int):
    return replace(CUDA, capability=capability)


def test_every_kernel_wants_16_bit_activations() -> None:
    def served(dtype):
        yield kernels.keeps_codes(card(9, 0), dtype)
        yield kernels.serves_small_linear(1, 512, 64, dtype)
        yield kernels.serves_host_rows(512, dtype)
        yield kernels.serves_add_norm(1, 512, dtype)
        yield kernels.serves_swiglu(1, 512, dtype)
        yield kernels.serves_gdn_step(Gdn(), dtype)
        yield kernels.serves_attention(256, 64, KvFormat("int2"), False, dtype)

    for dtype in HALVES:
        assert all(served(dtype))
    for dtype in OTHERS:
        assert not any(served(dtype))


def test_codes_stay_where_the_tensor_cores_can_decode_them() -> None:
    kept = {
        c for c in [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)] if kernels.keeps_codes(card(*c), "bf16")
    }
    assert kept == {(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)}
    assert kernels.keeps_codes(CUDA, "bf16"), "a plan is for a card that is not there to be asked"
    assert not kernels.keeps_codes(CPU, "bf16")


def test_borders_of_small_products() -> None:
    for rows, inputs, outputs in [(1, 8, 1), (32, 8192, 256)]:
        assert kernels.serves_small_linear(rows, inputs, outputs, "fp16")
    for rows, inputs, outputs in [(0, 8, 1), (33, 8, 1), (1, 12, 1), (1, 8200, 1), (1, 8, 257)]:
        assert not kernels.serves_small_linear(rows, inputs, outputs, "fp16")


def test_borders_of_pointwise_steps() -> None:
    for rows, channels in [(1, 8), (65535, 8192)]:
        assert kernels.serves_add_norm(rows, channels, "bf16") and kernels.serves_swiglu(rows, channels, "bf16")
    for rows, channels in [(0, 8), (65536, 8), (1, 4)]:
        assert not kernels.serves_add_norm(rows, channels, "bf16")
        assert not kernels.serves_swiglu(rows, channels, "bf16")
    assert kernels.serves_swiglu(1, 17408, "bf16") and not kernels.serves_add_norm(1, 8200, "bf16")


def test_gdn_heads_of_one_size_step() -> None:
    assert kernels.serves_gdn_step(Gdn(), "bf16") and kernels.serves_gdn_step(Gdn(v_heads=2), "fp16")
    for other in (Gdn(k_dim=64), Gdn(v_dim=256), Gdn(conv_taps=3), Gdn(v_heads=3)):
        assert not kernels.serves_gdn_step(other, "bf16")


def test_attention_is_what_is_both_written_and_read() -> None:
    for dim, rotary, codec, group in product(
        (64, 128, 256, 512), (16, 32, 64, 128, 256), ("int2", "bf16", "fp32"), (32, 64, 256)
    ):
        pages = KvFormat(codec, group)
        served = kernels.serves_attention(dim, rotary, pages, False, "bf16")
        groups = dim // group if codec == "int2" else 1
        expected = dim in (128, 256) and rotary in (dim, dim // 2, dim // 4) and groups <= 4 and codec != "fp32"
        assert served == expected, (dim, rotary, pages)
        assert not kernels.serves_attention(dim, rotary, pages, True, "bf16")


def test_large_tiles_are_hoppers_and_data_centre_blackwells() -> None:
    large = [c for c in [None, (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)] if kernels.has_large_tiles(c)]
    assert large == [(9, 0), (10, 0), (10, 3)]


def test_ops_ask_with_the_dtype_and_the_layout_of_their_tensors() -> None:
    x, w = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    assert kernels.serves_small_linear(8, 64, 16, name_of(x.dtype)) and not has_kernel(x, w), "they lie on a CPU"
