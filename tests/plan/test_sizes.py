"""Sizes of states, checkpoints and scratch against numbers worked out by hand."""

from __future__ import annotations

import inspect

from kakera.arch.registry import spec_of
from kakera.arch.shard import of_rank
from kakera.arch.spec import ModelSpec
from kakera.plan import sizes
from kakera.plan.kv_format import KvFormat
from kakera.plan.sizes import (
    checkpoint_bytes,
    held_attention_bytes,
    live_state_bytes,
    margin,
    scratch_bytes,
)
from kakera.target.target import CPU, CUDA, MIB

INT2 = KvFormat("int2")
STATE_27B = 48 * 48 * 128 * 128  # values: 48 layers of 48 heads of 128 x 128
CONV_27B = 48 * 3 * 10240


def test_live_state_of_the_27b(spec_27b: ModelSpec) -> None:
    assert live_state_bytes(spec_27b, CPU) == 4 * STATE_27B + 4 * CONV_27B
    assert live_state_bytes(spec_27b, CUDA) == 4 * STATE_27B + 2 * CONV_27B  # 153.9 MB, as other engines report
    assert live_state_bytes(of_rank(spec_27b, 0, 2), CUDA) == live_state_bytes(spec_27b, CUDA) // 2


def test_checkpoint_of_the_27b(spec_27b: ModelSpec) -> None:
    window = 4 * 64 * 32768 * 2  # four pages of K and V in 16 bit
    assert checkpoint_bytes(spec_27b, INT2, "fp16", CUDA) == 2 * STATE_27B + 2 * CONV_27B + window + 5120 * 2
    assert checkpoint_bytes(spec_27b, INT2, "fp32", CPU) == 4 * STATE_27B + 4 * CONV_27B + window + 5120 * 4


def test_dense_kv_needs_no_window_in_a_checkpoint(spec_27b: ModelSpec) -> None:
    assert checkpoint_bytes(spec_27b, KvFormat("bf16"), "fp16", CUDA) == 2 * STATE_27B + 2 * CONV_27B + 5120 * 2


def test_model_without_gdn_has_no_state() -> None:
    spec = spec_of(
        {
            "model_type": "qwen3",
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_theta": 1e7,
        }
    )
    assert live_state_bytes(spec, CPU) == 0
    assert checkpoint_bytes(spec, KvFormat("bf16"), "fp32", CPU) == 128 * 4


def test_scratch_knows_no_context_and_grows_with_the_chunk(spec_27b: ModelSpec) -> None:
    assert "context" not in inspect.signature(scratch_bytes).parameters
    half = of_rank(spec_27b, 0, 2)
    small, large = (scratch_bytes(half, INT2, chunk, 8, CUDA) for chunk in (2048, 8192))
    assert small < large < 4 * small
    assert small < scratch_bytes(spec_27b, INT2, 2048, 8, CUDA)


def test_a_gpu_without_attention_kernels_needs_scratch_of_its_own(spec_27b: ModelSpec) -> None:
    """Queries of 24 heads of 256 for 8,200 tokens: 201 MB in float32, eight of them at once."""
    kernels, plain = (scratch_bytes(spec_27b, INT2, 8192, 8, CUDA, plain=plain) for plain in (False, True))
    assert plain > 8 * 8200 * 24 * 256 * 4 > kernels
    on_cpu = {scratch_bytes(spec_27b, INT2, 512, 8, CPU, plain=plain) for plain in (False, True)}
    assert len(on_cpu) == 1


def test_margin_keeps_a_12_gb_card_below_the_line_where_it_spills() -> None:
    assert 12227 * MIB - margin(12227 * MIB) < 11830 * MIB


def test_attention_on_a_gpu_holds_its_scratch_beside_all_others(spec_27b: ModelSpec) -> None:
    held = held_attention_bytes(spec_27b, INT2, 8192, 8)
    unpacked, band = 2 * 65536 * 256 * 2, (8192 + 4 * 64) * 2 * 4 * 256 * 2
    queries = 8192 * 6 * (256 * (2 + 4) + 4)  # of one KV head, fp16, and their sums
    own_band = (8192 + 4 * 4 * 64) * 2 * 256 * 2
    decode = (170 + 8 * 6 * 4) * 8 * 258 * 4
    assert held == unpacked + band + queries + own_band + decode
    whole = scratch_bytes(spec_27b, INT2, 2048, 8, CUDA)
    assert whole > held_attention_bytes(spec_27b, INT2, 2048, 8) + sizes.decoded_bytes(spec_27b)
