"""Chunk form = token by token; the step = one token; cuts on the grid change no bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.arch.blocks import GdnSpec
from kakera.ops import gated_delta_chunk as chunk_module
from kakera.ops.gated_delta import gated_delta_recurrent, gated_delta_step
from kakera.ops.gated_delta_chunk import gated_delta_chunk
from kakera.ops.norm import l2_norm
from kakera.target.kernels import serves_gdn_step


def inputs(count: int, J: int = 2, V: int = 6, K: int = 32, D: int = 16, seed: int = 0, forget: float = 0.3):
    torch.manual_seed(seed)
    q, k = l2_norm(torch.randn(2, count, J, K))
    g, beta = -torch.rand(count, V) * forget, torch.rand(count, V)
    return (q * K**-0.5, k, torch.randn(count, V, D), g, beta), torch.randn(V, K, D)


@settings(max_examples=12)
@given(
    count=st.integers(1, 200),
    heads=st.sampled_from([(1, 1), (2, 6), (3, 3)]),
    forget=st.sampled_from([0.0, 0.3, 20.0]),
    seed=st.integers(0, 99),
)
def test_chunks_equal_the_recurrence(count: int, heads: tuple[int, int], forget: float, seed: int):
    args, state = inputs(count, *heads, seed=seed, forget=forget)
    before = state.clone()
    output, after = gated_delta_chunk(*args, state)
    expected, expected_after = gated_delta_recurrent(*args, state)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, expected_after, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, before)


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_a_cut_on_the_grid_changes_no_bit(cut: int):
    args, state = inputs(230)
    whole, after = gated_delta_chunk(*args, state)
    first, middle = gated_delta_chunk(*(x[:cut] for x in args), state)
    second, end = gated_delta_chunk(*(x[cut:] for x in args), middle)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(end, after)


@pytest.mark.parametrize("size", [128, 1024])
def test_ranges_of_several_chunks_at_once(monkeypatch: pytest.MonkeyPatch, size: int):
    args, state = inputs(230)
    expected, after = gated_delta_recurrent(*args, state)
    monkeypatch.setattr(chunk_module, "CPU_RANGE", size)
    output, end = gated_delta_chunk(*args, state)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, after, rtol=1e-4, atol=1e-5)


def test_a_step_of_several_sequences_equals_the_recurrence_of_each():
    rows = [inputs(1, seed=seed) for seed in range(3)]
    pool = torch.randn(5, *rows[0][1].shape)
    untouched, slots = pool.clone(), [4, 0, 2]
    for slot, (_, state) in zip(slots, rows, strict=True):
        pool[slot] = state
    output = gated_delta_step(*(torch.cat(x) for x in zip(*(args for args, _ in rows), strict=True)), pool, slots)
    for b, (args, state) in enumerate(rows):
        expected, after = gated_delta_recurrent(*args, state)
        torch.testing.assert_close(output[b], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool[slots[b]], after, rtol=1e-5, atol=1e-6)
    assert torch.equal(pool[[1, 3]], untouched[[1, 3]])


def test_rows_that_a_kernel_can_not_load_have_none():
    """Eight bytes at once: with an odd number of value heads the b and a behind z leave the next row off them."""
    spec = GdnSpec(k_heads=1, v_heads=2, k_dim=128, v_dim=128, conv_taps=4)
    assert serves_gdn_step(spec, "bf16") and not serves_gdn_step(spec, "fp32")
    assert not serves_gdn_step(replace(spec, v_heads=3), "bf16")
    assert not serves_gdn_step(replace(spec, k_dim=64), "bf16")
